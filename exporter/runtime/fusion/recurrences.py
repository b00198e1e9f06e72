"""Scans of a plain LSTM, and of its gradient, become one node each, in memory.

onnxruntime runs some ten operators a step, and each product with the states' weights lays them out anew. The native library lays them out
once and runs a step as one task for each 32 units (native_lstm.h). The file on disk is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import onnx_ir as ir

from exporter.runtime.fusion.elementwise import inferred_graph
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.lstm import lstm_backward_step, lstm_step
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array
from symbolics.node.names import OWN_DOMAIN

__all__ = ["LSTM", "LSTM_GRAD", "run_lstms"]

LSTM, LSTM_GRAD = "Lstm", "LstmGrad"

_MOST_NODES = 64  # of a body that is looked at
_MOST_WAITING = 4096


def run_lstms(model: ir.Model) -> int:
    """Replace them in a model for onnxruntime's CPU with the native library. To be called before chains are fused, which changes bodies.

    Args:
        model: Changed.

    Returns:
        How many nodes were replaced.
    """
    if sys.platform == "win32":  # MSVC makes no vectors of native_panels.h: onnxruntime's products are quicker
        return 0
    scans = [node for node in model.graph if node.op_type == "Scan" and node.domain == ""]
    found = [(node, *match) for node in scans if (match := _match(node)) is not None]
    if not found:
        return 0
    shapes = _shapes(model)
    scope = Scope(free_prefix(model.graph, "recurrent/"), lambda value: False)
    for node, kind, weights, backwards in found:
        op = Emitter(scope)
        inputs = list(node.inputs)
        inputs.insert(3 if kind == LSTM else 5, weights)
        outputs = op.node(kind, inputs, domain=OWN_DOMAIN, outputs=len(node.outputs), backwards=backwards)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.type = ir.TensorType(ir.DataType.FLOAT)
            new.shape = old.shape or shapes.get(old.name or "")
        replace(scope, node, op.nodes, list(outputs))
    model.graph.opset_imports[OWN_DOMAIN] = 1
    return len(found)


def _shapes(model: ir.Model) -> dict[str, ir.Shape]:
    """What ONNX infers of values whose file says nothing."""
    graph = inferred_graph(model)
    infos = () if graph is None else (*graph.value_info, *graph.output)
    return {v.name: shape for v in infos if (shape := ir.serde.deserialize_value_info_proto(v, None).shape) is not None}


def _match(node: ir.Node) -> tuple[str, ir.Value, int] | None:
    """The operator that a Scan is, its weights, and whether it goes from the last step to the first; None for any other Scan."""
    body = attr(node, "body")
    count = len(node.inputs)
    if not isinstance(body, ir.Graph) or not all(output.name for output in node.outputs):
        return None
    form = {(3, 6): 1, (5, 3): 3, (6, 3): 4}.get((count, len(node.outputs)))  # how many are scanned
    if form is None or len(body.inputs) != count or len(body) > _MOST_NODES or attr(node, "num_scan_inputs") != form:
        return None
    ways = {*(attr(node, "scan_input_directions") or [0]), *(attr(node, "scan_output_directions") or [0])}
    axes = [*(attr(node, "scan_input_axes") or ()), *(attr(node, "scan_output_axes") or ())]
    if ways not in ({0}, {1}) or any(axes) or any(value.dtype is not ir.DataType.FLOAT for value in body.inputs):
        return None
    if any(value is None or value.dtype not in (None, ir.DataType.FLOAT) for value in node.inputs):
        return None
    if form == 1 and _is_spread(*node.inputs[1:3]):
        return None
    table: dict[object, int] = {}
    kind, template = (LSTM, _forward) if form == 1 else (LSTM_GRAD, _backward)
    outer, numbers = _outline(body, list(body.inputs), list(body.outputs), table)
    _, expected = _outline(None, *_template(template, count), table)
    if numbers != expected or len(outer) != 1:
        return None
    return kind, outer[0], int(ways.pop())


def _is_spread(state: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether x (T, B, 4H) is known to be smaller, which a Gemm adds to each row, or to each unit, of a state (B, H)."""
    shape = None if x is None else x.shape
    rows = None if state is None or state.shape is None or len(state.shape) != 2 else state.shape[0]
    return shape is not None and (len(shape) != 3 or shape[2] == 1 or (shape[1] == 1 and rows != 1))


def _forward(op: Emitter, given: Sequence[ir.Value], weights: ir.Value) -> list[ir.Value]:
    h, c, x = given
    return lstm_step(op, h, c, x, weights)


def _backward(op: Emitter, given: Sequence[ir.Value], weights: ir.Value) -> list[ir.Value]:
    dh, dc, *read = given
    return lstm_backward_step(op, dh, dc, read, weights)


def _template(step: Callable[..., list[ir.Value]], count: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """The inputs and outputs of the body that our own gradients write."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    weights, *given = (ir.Value(name=f"v{i}", type=kind) for i in range(count + 1))
    op = Emitter(Scope("t/", lambda value: False))
    with op.arithmetic():
        return given, step(op, given, weights)


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
