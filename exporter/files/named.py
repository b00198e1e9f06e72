"""Which names a file asks a process to know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import function_of, is_python_op, is_python_op_tangent
from symbolics.graph.walk import walk
from symbolics.node.names import CALL_ATTRIBUTE, OUTPUTS_KEY, is_of_torch

__all__ = ["functions_in", "names_in", "names_of_call", "names_of_result"]


def functions_in(model: ir.Model) -> list[str]:
    """The Functions and operators that the PythonOps of a model call, its functions and bodies included; each once, and only those that say so."""
    found: dict[str, None] = {}
    for part in (model.graph, *model.functions.values()):
        for node in walk(part):
            if is_python_op(node) or is_python_op_tangent(node):
                found[function_of(node)] = None
    return [name for name in found if name]


def _classes_in(tree: Any) -> Iterator[str]:
    """The names of the classes in a tree but torch's layers, which need no entry inside of what has one; of what is no tree, nothing."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("name"), str) and not is_of_torch(one["name"]):
                yield one["name"]
            modules = one.get("modules")
            waiting += reversed(list(modules.values())) if isinstance(modules, dict) else []


def names_in(model: ir.Model) -> list[str]:
    """What a file names, each name once: what each of its calls does (`names_of_call`), and the types of the model's result."""
    nodes = [node for part in (model.graph, *model.functions.values()) for node in walk(part)]
    return list(dict.fromkeys([*(name for node in nodes for name in names_of_call(node)), *names_of_result(model)]))


def names_of_call(node: ir.Node) -> list[str]:
    """What a node asks a process to know: the Function, operator or module that it calls, the module that registers the operator, and the types and
    functions among the arguments. Nothing of a node that is no call."""
    found: list[str] = []
    if (is_python_op(node) or is_python_op_tangent(node)) and "name" in node.attributes:
        found.append(node.attributes["name"].as_string())
        if CALL_ATTRIBUTE in node.attributes:
            call = json.loads(node.attributes[CALL_ATTRIBUTE].as_string())
            if call.get("operator") and call["operator"]["module"] != "torch":  # which every process has
                found.append(f"{call['operator']['module']}:*")
            if isinstance(call.get("module"), dict):
                found += _classes_in(call["module"].get("tree"))
            found += _named(call)
    return [name for name in dict.fromkeys(found) if ":" in name]


def names_of_result(model: ir.Model) -> list[str]:
    """The types of the model's result, which stand in the metadata."""
    text = model.metadata_props.get(OUTPUTS_KEY)
    return [] if text is None else [name for name in dict.fromkeys(_named(json.loads(text))) if ":" in name]


def _named(data: Any) -> Iterator[str]:
    """The classes and functions in the JSON of values."""
    if isinstance(data, dict):
        for key, payload in data.items():
            if key in ("$enum", "$namedtuple", "$dataclass", "$mapping", "$plain") and isinstance(payload, list):
                yield payload[0]
            elif key in ("$callable", "$builtin"):
                yield payload
            yield from _named(payload)
    elif isinstance(data, list):
        for item in data:
            yield from _named(item)
