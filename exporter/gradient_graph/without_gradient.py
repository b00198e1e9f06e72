"""What reaches the outputs of a model only through calls whose backward gives None: it has no gradient, and autograd knows the way all the same.

In eager mode such an output requires a gradient, and a second derivative may reach what has no first one.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from symbolics.gradients import NONDIFFERENTIABLE
from symbolics.graph.values import is_mark, is_python_op, may_be_float
from symbolics.graph.walk import reads
from symbolics.node.call_text import read_call
from symbolics.node.linked import Backward, backward_of
from symbolics.node.metadata import pairing_of
from symbolics.node.names import CALL_ATTRIBUTE

__all__ = ["not_given", "paths_without_gradient", "stops"]

Names = frozenset[str]
_NOBODY: Names = frozenset()


def paths_without_gradient(training: ir.Model, wrt: Iterable[str]) -> dict[str, Names]:
    """The names in wrt that have no gradient, but a way through a backward that gives None -> the outputs at the end of such a way.

    Args:
        training: What build_gradient_graph returned, its stop-gradient marks in place.
        wrt: Inputs and initializers.

    Raises:
        FormatError: A ``call`` attribute, or a link between functions, is damaged.
    """
    pairing = pairing_of(training)
    unreached = set(wrt).intersection(pairing.unreached if pairing is not None else ())
    graph = training.graph
    nones = {node: places for node in graph if (places := _without_gradient(training, node))} if unreached else {}
    if pairing is None or not nones:
        return {}
    # Of each value: who reaches it, and who does so through a None.
    plain: dict[ir.Value, Names] = {v: frozenset([v.name]) for v in (*graph.inputs, *graph.initializers.values()) if v.name in unreached}
    silent: dict[ir.Value, Names] = {}
    for node in graph:
        if stops(node):
            continue
        here, behind = _NOBODY, _NOBODY
        for value in reads(node):
            here |= plain.get(value, _NOBODY)
            behind |= silent.get(value, _NOBODY)
        for place in nones.get(node, ()):
            if (x := node.inputs[place]) is not None:
                behind |= plain.get(x, _NOBODY)
        for output in _differentiable(node) if here or behind else ():
            plain[output], silent[output] = here, behind
    found: dict[str, set[str]] = {}
    for output in graph.outputs:
        for name in silent.get(output, _NOBODY) if output.name in pairing.inputs else ():
            found.setdefault(name, set()).add(str(output.name))
    return {name: frozenset(outputs) for name, outputs in found.items()}


def _without_gradient(model: ir.Model, node: ir.Node) -> list[int]:
    """The inputs of a node for which its backward gives None."""
    if is_python_op(node) and CALL_ATTRIBUTE in node.attributes:
        record = read_call(node.attributes[CALL_ATTRIBUTE].as_string(), node.name or "")
        return [place for place in (*record.no_gradient, *record.no_gradient_seen) if place < len(node.inputs)]
    function = model.functions.get(node.op_identifier())
    link = None if function is None else backward_of(model, function)
    if link is None or not link.name:
        return []
    return not_given(node, link)


def stops(node: ir.Node) -> bool:
    """Whether autograd knows no way through a node, not even one without a gradient."""
    return is_mark(node) or (node.domain == "" and node.op_type in NONDIFFERENTIABLE)


def not_given(node: ir.Node, link: Backward) -> list[int]:
    """The float inputs of a call of a function that its backward gives no gradient for."""
    return [place for place, value in enumerate(node.inputs) if place not in link.gives and may_be_float(value)]


def _differentiable(node: ir.Node) -> list[ir.Value]:
    flags = node.attributes.get("output_tensor_requires_grads") if is_python_op(node) else None
    if flags is not None:
        return [output for output, flag in zip(node.outputs[1:], flags.as_ints()) if flag]
    return [output for output in node.outputs if may_be_float(output)]
