"""Models in the words that onnxruntime's CPU is quickest with, once they are whole (`symbolics.graph.quick` has the passes)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator

import onnx_ir as ir

from exporter.gradient_graph.inference import infer_shapes
from symbolics.graph.quick import SLOW, quicken
from symbolics.graph.walk import walk

__all__ = ["in_quick_words", "quickened_later"]

_later = contextvars.ContextVar("later", default=False)


@contextlib.contextmanager
def quickened_later() -> Iterator[None]:
    """What is exported in this block is differentiated before anybody runs it: gradients are made of the operators as they are."""
    token = _later.set(True)
    try:
        yield
    finally:
        _later.reset(token)


def in_quick_words(model: ir.Model, nodes: Collection[ir.Node] | None = None) -> None:
    """Write slow operators of a model in other words, in place.

    Args:
        model: A model that is whole: no gradient is to be made of it here.
        nodes: Which of its nodes may become others; default: all.
    """
    slow = [node for node in (walk(model.graph) if nodes is None else nodes) if node.op_type in SLOW and node.domain == ""]
    if _later.get() or not slow:
        return
    if any(value is not None and (value.type is None or value.shape is None) for node in slow for value in node.inputs):
        infer_shapes(model, only_where_missing=True)
    quicken(model, nodes)
