"""Scans of a plain LSTM or GRU, and of their gradients, become one node each, in memory.

onnxruntime runs some ten operators a step, and each product with the states' weights lays them out anew. The native library lays them out
once and runs a step as one task for each 32 units (native/lstm.c, native/gru.c). The file on disk is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from exporter.cpu.operators import DOMAIN
from exporter.runtime.facts import inferred_graph
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.gru import gru_backward_step, gru_step
from symbolics.graph.lstm import lstm_backward_step, lstm_step
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array, made_by

__all__ = ["GRU", "GRU_GRAD", "LSTM", "LSTM_GRAD", "run_recurrences"]

LSTM, LSTM_GRAD, GRU, GRU_GRAD = "Lstm", "LstmGrad", "Gru", "GruGrad"


class _Form(NamedTuple):
    """A Scan that one node stands for.

    Attributes:
        kind: The node's operator.
        step: Writes the body that our own gradients have: (op, states and what is read, weights and what goes with them) -> outputs.
        weights: Where the node takes these among its inputs.
        gates: How many times as wide as a state the first tensor is that is read step by step.
        outer: How many the weights, and what goes with them, are.
    """

    kind: str
    step: Callable[[Emitter, Sequence[ir.Value], Sequence[ir.Value]], list[ir.Value]]
    weights: int
    gates: int
    outer: int = 1


def _backward_form(kind: str, step: Callable[..., list[ir.Value]], states: int, gates: int) -> _Form:
    """Of a step of (op, states, what is read, weights)."""
    return _Form(kind, lambda op, given, outer: step(op, *given[:states], given[states:], *outer), states + 3, gates)


_LSTM_GRAD, _GRU_GRAD = _backward_form(LSTM_GRAD, lstm_backward_step, 2, 4), _backward_form(GRU_GRAD, gru_backward_step, 1, 3)
#: (inputs, of these scanned, outputs) -> what the Scan may be.
_FORMS = {
    (3, 1, 6): _Form(LSTM, lambda op, given, outer: lstm_step(op, *given, *outer), 3, 4),
    (5, 3, 3): _LSTM_GRAD,
    (6, 4, 3): _LSTM_GRAD,
    (2, 1, 5): _Form(GRU, lambda op, given, outer: gru_step(op, *given, *outer), 2, 3, 2),
    (4, 3, 3): _GRU_GRAD,
    (5, 4, 3): _GRU_GRAD,
}

_MOST_NODES = 64  # of a body that is looked at
_MOST_WAITING = 4096


def run_recurrences(model: ir.Model) -> int:
    """Replace them in a model for onnxruntime's CPU with the native library. To be called before chains are fused, which changes bodies.

    Args:
        model: Changed.

    Returns:
        How many nodes were replaced.
    """
    if sys.platform == "win32":  # MSVC makes no vectors of native/panels.h: onnxruntime's products are quicker
        return 0
    scans = [node for node in model.graph if node.op_type == "Scan" and node.domain == ""]
    found = [(node, *match) for node in scans if (match := _match(node)) is not None]
    shapes = _shapes(model) if found else {}
    found = [each for each in found if not _is_spread(each[0], each[1], shapes)]
    found = [each for each in found if each[1].kind != GRU or _is_row(each[2][1], shapes)]
    if not found:
        return 0
    scope = Scope(free_prefix(model.graph, "recurrent/"), lambda value: False)
    for node, form, outer, backwards in found:
        op = Emitter(scope)
        inputs = list(node.inputs)
        inputs[form.weights : form.weights] = outer
        added = _added_row(inputs[2], shapes) if form.kind == LSTM else None
        if added is not None:
            add, inputs[2], bias = added
            inputs.append(bias)
        outputs = op.node(form.kind, inputs, domain=DOMAIN, outputs=len(node.outputs), backwards=backwards)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.type = ir.TensorType(ir.DataType.FLOAT)
            new.shape = old.shape or shapes.get(old.name or "")
        replace(scope, node, op.nodes, list(outputs))
        if added is not None:
            model.graph.remove(add, safe=True)
    model.graph.opset_imports[DOMAIN] = 1
    return len(found)


def _shapes(model: ir.Model) -> dict[str, ir.Shape]:
    """What ONNX infers of values whose file says nothing."""
    graph = inferred_graph(model)
    infos = () if graph is None else (*graph.value_info, *graph.output)
    return {v.name: shape for v in infos if (shape := ir.serde.deserialize_value_info_proto(v, None).shape) is not None}


def _is_row(bias: ir.Value, shapes: dict[str, ir.Shape]) -> bool:
    """Whether a value is known to be a vector of several numbers: a Gemm may add fewer ones, or rows, too."""
    shape = _shape_of(bias, shapes)
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 1


def _added_row(x: ir.Value | None, shapes: dict[str, ir.Shape]) -> tuple[ir.Node, ir.Value, ir.Value] | None:
    """The Add of a row to what an LSTM alone reads step by step, what it adds to, and the row: it costs a pass over memory, and the node none."""
    add = made_by(x, "Add")
    if x is None or add is None or len(x.uses()) > 1 or x.is_graph_output():
        return None
    for rest, bias in (add.inputs, add.inputs[::-1]):
        whole, shape = _shape_of(rest, shapes), _shape_of(bias, shapes)
        if rest is not None and bias is not None and whole is not None and len(whole) == 3 and whole[2:] == shape and _is_row(bias, shapes):
            return add, rest, bias
    return None


def _match(node: ir.Node) -> tuple[_Form, list[ir.Value], int] | None:
    """What a Scan is, its weights, and whether it goes from the last step to the first; None for any other Scan."""
    body = attr(node, "body")
    count = len(node.inputs)
    if not isinstance(body, ir.Graph) or not all(output.name for output in node.outputs):
        return None
    form = _FORMS.get((count, attr(node, "num_scan_inputs"), len(node.outputs)))
    if form is None or len(body.inputs) != count or len(body) > _MOST_NODES:
        return None
    ways = {*(attr(node, "scan_input_directions") or [0]), *(attr(node, "scan_output_directions") or [0])}
    axes = [*(attr(node, "scan_input_axes") or ()), *(attr(node, "scan_output_axes") or ())]
    if ways not in ({0}, {1}) or any(axes) or any(value.dtype is not ir.DataType.FLOAT for value in body.inputs):
        return None
    if any(value is None or value.dtype not in (None, ir.DataType.FLOAT) for value in node.inputs):
        return None
    table: dict[object, int] = {}
    outer, numbers = _outline(body, list(body.inputs), list(body.outputs), table)
    _, expected = _outline(None, *_template(form, count), table)
    if numbers != expected or len(outer) != form.outer:
        return None
    return form, outer, int(ways.pop())


def _shape_of(value: ir.Value | None, shapes: dict[str, ir.Shape]) -> ir.Shape | None:
    return None if value is None else value.shape or shapes.get(value.name or "")


def _is_spread(node: ir.Node, form: _Form, shapes: dict[str, ir.Shape]) -> bool:
    """Whether something of (T, B, H), or as many times as wide as the form says, is known to be smaller: operators of the body add and multiply it to
    each row, or to each unit, of a state (B, H), which the native library does not."""
    state = _shape_of(node.inputs[0], shapes)
    rows, units = (None, None) if state is None or len(state) != 2 else state
    for place, value in enumerate(node.inputs[-attr(node, "num_scan_inputs") :]):
        shape, wide = _shape_of(value, shapes), 1 if place else form.gates
        if shape is None:
            continue
        if len(shape) != 3 or (shape[1] == 1 and rows != 1) or (shape[2] in (1, wide) and units != 1):
            return True
    return False


def _template(form: _Form, count: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """The inputs and outputs of the body that our own gradients write."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    given, outer = ([ir.Value(name=f"{stem}{i}", type=kind) for i in range(size)] for stem, size in (("v", count), ("w", form.outer)))
    op = Emitter(Scope("t/", lambda value: False))
    with op.arithmetic():
        return given, form.step(op, given, outer)


