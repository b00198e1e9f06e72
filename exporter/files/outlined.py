"""Calls of modules as functions of a model: with what a file says of its state and its modules."""

from __future__ import annotations

import onnx_ir as ir

from exporter.files.places import Places
from symbolics.graph.boundaries import is_boundary
from symbolics.graph.outline import outline
from symbolics.graph.walk import walk
from symbolics.node.metadata import read_state

__all__ = ["outline_modules"]


def outline_modules(model: ir.Model) -> None:
    """Make functions of what lies between the boundaries of a model, in place."""
    if not any(is_boundary(node) for node in walk(model.graph)):
        return
    keys: dict[str, list[str]] = {}
    for key, entry in (read_state(model.metadata_props) or {}).items():
        keys.setdefault(entry.initializer, []).append(key)
    places = Places(model)
    outline(model, keys, places.written)
