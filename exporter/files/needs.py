"""What a file needs where it runs: the nodes that call Python, why they do, what has to be allowed; and whether other runtimes run it."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx_ir as ir

from exporter.files.data_facts import DataFacts, data_of
from exporter.files.inspect import inspect_model
from exporter.files.program import Program
from exporter.files.read import open_model
from exporter.files.valid import invalid
from symbolics.graph.values import function_of, is_mark, is_python_op
from symbolics.graph.walk import walk
from symbolics.node.names import CALL_ATTRIBUTE, ORT_DOMAIN, OWN_DOMAIN, is_operator

__all__ = ["Needs", "PythonNodes", "needs_of"]


@dataclass(frozen=True)
class PythonNodes:
    """The nodes of a file that call one thing, for one reason.

    Attributes:
        function: ``module:qualname``, or the operator.
        kind: "Function", "operator", "module" or "function".
        reason: Why it is no ONNX operator.
        calls: How many nodes call it.
        where: Where the first of them was called: the line of the code, or the path of the module; "" where the file does not say.
    """

    function: str
    kind: str
    reason: str
    calls: int
    where: str


@dataclass
class Needs:
    """What a file needs.

    Attributes:
        nodes: How many nodes it has, in bodies and functions too.
        python: Those that call Python.
        gradients: How many nodes are there for the gradients and tangents of those.
        allow: What a process that opens the file has to be allowed, an entry each; none where the file is damaged.
        domains: The domains, beside ONNX's own and those that the file defines, whose operators it has: a runtime has to know them. Without Python's.
        data: The files that values of tensors are in.
        damage: What is wrong with the file, in words: it cannot be opened.
        invalid: Why it is no valid ONNX, in the words of onnx.checker; "" where it is, or where it is damaged.
    """

    nodes: int
    python: list[PythonNodes] = field(default_factory=list)
    gradients: int = 0
    allow: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    data: list[DataFacts] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    invalid: str = ""

    @property
    def runs_anywhere(self) -> bool:
        """Whether any runtime that knows ONNX functions runs it: it is valid, and needs neither Python nor operators beside ONNX's own."""
        return not (self.damage or self.invalid or self.python or self.gradients or self.domains)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "runs_anywhere": self.runs_anywhere}


def needs_of(source: str | os.PathLike[str] | ir.Model) -> Needs:
    """What a file needs; nothing of it is run or imported.

    Args:
        source: A path, or a model in memory.

    Raises:
        FormatError: It cannot be read, or its metadata is damaged. What else is damaged is said in ``damage``.
    """
    model = source if isinstance(source, ir.Model) else open_model(source, data=False)
    facts = replace(inspect_model(model), data=data_of(model))
    nodes = [node for part in (model.graph, *model.functions.values()) for node in walk(part)]
    kinds = {(node.name, function_of(node)): _kind(node) for node in nodes if is_python_op(node)}
    calls = Program(model).opaque
    counted = Counter((call.function, call.reason) for call in calls)
    first = {(call.function, call.reason): call for call in reversed(calls)}
    defined = {function.domain for function in model.functions.values()}
    ours = [node for node in nodes if node.op_type.startswith("PythonOp") and node.domain in (ORT_DOMAIN, OWN_DOMAIN)]
    known = set(map(id, ours))
    others = {node.domain for node in nodes if id(node) not in known and not is_mark(node)} - {"", "ai.onnx"} - defined
    return Needs(
        len(nodes),
        [
            PythonNodes(function, kinds[call.name, function], reason, count, call.source or call.module)
            for (function, reason), count in counted.most_common()
            for call in (first[function, reason],)
        ],
        sum(not is_python_op(node) for node in ours),
        facts.allow if not (damage := facts.damage()) else [],
        sorted(others),
        facts.data,
        damage,
        "" if damage else invalid(model),
    )


def _kind(node: ir.Node) -> str:
    """What a PythonOp calls."""
    if is_operator(function_of(node)):
        return "operator"
    try:
        call = json.loads(node.attributes[CALL_ATTRIBUTE].as_string()) if CALL_ATTRIBUTE in node.attributes else {}
    except (ValueError, TypeError, RecursionError):
        return "Function"  # the damage says more
    module = call.get("module") if isinstance(call, dict) else None
    if not isinstance(module, dict):
        return "Function"
    return "function" if module.get("function") else "module"