def _outline(
    graph: ir.Graph | None, inputs: list[ir.Value], outputs: list[ir.Value], table: dict[object, int]
) -> tuple[list[ir.Value], list[int]]:
    """What a body computes: the values from outside, and a number for each output, equal where two bodies compute the same.

    Args:
        graph: The body; None for nodes that are in none yet.
        inputs, outputs: Of the body.
        table: Numbers of what was seen so far, for the bodies that are compared.
    """
    known: dict[ir.Value, int] = {value: table.setdefault(("input", i), len(table)) for i, value in enumerate(inputs)}
    outer: list[ir.Value] = []
    waiting = list(reversed(outputs))
    while waiting:  # without recursion: bodies are a file's
        value = waiting[-1]
        node = value.producer()
        if value in known:
            waiting.pop()
            continue
        array = fixed_array(value)
        if array is not None and array.size == 1:
            known[value] = table.setdefault(("constant", str(array.dtype), array.shape, array.tobytes()), len(table))
        elif node is None and graph is not None and value.name in graph.initializers:
            return [], []  # a value of the body's own, for which outside there is no name
        elif node is None or node.graph is not graph:
            outer.append(value)
            known[value] = table.setdefault(("outer", len(outer)), len(table))
        else:
            missing = [v for v in node.inputs if v is not None and v not in known]
            if missing and len(waiting) > _MOST_WAITING:
                return [], []  # in a circle
            if missing:
                waiting += reversed(missing)
                continue
            read = tuple(None if v is None else known[v] for v in node.inputs)
            said = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items()))
            number = table.setdefault((node.domain, node.op_type, said, read), len(table))
            for i, output in enumerate(node.outputs):
                known[output] = table.setdefault(("output", number, i), len(table))
    return outer, [known[value] for value in outputs]
