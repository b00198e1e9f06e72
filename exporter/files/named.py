"""Which names a file asks a process to know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import function_of, is_python_op, is_python_op_tangent
from symbolics.graph.walk import walk
from symbolics.node.names import CALL_ATTRIBUTE, OUTPUTS_KEY, is_of_torch

__all__ = ["functions_in", "names_in"]


def functions_in(model: ir.Model) -> list[str]:
    """The Functions and operators that the PythonOps of a model call, its functions and bodies included; each once, and only those that say so."""
    found: dict[str, None] = {}
    for part in (model.graph, *model.functions.values()):
        for node in walk(part):
            if is_python_op(node) or is_python_op_tangent(node):
                found[function_of(node)] = None
    return [name for name in found if name]


def _classes_in(tree: Any) -> Iterator[str]:
    """The names of the classes in a tree that are not torch's own; of what is no tree, nothing."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("name"), str) and not is_of_torch(one["name"]):
                yield one["name"]
            modules = one.get("modules")
            waiting += reversed(list(modules.values())) if isinstance(modules, dict) else []


def names_in(model: ir.Model) -> list[str]:
    """What a file names: Functions, operators and the modules that register them, the types of their arguments and of the model's result."""
    found: dict[str, None] = {}

    def visit(data: Any) -> None:
        if isinstance(data, dict):
            for key, payload in data.items():
                if key in ("$enum", "$namedtuple", "$dataclass", "$mapping", "$plain") and isinstance(payload, list):
                    found[payload[0]] = None
                elif key in ("$callable", "$builtin"):
                    found[payload] = None
                visit(payload)
        elif isinstance(data, list):
            for item in data:
                visit(item)

    for node in (node for part in (model.graph, *model.functions.values()) for node in walk(part)):
        if (is_python_op(node) or is_python_op_tangent(node)) and "name" in node.attributes:
            if not is_of_torch(name := node.attributes["name"].as_string()):
                found[name] = None
            if CALL_ATTRIBUTE in node.attributes:
                call = json.loads(node.attributes[CALL_ATTRIBUTE].as_string())
                if call.get("operator") and call["operator"]["module"] != "torch":  # which every process has
                    found[f"{call['operator']['module']}:*"] = None
                if isinstance(call.get("module"), dict):
                    found.update(dict.fromkeys(_classes_in(call["module"].get("tree"))))
                visit(call)
    if OUTPUTS_KEY in model.metadata_props:
        visit(json.loads(model.metadata_props[OUTPUTS_KEY]))
    return [name for name in found if ":" in name]
