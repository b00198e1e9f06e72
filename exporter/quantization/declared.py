"""exporter.quantizer: what a Function rounds to, as its author says it, and as the Function itself then proves it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from exporter.errors import short
from exporter.files.additions import ADDITIONS
from exporter.gradient_graph.model import remove_marks
from exporter.quantization.evaluation import Constants
from exporter.quantization.expressions import Expression
from exporter.quantization.grids import find_grid, number_of, thresholds
from exporter.quantization.records import FORMS, Record, read, result_of, rounded, write
from symbolics.errors import ArgumentError, ExportError, FormatError
from symbolics.graph.copies import clone_nodes
from symbolics.graph.scope import Scope
from symbolics.graph.values import function_of, is_python_op
from symbolics.node.attributes import read_attributes, values_of
from symbolics.node.containers import Slot
from symbolics.node.names import MODULE_PROPERTY, QUANTIZER_PROPERTY, SOURCE_PROPERTY, qualified_name
from symbolics.text import clean, reason

__all__ = ["declare", "quantizer"]

T = TypeVar("T", bound=type)
Number = int | float | str
Function = Callable[[np.ndarray], np.ndarray]

_MOST_AT_ONCE = 1 << 22  # numbers
_MOST_CHANNELS = 3  # of a weight: the first, the middle and the last
_MOST_BITS = 8
_BESIDE = 100  # levels on each side of 0.0 that are looked at where nothing cuts off


@dataclass(frozen=True)
class _Declaration:
    function: type
    scale: Expression
    zero_point: Expression
    bits: Expression | tuple[Expression, Expression] | None
    axis: int | None
    names: tuple[str, ...]


_declared: dict[str, _Declaration] = {}


@short
def quantizer(
    function: T,
    *,
    scale: Number,
    zero_point: Number = 0,
    bits: Number | tuple[Number, Number] | None = None,
    axis: int | None = None,
) -> T:
    """Declare that a Function rounds the first tensor that it takes to evenly spaced levels, so that `quantize` uses it.

    The Function computes ``(clip(round(x / scale) + zero_point, low, high) - zero_point) * scale``. Declare it once, beside the
    class and before the export, where `quantize` cannot find it by what the file computes.

    What you declare is a number, or text: a name of forward's, or ``+ - * / **`` of names and numbers. The export writes the
    text into the metadata of each call, with the numbers of that call. So the file can be quantised later without your package,
    with the scale that training has left.

    Each declaration is checked, at the export and for older files in `quantize`. The call is run on numbers, with the scale and
    the other arguments of the model. Levels and ends have to be those declared. Each threshold between two levels has to be the
    declared one to two float32 numbers, or to 1/32768 of a step where a zero point is added before the rounding. Calls whose
    scale the model computes from its inputs are left alone.

    Args:
        function: A torch.autograd.Function class with one result, in float32.
        scale: The step between levels: a positive number, or an expression.
        zero_point: The level of 0.0: a whole number, or an expression.
        bits: 1 to 8: the levels are 0 to ``2 ** bits - 1``, or around 0, with or without the lowest. Or the first and the last
            level, before the zero point is taken off. None: nothing is cut off.
        axis: The axis of ``x`` whose channels the elements of the scale belong to. None: the scale is one number, or has the
            axes of ``x`` and broadcasts.

    Returns:
        ``function``.

    Raises:
        ArgumentError: An argument has another value, or names what forward does not take.
        ExportError: From an export or `quantize`: the Function computes something else. The message names it and what does not
            fit.

    Examples:
        >>> Lsq = exporter.quantizer(Lsq, scale="s", bits=("low", "high"))  # forward(ctx, x, s, low, high)
        >>> Pact = exporter.quantizer(Pact, scale="alpha / (2 ** k - 1)", bits="k")  # forward(ctx, x, alpha, k)
        >>> Dorefa = exporter.quantizer(Dorefa, scale="1 / (2 ** k - 1)")  # forward(ctx, x, k), with a clamp before it
    """
    if not isinstance(function, type) or not callable(getattr(function, "apply", None)) or not callable(getattr(function, "forward", None)):
        raise ArgumentError(f"exporter.quantizer takes a class of torch.autograd.Function, not {clean(repr(function))[:100]}")
    label = f"exporter.quantizer({function.__qualname__})"
    names = tuple(inspect.signature(function.forward).parameters)  # type: ignore[attr-defined]

    def said(what: str, given: Any) -> Expression:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ArgumentError(f"{label}: {what} is a number, or text with names of forward's arguments, not {clean(repr(given))[:100]}")
        try:
            expression = Expression(given)
        except FormatError as error:
            raise ArgumentError(f"{label}: {what}: {error}") from error
        if unknown := sorted(expression.names - set(names)):
            raise ArgumentError(f"{label}: {what} names {unknown[0]!r}, and forward takes {', '.join(names)}")
        return expression

    ends: Expression | tuple[Expression, Expression] | None = None
    if isinstance(bits, (tuple, list)):
        if len(bits) != 2:
            raise ArgumentError(f"{label}: bits is a number, or the first and the last level, not {len(bits)} numbers")
        ends = said("bits[0]", bits[0]), said("bits[1]", bits[1])
    elif bits is not None:
        ends = said("bits", bits)
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise ArgumentError(f"{label}: axis is an integer, or None, not {clean(repr(axis))[:100]}")
    _declared[qualified_name(function)] = _Declaration(function, said("scale", scale), said("zero_point", zero_point), ends, axis, names)
    if declare not in ADDITIONS:
        ADDITIONS.append(declare)
    return function


def declare(model: ir.Model) -> None:
    """Write into the metadata of each call of a declared Function what is declared of it, once the Function has proven it, in place.

    Raises:
        ExportError: A Function computes something else than what is declared.
    """
    nodes = [node for node in model.graph if is_python_op(node) and function_of(node) in _declared and read(node) is None]
    if not nodes:
        return
    copy = model.clone()  # without the marks of detach(), a scale is a constant
    places = {id(node): place for place, node in enumerate(model.graph)}
    twins = list(copy.graph)
    twins = [twins[places[id(node)]] for node in nodes]
    remove_marks(copy)
    constants = Constants(copy)
    for node, twin in zip(nodes, twins, strict=True):
        try:
            record = _proven(copy, constants, twin, _declared[function_of(node)])
        except ExportError as error:
            raise ExportError(
                f"{error}\n  way out: mend what exporter.quantizer says of it, or take the declaration out"
            ) from error.__cause__
        if record is not None:
            node.metadata_props[QUANTIZER_PROPERTY] = write(record)


# ---------------------------------------------------------------------------------------------------------------- a call
def _proven(model: ir.Model, constants: Constants, node: ir.Node, declaration: _Declaration) -> Record | None:
    """The record of a call, None where its scale or another tensor that it takes is not known before a run."""
    call = read_attributes(values_of(node))
    source = node.inputs[0] if node.inputs else None
    others = [value for value in node.inputs[1:] if value is not None]
    if source is None or source.dtype not in (None, ir.DataType.FLOAT) or any(value not in constants for value in others):
        return None
    arrays = dict(zip((f"x{i}" for i, v in enumerate(node.inputs) if i and v is not None), constants.arrays(others), strict=True))
    where = f"{function_of(node)}{_place(node)} is declared a quantiser"
    names = _names(declaration, call.args, where)
    if len(call.output_slots) != 1 or result_of(node) is None or not call.input_ranks or call.input_types[0] != ir.DataType.FLOAT.value:
        raise ExportError(f"{where}, and it gives other things than one float32 tensor for the float32 tensor that it takes first")

    def said(what: str, expression: Expression) -> tuple[str, Any]:
        try:
            text = expression.said_of(names)
            return text.text, text.value(arrays)
        except FormatError as error:
            raise ExportError(f"{where}; {what}: {error}") from error

    scale, zero = said("scale", declaration.scale), said("zero_point", declaration.zero_point)
    ends = [_whole(where, "bits", said(f"bits={each.text!r}", each)) for each in _sequence(declaration.bits)]
    rank = max(call.input_ranks[0], 1)
    axis = declaration.axis
    if axis is not None and not -rank <= axis < rank:
        raise ExportError(f"{where} with axis={axis}, and what it rounds has {rank} axes")
    record = Record(scale[0], zero[0], "", "", None if axis is None else axis % rank, rank, FORMS[0], 0, 0)
    steps = np.asarray(scale[1], np.float32)
    if not (np.isfinite(steps) & (steps > 0)).all():
        raise ExportError(f"{where}; scale={declaration.scale.text!r} is {_shown(steps)} here, and a step is a positive number")
    run = _runner(model, node, arrays, where)
    functions, channels = _by_channel(run, record, steps, where)
    levels = {
        _check(where, declaration, function, float(steps.reshape(-1)[channel]), _whole(where, "zero_point", zero, channel), ends)
        for function, channel in zip(functions, channels, strict=True)
    }
    if len(levels) > 1:
        raise ExportError(
            f"{where}, and its channels have levels of their own: {' and '.join(' to '.join(each) for each in sorted(levels))}"
        )
    low, high = levels.pop()
    record = replace(record, low=low, high=high)
    weight = constants.array(source) if source in constants else None
    return _with_form(record, functions, channels, steps, arrays, None if weight is None else (weight, run(weight)))


def _sequence(bits: Expression | tuple[Expression, Expression] | None) -> Sequence[Expression]:
    return () if bits is None else bits if isinstance(bits, tuple) else (bits,)


def _place(node: ir.Node) -> str:
    module, source = (node.metadata_props.get(key, "") for key in (MODULE_PROPERTY, SOURCE_PROPERTY))
    return (
        f", called{f' in module {clean(module)}' if module else ''}{f' at {clean(source)}' if source else ''}," if module or source else ""
    )


def _names(declaration: _Declaration, args: Sequence[Any], where: str) -> dict[str, str | float]:
    """What forward's names are in a call: an input of the node, or a number."""
    given = declaration.names[len(declaration.names) - len(args) :] if len(declaration.names) >= len(args) else declaration.names
    found: dict[str, str | float] = {}
    for name, value in zip(given, args):
        if isinstance(value, Slot):
            found[name] = f"x{value.index}"
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)
    wanted = set().union(*(e.names for e in (declaration.scale, declaration.zero_point, *_sequence(declaration.bits))))
    if missing := sorted(wanted - found.keys()):
        raise ExportError(f"{where}, and its argument {missing[0]!r} is neither a tensor nor a number in this call")
    if "x0" not in found.values() or any(found[name] == "x0" for name in wanted):
        raise ExportError(f"{where}, and the first tensor that it takes is not what it rounds: {declaration.scale.text!r} is made of it")
    return found


