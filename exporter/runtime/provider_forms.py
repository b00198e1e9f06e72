"""Forms of a model that an execution provider other than the CPU needs, made in memory when a session is opened.

A file is written in the forms that are quickest on onnxruntime's CPU. Where a provider does not take one of them, a row of `FORMS` has what
puts another in its place, which computes the same. Most forms are right for all providers, and rules write those at once; here is
what would cost the CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.walk import captured, subgraphs, walk

__all__ = ["FORMS", "captures_as_states", "write_forms"]


def captures_as_states(model: ir.Model) -> int:
    """Hand what the body of a Scan reads from outside to it as a state that stays as it is.

    OpenVINO counts values that a Scan's body reads from outside as inputs that are missing. On the CPU the states are copied at each step: the
    Scan of an LSTM of 256 takes 31.8 ms in place of 24.5.

    Returns:
        How many Scans were written so.
    """
    scope = Scope(free_prefix(model.graph, "form/"), lambda value: False)
    found = [node for node in walk(model.graph) if node.op_type == "Scan" and node.domain == "" and captured(node)]
    for node in found:
        _hand_over(scope, node)
    return len(found)


def _hand_over(scope: Scope, node: ir.Node) -> None:
    (body,) = subgraphs(node)
    outer = captured(node)
    states = len(body.inputs) - node.attributes["num_scan_inputs"].as_int()
    given = [ir.Value(name=scope.name("state"), type=value.type, shape=value.shape) for value in outer]
    inside = dict(zip(outer, given, strict=True))
    for inner in walk(body):
        for place, value in enumerate(inner.inputs):
            if value in inside:
                inner.replace_input_with(place, inside[value])
    ends = list(body.outputs)  # onnx_ir has no body that gives out a value from outside
    kept = [ir.Node("", "Identity", [value], name=scope.name("Identity")) for value in given]
    for value, same in zip(given, kept, strict=True):
        same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = scope.name("stays"), value.type, value.shape
    body.extend(kept)
    body.inputs[states:states] = given
    body.outputs[:] = [*ends[:states], *(same.outputs[0] for same in kept), *ends[states:]]
    inputs = [*node.inputs[:states], *outer, *node.inputs[states:]]
    graph = node.graph
    assert graph is not None
    attributes = list(node.attributes.values())
    node.attributes.clear()  # a body belongs to one node
    new = ir.Node("", "Scan", inputs, attributes, name=node.name, num_outputs=len(node.outputs) + len(outer))
    for value in new.outputs[states : states + len(outer)]:
        value.name = scope.name("unread")
    for old, value in zip(node.outputs, (*new.outputs[:states], *new.outputs[states + len(outer) :]), strict=True):
        name, value.type, value.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        old.name, value.name = None, name
    graph.insert_before(node, [new])
    graph.remove(node, safe=True)


#: provider, as `exporter.runtime.providers` names it for short -> what writes a model in forms that it takes.
FORMS: Mapping[str, tuple[Callable[[ir.Model], int], ...]] = {"openvino": (captures_as_states,)}


def write_forms(names: Iterable[str], model: ir.Model) -> bool:
    """Write a model in the forms that providers of these short names take, in place; whether anything changed."""
    forms = dict.fromkeys(form for name in names for form in FORMS.get(name, ()))
    return sum(form(model) for form in forms) > 0
