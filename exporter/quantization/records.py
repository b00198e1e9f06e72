"""Declared quantisers in a file: what a node's metadata says of one, and the standard operators that stand for it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from exporter.quantization.expressions import Expression
from symbolics.errors import FormatError
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import describe, is_python_op
from symbolics.node.names import PORTABLE_DOMAIN, QUANTIZER_PROPERTY
from symbolics.node.records import parse, read_record

__all__ = ["FORMS", "Form", "Record", "lower", "read", "result_of", "rounded", "write"]

_MOST_AXES = 64


@dataclass(frozen=True)
class Form:
    """In which order a quantiser computes: each is rounded to float32 otherwise.

    Attributes:
        rounding: "divide": ``x / s`` is rounded, "multiply": ``x * (1 / s)``.
        inside: Whether the zero point is added before that is rounded.
        values: "multiply": a level times ``s``, "divide": over ``1 / s``.
    """

    rounding: Literal["divide", "multiply"] = "divide"
    inside: bool = False
    values: Literal["multiply", "divide"] = "multiply"


#: All of them, the commonest first.
FORMS = [Form(r, i, v) for i in (False, True) for v in ("multiply", "divide") for r in ("divide", "multiply")]


@dataclass(frozen=True)
class Record:
    """What stands in the metadata of a node: ``(clip(round(x0 / scale) + zero_point, low, high) - zero_point) * scale`` is its result.

    Attributes:
        scale, zero_point, low, high: Expressions over ``x1``, ``x2``, ...: the node's inputs. ``low`` and ``high`` are "" where nothing is cut off.
        axis: The axis of the channels that the elements of the scale belong to, None where the scale broadcasts as it is.
        rank: The rank of ``x0``.
        form: How it computes.
        floats: By how many float32 numbers a threshold of the Function was away from this, at most, when it was exported.
        moved: How many thresholds were.
    """

    scale: str
    zero_point: str
    low: str
    high: str
    axis: int | None
    rank: int
    form: Form
    floats: int
    moved: int


def write(record: Record) -> str:
    """The record as JSON."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"))


def read(node: ir.Node) -> Record | None:
    """What the metadata of a node says; None where it says nothing.

    Raises:
        FormatError: It is damaged.
    """
    text = node.metadata_props.get(QUANTIZER_PROPERTY)
    if text is None or not (is_python_op(node) or node.domain == PORTABLE_DOMAIN):
        return None
    place = f"metadata {QUANTIZER_PROPERTY} of {describe(node)}"
    record: Record = read_record(parse(text, place), Record, place)
    fits = 0 <= record.rank <= _MOST_AXES and (record.axis is None or 0 <= record.axis < record.rank)
    if not fits or record.floats < 0 or record.moved < 0 or bool(record.low) != bool(record.high):
        raise FormatError.damaged(place, "its axis, rank, ends or counts do not fit")
    known = {f"x{i}" for i, value in enumerate(node.inputs) if i and value is not None}
    for expression in map(Expression, filter(None, (record.scale, record.zero_point, record.low, record.high))):
        if not expression.names <= known:
            raise FormatError.damaged(place, f"{expression.text!r} names what is no input of the node")
    return record


def rounded(record: Record, x: np.ndarray, inputs: dict[str, Any]) -> np.ndarray:
    """What the record says that becomes of numbers, in float32.

    Args:
        record: The record.
        x: The numbers.
        inputs: The node's other inputs by their names, x1, ...
    """

    def make(op: str, *given: Any) -> Any:
        one, *rest = (np.asarray(each, np.float32) for each in given)
        compute = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power}
        simple = {"Round": np.rint, "Clip": np.clip}
        return compute[op](one, rest[0]) if op in compute else simple[op](one, *rest)  # type: ignore[operator]

    with np.errstate(all="ignore"):
        return np.asarray(_formula(record, x, inputs, make, lambda each: _as_channels(each, record)), np.float32)


def _as_channels(array: Any, record: Record) -> Any:
    if record.axis is None or np.size(array) == 1:
        return array
    return np.reshape(array, (-1, *[1] * (record.rank - record.axis - 1)))


def _formula(record: Record, x: Any, inputs: dict[str, Any], make: Any, channels: Any) -> Any:
    """The one place that says what a record means: on arrays and on values of a graph."""

    def said(text: str) -> Any:
        found = Expression(text).made(inputs, make)
        return found if isinstance(found, float) else channels(found)

    form, scale, zero = record.form, said(record.scale), said(record.zero_point)
    inverse = make("Div", 1.0, scale) if "multiply" in form.rounding or form.values == "divide" else None
    q = make("Mul", x, inverse) if form.rounding == "multiply" else make("Div", x, scale)
    shifted = zero != 0.0 if isinstance(zero, float) else True
    q = make("Round", make("Add", q, zero)) if form.inside and shifted else make("Round", q)
    q = make("Add", q, zero) if shifted and not form.inside else q
    q = make("Clip", q, said(record.low), said(record.high)) if record.low else q
    q = make("Sub", q, zero) if shifted else q
    return make("Div", q, inverse) if form.values == "divide" else make("Mul", q, scale)


def result_of(node: ir.Node) -> ir.Value | None:
    """What a call of a Function of one result gives; None where something else that it gives is read, too."""
    results = list(node.outputs[1:]) if is_python_op(node) else list(node.outputs)
    rest = [value for value in node.outputs if value is not results[0]] if results else []
    used = any(value.uses() or value.is_graph_output() for value in rest)
    return results[0] if results and not used else None


def lower(model: ir.Model) -> dict[ir.Value, Record]:
    """Put standard operators in the place of what is recorded as a quantiser, in place.

    Returns:
        The value of each quantiser -> its record.

    Raises:
        FormatError: A record is damaged.
    """
    found, scope = {}, Scope(free_prefix(model.graph, "declared/"), lambda value: False)
    for node in list(model.graph):
        record = read(node)
        if record is None or (result := result_of(node)) is None or not node.inputs or node.inputs[0] is None:
            continue
        op = Emitter(scope)
        output = _written(op, node, record)
        replace(scope, node, op.nodes, [output if value is result else None for value in node.outputs])
        found[output] = record
    scope.register(model.graph)
    return found


def _written(op: Emitter, node: ir.Node, record: Record) -> ir.Value:
    """The last value of the operators that stand for a node."""

    def make(name: str, *given: Any) -> ir.Value:
        if name == "Clip" and not all(isinstance(each, float) for each in given[1:]):
            return op.Min(op.Max(given[0], given[1]), given[2])  # Clip takes ends of no axes
        return op.node(name, given)

    def channels(value: ir.Value) -> ir.Value:
        if record.axis is None or (value.shape is not None and not len(value.shape)):
            return value
        return op.Reshape(value, op.i64([-1, *[1] * (record.rank - record.axis - 1)]))

    def number(value: ir.Value) -> ir.Value:
        return value if value.dtype in (None, ir.DataType.FLOAT) else op.Cast(value, to=ir.DataType.FLOAT)

    read_names = set().union(*(Expression(t).names for t in (record.scale, record.zero_point, record.low, record.high) if t))
    inputs = {f"x{i}": number(v) for i, v in enumerate(node.inputs) if v is not None and f"x{i}" in read_names}
    found: ir.Value = _formula(record, node.inputs[0], inputs, make, channels)
    return found