def _whole(where: str, what: str, said: tuple[str, Any], channel: int = 0) -> int:
    array = np.asarray(said[1], np.float64).reshape(-1)
    number = float(array[channel if array.size > 1 else 0]) if array.size else np.nan
    if not np.isfinite(number) or number != round(number) or abs(number) > 1 << 20:
        raise ExportError(f"{where}; {what} is {number:g} here, and has to be a whole number")
    return int(number)


def _shown(array: np.ndarray) -> str:
    return f"{float(array.reshape(-1)[0]):g}" if array.size == 1 else f"{float(array.min()):g} to {float(array.max()):g}"


def _by_channel(run: Function, record: Record, steps: np.ndarray, where: str) -> tuple[list[Function], list[int]]:
    """The Function as one of numbers, for some of the channels; and which."""
    rank, axis = record.rank, record.axis
    if steps.size > 1 and axis is None:
        sizes = (1,) * (rank - steps.ndim) + steps.shape
        wide = [i for i, size in enumerate(sizes) if size > 1]
        if len(sizes) != rank or len(wide) != 1:
            raise ExportError(f"{where}, and scale has the shape {list(steps.shape)}, of {rank} axes: say axis=, or give it one wide axis")
        axis = wide[0]
    if steps.size == 1:
        axis = 0 if axis is None else axis
    assert axis is not None
    along = next((i for i in reversed(range(rank)) if i != axis), None)
    if along is None and steps.size > 1:
        raise ExportError(f"{where}, and what it rounds has the axis of its channels alone: declare Functions of two axes and more")
    channels = sorted({0, steps.size // 2, steps.size - 1})[:_MOST_CHANNELS]

    def function(channel: int) -> Function:
        def call(x: np.ndarray) -> np.ndarray:
            if along is None:
                return run(x.reshape(-1)).reshape(-1)
            if len(x) * steps.size > _MOST_AT_ONCE and len(x) > 1:
                return np.concatenate([call(part) for part in np.array_split(x, min(len(x), -(-len(x) * steps.size // _MOST_AT_ONCE)))])
            shape = [1] * rank
            shape[along] = x.size
            block = np.broadcast_to(x.reshape(shape), [steps.size if i == axis else n for i, n in enumerate(shape)])
            return np.take(run(np.ascontiguousarray(block, np.float32)), channel, axis).reshape(-1)

        return call

    return [function(channel) for channel in channels], channels


def _runner(model: ir.Model, node: ir.Node, arrays: Mapping[str, np.ndarray], where: str) -> Function:
    """The call alone, as onnxruntime runs it."""
    from exporter.runtime.session import inference_session

    values = {f"x{i}": value for i, value in enumerate(node.inputs) if value is not None}
    mapping: dict[ir.Value, ir.Value | None] = {}
    for name, value in values.items():
        dtype = ir.tensor(arrays[name]).dtype if name in arrays else ir.DataType.FLOAT
        mapping[value] = ir.Value(
            name=name,
            type=ir.TensorType(dtype),
            shape=ir.Shape([None] * (max(len(value.shape or ()), 1) if name == "x0" else arrays[name].ndim)),
        )
    (copy,) = clone_nodes(Scope("", lambda _: False), [node], mapping)
    copy.metadata_props.clear()
    copy.outputs[0].name = ""
    result = copy.outputs[1]
    result.name, result.shape = "y", None
    inputs = [value for value in dict.fromkeys(mapping[each] for each in values.values()) if value is not None]
    alone = ir.Model(ir.Graph(inputs, [result], nodes=[copy], opset_imports=dict(model.opset_imports)), ir_version=model.ir_version)
    session = inference_session(alone, allow=[_declared[function_of(node)].function])
    feeds = {name: array for name, array in arrays.items() if name in {value.name for value in inputs}}

    def run(x: np.ndarray) -> np.ndarray:
        try:
            (y,) = session.run(None, {**feeds, "x0": x})
        except Exception as error:
            raise ExportError(f"{where}, and cannot be run on numbers of the shape {list(x.shape)}: {reason(error)}") from error
        if y.shape != x.shape:
            raise ExportError(f"{where}, and gives the shape {list(y.shape)} for {list(x.shape)}: a quantiser rounds each number by itself")
        return np.asarray(y, np.float32)

    return run


def _check(where: str, declaration: _Declaration, function: Function, step: float, zero: int, ends: Sequence[int]) -> tuple[str, str]:
    """The first and the last level of a Function that is what is declared, "" where nothing is cut off.

    Raises:
        ExportError: It is something else.
    """
    scale = declaration.scale.text
    far = np.float32(step * _BESIDE)
    grid = find_grid((lambda x: function(np.clip(x, -far, far))) if not ends else function, [np.array(step, np.float32)])
    if isinstance(grid, str):
        raise ExportError(f"{where}, and computes something else: {grid}")
    if abs(float(grid.scale) / step - 1) > 1e-5:
        raise ExportError(f"{where} with scale={scale!r}, which is {step:g} here, and it rounds in steps of {float(grid.scale):g}")
    found = grid.low - grid.zero, grid.high - grid.zero
    if not ends:
        wide = far * np.array([-100, 100], np.float32)
        if found != (-_BESIDE, _BESIDE) or np.abs(function(wide) - wide).max() > step:
            raise ExportError(f"{where} without bits=, and it cuts something off: say at which levels with bits=")
        return "", ""
    bits = ends[0]
    if len(ends) == 1 and not 1 <= bits <= _MOST_BITS:
        raise ExportError(f"{where} with bits={bits}: integer kernels take 1 to {_MOST_BITS}")
    half = 1 << bits - 1 if len(ends) == 1 else 0
    ranges = [(ends[0], ends[1])] if len(ends) == 2 else [(0, 2 * half - 1), (-half, half - 1), (1 - half, half - 1)]
    for low, high in ranges:
        if (low - zero, high - zero) == found:
            return str(low), str(high)
    told = " or ".join(f"{low - zero} to {high - zero}" for low, high in ranges)
    raise ExportError(
        f"{where} with bits={_text(declaration.bits)} and zero_point={declaration.zero_point.text}, which are the levels {told} around 0.0, "
        f"and it gives {found[0]} to {found[1]}"
    )


def _text(bits: Expression | tuple[Expression, Expression] | None) -> str:
    return f"({', '.join(each.text for each in bits)})" if isinstance(bits, tuple) else "None" if bits is None else bits.text


# ------------------------------------------------------------------------------------------------------ to the last bit
@dataclass(frozen=True)
class _Channel:
    """A channel of a call: the Function as one of numbers, and the arrays that it reads there."""

    function: Function
    arrays: dict[str, Any]
    levels: np.ndarray
    samples: np.ndarray


def _with_form(
    record: Record,
    functions: Sequence[Function],
    channels: Sequence[int],
    steps: np.ndarray,
    arrays: dict[str, Any],
    weight: tuple[np.ndarray, np.ndarray] | None,
) -> Record:
    """The record with the order of computing that gives the Function's own numbers; where none does, with how far its thresholds are from them.

    Args:
        record: The record, with its levels.
        functions: The Function as one of numbers, in some channels.
        channels: Which.
        steps: All steps.
        arrays: The tensors of the call.
        weight: What it rounds and gives, where that is known.
    """
    low, high = (float(record.low), float(record.high)) if record.low else (-_BESIDE, _BESIDE)
    found = []
    for function, channel in zip(functions, channels, strict=True):
        step, wide = float(steps.reshape(-1)[channel]), high - low + 2
        dense = np.linspace(-step * wide, step * wide, 1 << 13, dtype=np.float32)
        levels = np.unique(function(dense) + np.float32(0.0))
        near = thresholds(function, levels)[:, None] + np.arange(-2, 4)
        of_channel = {
            n: a.reshape(-1)[channel if 1 < a.size == steps.size else 0] if a.size in (1, steps.size) else a for n, a in arrays.items()
        }
        found.append(_Channel(function, of_channel, levels, np.concatenate([dense, number_of(near.reshape(-1))])))
    least: tuple[int, Record] | None = None
    for form in FORMS:
        tried = replace(record, form=form)
        alone = replace(tried, axis=None)
        same = all(np.array_equal(rounded(alone, each.samples, each.arrays), each.function(each.samples)) for each in found)
        if same and (weight is None or np.array_equal(rounded(tried, weight[0], arrays), weight[1])):
            return tried
        gaps = np.concatenate([_apart(alone, each) for each in found])
        if least is None or gaps.max() < least[0]:
            least = int(gaps.max()), replace(tried, floats=int(gaps.max()), moved=int((gaps > 0).sum()))
    assert least is not None
    return least[1]


def _apart(record: Record, channel: _Channel) -> np.ndarray:
    """By how many float32 numbers each threshold of a channel is away from the record's."""
    one, other = (thresholds(each, channel.levels) for each in (channel.function, lambda x: rounded(record, x, channel.arrays)))
    return np.abs(one - other)
