"""Forms of a model that an execution provider other than the CPU needs, made in memory when a session is opened.

A file is written in the forms that are quickest on onnxruntime's CPU. Where a provider does not take one of them, a row of `FORMS` has what
puts another in its place, which computes the same. Most forms are right for all providers, and rules write those at once; here is
what would cost the CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from exporter.runtime.convolution_forms import weights_of_convolutions
from exporter.runtime.facts import ShapeAndType, find_facts, fixed_shape
from exporter.runtime.narrow import narrow_integers
from exporter.runtime.pool_forms import maxima_by_windows
from exporter.runtime.webgpu_forms import (
    batches_normalized,
    booleans_as_numbers,
    channels_in_fours,
    fences_by_comparison,
    fills_by_expand,
    functions_written_out,
    in_older_opset,
    logarithms_of_softmax,
    passes_unrolled,
    remainders_by_division,
    signs_by_comparisons,
    sums_in_pairs,
)
from symbolics.errors import ArgumentError
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import array_of, attr, fixed_array, made_by, rank_of, static_shape
from symbolics.graph.walk import captured, remove_unread, subgraphs, unread, walk
from symbolics.node.names import ADD_ROWS, ROWS_DOMAIN
from symbolics.text import shown

#: Constants of so many elements at most are written into a body that reads them.
SMALL = 64

__all__ = [
    "FORMS",
    "NARROW",
    "all_rows_at_once",
    "captures_as_states",
    "rows_at_once",
    "rows_of_infinity",
    "sums_over_known_axes",
    "sums_over_repeats",
    "write_file",
    "write_forms",
]


def rows_at_once(model: ir.Model) -> int:
    """Rows added to rows by ScatterND, in place of `AddRows` (`symbolics.graph.row_sums`), which is there for the threads of onnxruntime's CPU.

    Its body sorts rows and asks how many there are of each, which providers with a compiler of their own do not take.

    Returns:
        How many were written so.
    """
    found = [node for node in walk(model.graph) if node.domain == ROWS_DOMAIN and node.op_type == ADD_ROWS]
    scope = Scope(free_prefix(model.graph, "form/rows/") if found else "", lambda value: False)
    for node in found:
        op, (data, index, updates) = Emitter(scope), node.inputs
        replace(scope, node, op.nodes, [op.ScatterND(data, op.Unsqueeze(index, op.i64([1])), updates, reduction="add")])
    scope.register(model.graph)
    if found:
        model.functions.pop((ROWS_DOMAIN, ADD_ROWS, ""), None)
        model.graph.opset_imports.pop(ROWS_DOMAIN, None)
    return len(found)


def all_rows_at_once(model: ir.Model) -> int:
    """For onnxruntime's CPU with one thread: `rows_at_once`, and the same of short rows; how many were written so."""
    before = unread(model.graph)
    count = rows_at_once(model) + _short_rows_at_once(model)
    if count:
        remove_unread(model.graph, before)
    return count


def _short_rows_at_once(model: ir.Model) -> int:
    """Rows added to rows by ScatterND, where `symbolics.graph.row_sums.by_elements` has added them element by element.

    The index needs no copy for each element, and a row is added in one loop. A file cannot say ScatterND, as several threads would
    lose additions.
    """
    found = [(node, column) for node in walk(model.graph) if (column := _column_of_rows(node)) is not None]
    scope = Scope(free_prefix(model.graph, "form/short/") if found else "", lambda value: False)
    for node, column in found:
        op, (data, _, updates) = Emitter(scope), node.inputs
        replace(scope, node, op.nodes, [op.ScatterND(data, op.Reshape(column, op.i64([-1, 1])), updates, reduction="add")])
    scope.register(model.graph)
    return len(found)


def _column_of_rows(node: ir.Node) -> ir.Value | None:
    """The index of a ScatterElements that adds whole rows, one number for each row; else None."""
    if node.op_type != "ScatterElements" or node.domain or attr(node, "axis", 0) != 0 or attr(node, "reduction", None) != "add":
        return None
    data, index, updates = node.inputs
    wide = made_by(index, "Expand")
    if wide is None or not _is_shape_of(wide.inputs[1], updates):
        return None
    column = made_by(wide.inputs[0], "Unsqueeze")
    axes = None if column is None else fixed_array(column.inputs[1])
    if column is None or axes is None or axes.tolist() != list(range(1, rank_of(data) or 0)):
        return None
    return column.inputs[0]


