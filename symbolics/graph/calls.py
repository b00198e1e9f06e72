"""Calls of functions: each has as many inputs and outputs as its function.

ONNX lets a call leave out what stands at the end and nobody needs. Its inference, onnxruntime and the reference evaluator refuse that
(`OMITTED_OUTPUTS` in `symbolics.quirks.elsewhere`), and a file leaves out outputs at the end that have no name.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from symbolics.graph.walk import walk

__all__ = ["complete", "complete_calls"]


def complete(node: ir.Node, function: ir.Function, name: Callable[[str], str]) -> None:
    """Let a call have all inputs and outputs of its function; the last output gets a name.

    Args:
        node: The call.
        function: What it calls.
        name: Makes a name that nothing in the model has, from the one that the output has in the function.
    """
    if len(node.inputs) < len(function.inputs):
        node.resize_inputs(len(function.inputs))
    if len(node.outputs) < len(function.outputs):
        node.resize_outputs(len(function.outputs))
    for output in node.outputs:
        output.name = output.name or ""
    if node.outputs and not node.outputs[-1].name:
        node.outputs[-1].name = name(function.outputs[-1].name or "output")


def complete_calls(model: ir.Model) -> None:
    """Let all calls of functions in a model have the inputs and outputs of their functions, in place."""
    taken: set[str | None] = set()

    def fresh(stem: str) -> str:
        if not taken:
            taken.update(v.name for p in parts for n in walk(p) for v in (*n.inputs, *n.outputs) if v is not None)
            taken.update(v.name for p in parts for v in (*p.inputs, *p.outputs))
        number = 1
        while (found := f"{stem}_{number}") in taken:
            number += 1
        taken.add(found)
        return found

    parts: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    for part in parts if model.functions else ():
        for node in walk(part):
            if (function := model.functions.get(node.op_identifier())) is not None and len(node.outputs) <= len(function.outputs):
                complete(node, function, fresh)
