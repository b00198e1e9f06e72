"""What the modules of a call have beside their tensors, as texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["settings_in"]


def settings_in(tree: Any) -> Iterator[str]:
    """``inner.scale = 2.0`` for each attribute of the modules of a tree, as `symbolics.node.modules` writes it: numbers and texts as Python has them,
    all else as the file has it. Of what is no tree, nothing."""
    waiting = [("", tree)]
    while waiting:
        path, record = waiting.pop()
        if isinstance(record, str):
            yield f"{path} is {record or 'the module itself'}"
        if not isinstance(record, dict):
            continue
        attributes, modules = record.get("attributes"), record.get("modules")
        for key, value in attributes.items() if isinstance(attributes, dict) else ():
            yield f"{_joined(path, key)} = {json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else repr(value)}"
        if isinstance(modules, dict):
            waiting += reversed([(_joined(path, key), inner) for key, inner in modules.items()])


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