def _is_shape_of(sizes: ir.Value | None, value: ir.Value | None) -> bool:
    fixed, made = fixed_array(sizes), made_by(sizes, "Shape")
    if fixed is not None:
        shape = None if value is None else static_shape(value)
        return shape is not None and fixed.tolist() == list(shape)
    return made is not None and made.inputs[0] is value and not made.attributes


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
    outer: list[ir.Value] = []
    small: list[tuple[ir.Value, np.ndarray]] = []
    for read in captured(node):
        array = array_of(read)
        if array is None or array.size > SMALL:
            outer.append(read)
        else:
            small.append((read, array))
    states = len(body.inputs) - node.attributes["num_scan_inputs"].as_int()
    given = [ir.Value(name=scope.name("state"), type=value.type, shape=value.shape) for value in outer]
    inside = dict(zip(outer, given, strict=True))
    # A state is no constant: axes and sizes have to be.
    copies = [ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(array))], name=scope.name("Constant")) for _, array in small]
    for (read, _), made in zip(small, copies, strict=True):
        made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = scope.name("constant"), read.type, read.shape
        inside[read] = made.outputs[0]
    for inner in walk(body):
        for place, value in enumerate(inner.inputs):
            if value in inside:
                inner.replace_input_with(place, inside[value])
    ends = list(body.outputs)  # onnx_ir has no body that gives out a value from outside
    kept = [ir.Node("", "Identity", [value], name=scope.name("Identity")) for value in given]
    for value, same in zip(given, kept, strict=True):
        same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = scope.name("stays"), value.type, value.shape
    body.extend(kept)
    if copies:
        body.insert_before(body[0], copies)
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


def sums_over_repeats(model: ir.Model) -> int:
    """Sums to a shape that is known at run time only: over constant axes of a reshaped tensor, in place of axes that are computed.

    OpenVINO takes no axes whose number is known at run time only. Here each axis becomes two: what is left of it, and how often it was
    repeated, which is summed over. On the CPU a sum over every other axis takes three to fifty times as long.

    Returns:
        How many sums were written so.
    """
    scope = Scope(free_prefix(model.graph, "form/sum/"), lambda value: False)
    found = [(node, sizes) for node in walk(model.graph) if (sizes := _summed_to(node)) is not None]
    changed = sum(_over_repeats(scope, node, sizes) for node, sizes in found)
    scope.register(model.graph)
    return changed


def _summed_to(node: ir.Node) -> ir.Value | None:
    """The vector of sizes, of which `Builder.sum_to` computes the axes of this ReduceSum."""
    if node.op_type != "ReduceSum" or node.domain != "" or len(node.inputs) < 2:
        return None
    if not attr(node, "noop_with_empty_axes") or not attr(node, "keepdims", 1):
        return None
    value = node.inputs[1]
    for op_type in ("Reshape", "NonZero", "Equal"):
        step = None if value is None else value.producer()
        if step is None or step.op_type != op_type:
            return None
        value, last = step.inputs[0], step
    one = array_of(last.inputs[1])
    return value if one is not None and one.tolist() in (1, [1]) else None


def sums_over_known_axes(model: ir.Model) -> int:
    """The same sums where all sizes are known by now: over constant axes.

    Returns:
        How many sums were written so.
    """
    found = [(node, sizes) for node in walk(model.graph) if (sizes := _summed_to(node)) is not None]
    facts: dict[ir.Value, ShapeAndType] = {}
    if found:
        find_facts(model, facts)
    scope = Scope(free_prefix(model.graph, "form/axes/"), lambda value: False)
    changed = 0
    for node, sizes in found:
        if (known := _known_sizes(sizes, facts)) is not None:
            axes = scope.constant([axis for axis, size in enumerate(known) if size == 1], ir.DataType.INT64)
            node.replace_input_with(1, axes)
            changed += 1
    scope.register(model.graph)
    return changed


def _known_sizes(sizes: ir.Value, facts: Mapping[ir.Value, ShapeAndType]) -> list[int] | None:
    """What a vector of sizes holds."""
    node, array = sizes.producer(), array_of(sizes)
    if array is not None:
        return [int(size) for size in array]
    if node is not None and node.op_type == "Shape" and not node.attributes and node.inputs[0] is not None:
        shape = fixed_shape(node.inputs[0], facts)
        return None if shape is None else list(shape)
    if node is not None and node.op_type == "Concat":
        parts = [None if value is None else _known_sizes(value, facts) for value in node.inputs]
        return None if None in parts else [size for part in parts for size in part or ()]
    return None


def _over_repeats(scope: Scope, node: ir.Node, sizes: ir.Value) -> bool:
    x, rank = node.inputs[0], _length(sizes)
    if x is None or rank is None:
        return False
    op = Emitter(scope)
    repeats = op.Div(op.Shape(x), op.Where(op.Equal(sizes, op.i64(0)), op.i64(1), sizes))
    pairs = op.Concat(op.Reshape(sizes, op.i64([-1, 1])), op.Reshape(repeats, op.i64([-1, 1])), axis=1)
    split = op.Reshape(x, op.Reshape(pairs, op.i64([-1])), allowzero=1)
    replace(scope, node, op.nodes, [op.ReduceSum(split, op.i64(range(1, 2 * rank, 2)), keepdims=0)])
    return True


