"""The steps of a plain LSTM or GRU, and of their gradients, claimed by their names (`exporter.runtime.claims`): one node each, in memory.

As standard operators they are a Scan: onnxruntime runs some ten operators a step, and each product with the states' weights lays them out anew. The native
library lays them out once and runs a step as one task for each 32 units (native/lstm.c, native/gru.c).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir

from exporter.cpu.operators import DOMAIN
from exporter.runtime.claims import Claim
from exporter.runtime.facts import Shape, ShapeAndType, fact_of
from symbolics.graph.emitter import Emitter
from symbolics.graph.named import name_of_call
from symbolics.graph.values import attr, made_by

__all__ = ["GRU", "GRU_GRAD", "LSTM", "LSTM_GRAD", "RECURRENCES", "recurrence"]

LSTM, LSTM_GRAD, GRU, GRU_GRAD = "Lstm", "LstmGrad", "Gru", "GruGrad"

Facts = Mapping[ir.Value, ShapeAndType]


class _Form(NamedTuple):
    """What a call reads and gives: states (B, H), what is read step by step (T, B, *), and what every step reads.

    Attributes:
        kind: The node that stands for it.
        states: How many states it has.
        reads: How many tensors it reads step by step at least. A gradient may read one more, that of all h.
        weights: How many every step reads; the node takes them behind ``reads`` tensors that are read step by step.
        gates: How many times as wide as a state the first of ``reads`` is.
        outputs: How many there are.
    """

    kind: str
    states: int
    reads: int
    weights: int
    gates: int
    outputs: int


_FORMS = {
    "LSTM": _Form(LSTM, 2, 1, 1, 4, 6),
    "LSTMGrad": _Form(LSTM_GRAD, 2, 3, 1, 4, 3),
    "GRU": _Form(GRU, 1, 1, 2, 3, 5),
    "GRUGrad": _Form(GRU_GRAD, 1, 3, 1, 3, 3),
}


def recurrence(op: Emitter, node: ir.Node, facts: Facts) -> list[ir.Value] | None:
    """The results of one node that stands for a call; None where the native library does not compute it.

    Args:
        op: Takes the node.
        node: A call of LSTM, GRU or the gradient of one.
        facts: Shapes and types of values.
    """
    form, ways = _FORMS[name_of_call(node) or ""], attr(node, "reverse")
    given = [value for value in node.inputs if value is not None]
    more = len(given) - form.states - form.reads - form.weights
    if (
        len(given) < len(node.inputs)
        or len(node.outputs) != form.outputs
        or more not in ((0, 1) if form.kind in (LSTM_GRAD, GRU_GRAD) else (0,))
    ):
        return None
    if (
        not isinstance(ways, (list, tuple))
        or tuple(ways) not in ((0,), (1,))
        or any(fact_of(value, facts)[1] is not ir.DataType.FLOAT for value in given)
    ):
        return None
    seen = given[form.states : form.states + form.reads + more]
    weights = given[form.states + form.reads + more :]
    if _is_spread(given[0], seen, form, facts) or (form.kind == GRU and not _is_row(weights[1], facts)):
        return None
    inputs = [*given[: form.states], *seen[: form.reads], *weights, *seen[form.reads :]]
    added = _added_row(inputs[2], facts) if form.kind == LSTM else None
    if added is not None:
        inputs[2], bias = added
        inputs.append(bias)
    outputs: tuple[ir.Value, ...] = op.node(form.kind, inputs, domain=DOMAIN, outputs=form.outputs, backwards=ways[0])
    for old, new in zip(node.outputs, outputs, strict=True):
        new.type, new.shape = ir.TensorType(ir.DataType.FLOAT), old.shape
    return list(outputs)


def _is_row(bias: ir.Value, facts: Facts) -> bool:
    """Whether a value is known to be a vector of several numbers: a Gemm may add fewer ones, or rows, too."""
    shape = fact_of(bias, facts)[0]
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 1


def _added_row(x: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """What a row is added to that an LSTM alone reads step by step, and the row: the Add costs a pass over memory, and the node nothing."""
    add = made_by(x, "Add")
    if add is None or len(x.uses()) > 1 or x.is_graph_output():
        return None
    for rest, bias in (add.inputs, add.inputs[::-1]):
        if rest is None or bias is None or not _is_row(bias, facts):
            continue
        whole: Shape | None = fact_of(rest, facts)[0]
        if whole is not None and len(whole) == 3 and whole[2:] == fact_of(bias, facts)[0]:
            return rest, bias
    return None


def _is_spread(state: ir.Value, seen: list[ir.Value], form: _Form, facts: Facts) -> bool:
    """Whether something of (T, B, H), or as many times as wide as the form says, is known to be smaller: operators of the body add and multiply it to
    each row, or to each unit, of a state (B, H), which the native library does not."""
    shape = fact_of(state, facts)[0]
    rows, units = (None, None) if shape is None or len(shape) != 2 else shape
    for place, value in enumerate(seen):
        shape, wide = fact_of(value, facts)[0], 1 if place else form.gates
        if shape is None:
            continue
        if len(shape) != 3 or (shape[1] == 1 and rows != 1) or (shape[2] in (1, wide) and units != 1):
            return True
    return False


#: Who claims what. MSVC makes no vectors of native/panels.h: there onnxruntime's products are quicker.
RECURRENCES: Mapping[str, Claim] = {} if sys.platform == "win32" else dict.fromkeys(_FORMS, recurrence)