def _length(sizes: ir.Value) -> int | None:
    """How many elements a vector of sizes has."""
    dims, node = static_shape(sizes), sizes.producer()
    if dims is not None and len(dims) == 1:
        return dims[0]
    if node is None or node.op_type not in ("Shape", "Concat"):
        return None
    if node.op_type == "Shape":
        whole = node.inputs[0]
        return None if whole is None or whole.shape is None or node.attributes else len(whole.shape)
    parts = [None if value is None else _length(value) for value in node.inputs]
    return None if None in parts else sum(part for part in parts if part is not None)


def rows_of_infinity(model: ir.Model) -> int:
    """Whether all of a row is -infinity, asked of each element: OpenVINO's ReduceMax of such a row gives the lowest finite number.

    The standard's body of Attention asks it of the masks: a row of which nothing is left is zero, and was NaN.

    Returns:
        How many questions were written so.
    """
    scope = Scope(free_prefix(model.graph, "form/row/"), lambda value: False)
    found = [(node, top) for node in walk(model.graph) if (top := _asks_for_rows(node)) is not None]
    for node, top in found:
        op = Emitter(scope)
        infinity = node.inputs[1]
        some = op.Cast(op.Greater(top.inputs[0], infinity), to=ir.DataType.FLOAT)
        most = op.ReduceMax(some, *top.inputs[1:], **{name: each.value for name, each in top.attributes.items()})
        replace(scope, node, op.nodes, [op.Equal(most, op.constant(0, ir.DataType.FLOAT))])
    scope.register(model.graph)
    return len(found)


def _asks_for_rows(node: ir.Node) -> ir.Node | None:
    """The ReduceMax that an Equal compares with -infinity."""
    if node.op_type != "Equal" or node.domain != "":
        return None
    top, other = (None if value is None else value.producer() for value in node.inputs)
    if top is None or top.op_type != "ReduceMax" or top.inputs[0] is None:
        return None
    bottom = node.inputs[1] if other is None or other.op_type not in ("Cast", "CastLike") else other.inputs[0]
    array = None if bottom is None else array_of(bottom)
    return top if array is not None and array.size == 1 and np.isneginf(array.item()) else None


#: provider, as `exporter.runtime.providers` names it for short -> what writes a model in forms that it takes. Gradients by name come first, which become
#: nodes that the others look at.
FORMS: Mapping[str, tuple[Callable[[ir.Model], int], ...]] = {
    "openvino": (weights_of_convolutions, rows_at_once, sums_over_repeats, rows_of_infinity, captures_as_states),
    "webgpu": (
        functions_written_out, maxima_by_windows, rows_at_once, passes_unrolled, sums_over_known_axes, batches_normalized, logarithms_of_softmax, sums_in_pairs,
        signs_by_comparisons, fills_by_expand, remainders_by_division, fences_by_comparison, booleans_as_numbers, channels_in_fours, in_older_opset,
    ),
}  # fmt: skip

#: Providers that have no integers of 64 bits to compute with: files that are written for them take int32.
NARROW = frozenset({"webgpu"})


def write_forms(names: Iterable[str], model: ir.Model) -> bool:
    """Write a model in the forms that providers of these short names take, in place; whether anything changed."""
    forms = dict.fromkeys(form for name in names for form in FORMS.get(name, ()))
    before = unread(model.graph) if forms else set()
    changed = sum(form(model) for form in forms)
    if changed:
        remove_unread(model.graph, before)
    return changed > 0


def write_file(name: str, model: ir.Model, carried: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Write a model in the forms of one provider, for a file; in place.

    In memory a session takes what the file says. A file may say it anew: integers of 64 bits become such of 32 where the provider lacks them.

    Args:
        name: A name of `FORMS`.
        model: The model.
        carried: As `exporter.runtime.narrow.narrow_integers`.

    Returns:
        The names of the inputs that took int64 and now take int32.

    Raises:
        ArgumentError: There are no forms for such a provider.
    """
    if name not in FORMS:
        raise ArgumentError(
            f"there are no forms for the provider {shown(str(name))}: {' and '.join(sorted(FORMS))} have some, others take a file as it is written"
        )
    before = unread(model.graph)
    narrowed: list[str] = []
    if name in NARROW:
        functions_written_out(model)
        rows_at_once(model)  # what its calls take is int64
        narrowed = narrow_integers(model, carried)
    write_forms([name], model)
    remove_unread(model.graph, before)
    return narrowed
