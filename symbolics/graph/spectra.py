"""DFT and STFT in the forms in which onnxruntime is right: one place that says how, for exports, gradients, and the files of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.graph.builder import Builder
from symbolics.graph.copies import replace
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.shapes import is_open, same_dim
from symbolics.graph.values import array_of, attr, graph_of, input_of, made_by, static_shape
from symbolics.graph.walk import remove_unread, unread

__all__ = ["spectra_in_doubles", "spectra_of_open_lengths", "spectrum"]

#: What a DFT is computed from in float64: in float32, onnxruntime is wrong by 1e-4 where a length is no power of two; the half types it lacks.
_NARROW = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SAME_NUMBER = ("Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast")
_SCALED = ("Mul", "Div", "Cast", "Identity")


def spectrum(op: Builder, x: Value, length: Value | None, axis: int | Value | None, *, wide: bool = True, **attributes: int) -> Value:
    """A DFT.

    Where its length is no constant, ONNX infers that the result is as long as the axis is, and onnxruntime plans its memory by that. A Slice to as
    many points as DFT reads changes no number, and hides the size of the axis.

    Args:
        op: What writes it.
        x: Points, (..., 1 or 2).
        length: How many there are, an int64 scalar; None: all of the axis.
        axis: The axis; None is DFT's default.
        wide: Whether to compute in float64 where the length is not known to be a power of two.
        **attributes: DFT's ``inverse`` and ``onesided``.
    """
    place, real = _place(op, x, axis), _gives_real(attributes)
    size = None if place is None or x.shape is None else x.shape[place]
    if length is not None and not real and _is_size(length, x, place):
        length = None
    known = op.ints(length)
    if length is not None and (known is None or (real and size != known[0] // 2 + 1)):
        x = _fitted(op, x, op.Reshape(length, [1]), place if place is not None else axis, real)
    count = known[0] if known is not None else size if length is None and not real else None
    dtype = x.dtype
    if wide and _is_rough(dtype, count):
        shape, x = x.shape, op.Cast(x, to=ir.DataType.DOUBLE)
        x.shape = shape
    if op.scope.opset >= 20:
        y = op.DFT(x, length, op.i64(axis) if isinstance(axis, int) else axis, **attributes)
    else:
        y = op.DFT(x, length, axis=axis, **attributes)
    return y if x.dtype is dtype else op.Cast(y, to=dtype)


def _fitted(op: Builder, x: Value, points: Value, axis: int | Value | None, real: bool) -> Value:
    """As many points as DFT reads. Of a half of a spectrum those are fewer; onnxruntime is wrong where it is given others, so it is also filled up."""
    rank = None if x.shape is None else len(x.shape)
    wanted = op.Add(op.Div(points, op.i64([2])), op.i64([1])) if real else points
    if real and rank is not None and isinstance(axis, int):
        fitted = op.padded(x, [0], [op.Sub(wanted, op.vector([op.dim(x, axis)]))], [axis], rank)
    else:
        fitted = op.Slice(x, [0], wanted, [axis] if isinstance(axis, int) else op.Reshape(axis, [1]))
    known = op.ints(wanted) if made_by(fitted, "Pad") else None
    open_axes = (axis % rank,) if isinstance(axis, int) and rank else range(rank or 0)
    length = None if known is None else known[0]
    fitted.shape = None if x.shape is None else ir.Shape([length if i in open_axes else dim for i, dim in enumerate(x.shape)])
    return fitted


# ------------------------------------------------------------------------------------------------- nodes that are there
def spectra_of_open_lengths(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Write each DFT as `spectrum` does, in its own type, and take back the sizes that ONNX has inferred of it where its length is no constant; in place.

    Args:
        model: The model.
        nodes: Its nodes, in order; those of its functions are looked at as well.

    Returns:
        Whether there is a new node.
    """
    scope, changed = Scope(free_prefix(model.graph, "spectra/"), lambda value: True), False
    kept = unread(model.graph)
    bodies = [node for function in model.functions.values() for node in function if node.op_type == "DFT"]
    for node in [*(node for node in nodes if node.op_type == "DFT"), *bodies]:
        if node.domain or node.graph is None or (x := input_of(node, 0)) is None or (length := input_of(node, 1)) is None:
            continue
        _learn_types(node)
        op, attributes = _builder(scope, model, node), _attributes(node)
        axis, known = _axis(op, node), op.ints(length)
        if known is None and _is_fitted(op, node):
            continue
        y, place = spectrum(op, x, length, axis, wide=False, **attributes), _place(op, x, axis)
        if known is None or len(op.nodes) > 1:
            _put(scope, node, op, y)
            changed = True
        if known is None:
            _correct_size(y, x, length, place, attributes)
    if changed:  # the length, where it was the size of the axis
        remove_unread(model.graph, kept)
    return changed


def spectra_in_doubles(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Compute each DFT and STFT in float64 whose length is not known to be a power of two, in place.

    Returns:
        Whether there is a new node.
    """
    scope, changed = Scope(free_prefix(model.graph, "wide/"), lambda value: True), False
    for node in [node for node in nodes if node.op_type in ("DFT", "STFT")]:
        if node.domain or node.graph is None or (x := input_of(node, 0)) is None:
            continue
        _learn_types(node)
        op = _builder(scope, model, node)
        if _is_rough(x.dtype, _count(op, node, x)):
            given = [op.Cast(v, to=ir.DataType.DOUBLE) if v is not None and v.dtype is x.dtype else v for v in node.inputs]
            for value, cast in zip(node.inputs, given):
                if cast is not value and cast is not None and value is not None:
                    cast.shape = value.shape
            settings: dict[str, Any] = dict(node.attributes)
            wide = op.raw(node.op_type, given, **settings)
            wide.shape = node.outputs[0].shape
            _put(scope, node, op, op.Cast(wide, to=x.dtype))
            changed = True
    return changed


def _builder(scope: Scope, model: ir.Model, node: ir.Node) -> Builder:
    """A builder for the opset of the graph or function that a node stands in."""
    scope.opset = graph_of(node).opset_imports.get("", model.opset_imports[""])
    return Builder(scope)


def _put(scope: Scope, node: ir.Node, op: Builder, y: Value) -> None:
    """Put what a builder wrote in the place of a node. Its constants become nodes: a function has no initializers."""
    constants: dict[Value, Value] = {}
    made: list[ir.Node] = []
    for new in op.nodes:
        new.metadata_props.update(node.metadata_props)
        if new.op_type == node.op_type:
            new.name = node.name
        for index, value in enumerate(new.inputs):
            if value is None or value not in scope.constants.values() or value.const_value is None:
                continue
            if value not in constants:
                maker = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], name=scope.name("Constant"))
                constants[value] = maker.outputs[0]
                maker.outputs[0].name, maker.outputs[0].type, maker.outputs[0].shape = maker.name, value.type, value.shape
                made.append(maker)
            new.replace_input_with(index, constants[value])
    replace(scope, node, [*made, *op.nodes], [y])


def _correct_size(y: Value, x: Value, length: Value, place: int | None, attributes: dict[str, int]) -> None:
    """Give the axis of a result the size that it has, or none; and none to what was made of it and has the old one."""
    if y.shape is None or place is None:
        return
    old, named = y.shape[place], _size_named(length)
    if attributes["onesided"] and not attributes["inverse"]:  # half of it, which has no name: only the whole is known to be wrong
        if not (same_dim(old, named) or (x.shape is not None and same_dim(old, x.shape[place]))):
            return
        named = None
    if same_dim(old, named):
        return
    y.shape = ir.Shape([named if i == place else dim for i, dim in enumerate(y.shape)])
    behind = [y] if isinstance(old, int) or old.value is not None else []
    while behind:
        for reader in behind.pop().consumers():
            for value in reader.outputs:
                if value.shape is not None and not value.is_graph_output() and any(same_dim(dim, old) for dim in value.shape):
                    value.shape = ir.Shape([None if same_dim(dim, old) else dim for dim in value.shape])
                    behind.append(value)


# ------------------------------------------------------------------------------------------------------ what is known
def _attributes(node: ir.Node) -> dict[str, int]:
    return {name: attr(node, name) for name in ("inverse", "onesided")}


def _gives_real(attributes: dict[str, int]) -> bool:
    """Whether it goes from half of a spectrum back to real points."""
    return bool(attributes.get("inverse")) and bool(attributes.get("onesided"))


def _axis(op: Builder, node: ir.Node) -> int | Value | None:
    return input_of(node, 2) if op.scope.opset >= 20 else attr(node, "axis", 1)


def _place(op: Builder, x: Value, axis: int | Value | None) -> int | None:
    """The axis from the front, None where it is not known."""
    known = [axis] if isinstance(axis, int) else op.ints(axis) if axis is not None else [-2 if op.scope.opset >= 20 else 1]
    return None if known is None or x.shape is None else known[0] % len(x.shape)


def _count(op: Builder, node: ir.Node, x: Value) -> object:
    """The length of a DFT, or of the frames of a STFT, where it is known."""
    length = input_of(node, 1 if node.op_type == "DFT" else 3)
    if length is not None:
        known = op.ints(length)
        return None if known is None else known[0]
    if node.op_type == "STFT":
        return (static_shape(input_of(node, 2)) or (None,))[0]
    place = _place(op, x, _axis(op, node))
    return None if place is None or x.shape is None or _gives_real(_attributes(node)) else x.shape[place]


def _is_rough(dtype: ir.DataType | None, count: object) -> bool:
    """Whether onnxruntime computes a DFT of so many points too roughly in a type, or not at all."""
    return dtype in _NARROW and not (dtype is ir.DataType.FLOAT and isinstance(count, int) and count > 0 and count & (count - 1) == 0)


def _origin(length: Value | None) -> tuple[Value, int] | None:
    """The value and the axis that a number is the size of, where a Shape tells."""
    node = None if length is None else length.producer()
    while node is not None and not node.domain and node.op_type in _SAME_NUMBER and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or (node.domain, node.op_type) != ("", "Shape") or (value := node.inputs[0]) is None or value.shape is None:
        return None
    places = range(len(value.shape))[slice(attr(node, "start"), attr(node, "end"))]
    return (value, places[0]) if len(places) == 1 else None


def _size_named(length: Value) -> int | ir.SymbolicDim | None:
    found = _origin(length)
    return None if found is None or found[0].shape is None else found[0].shape[found[1]]


def _is_size(length: Value, x: Value, place: int | None) -> bool:
    """Whether a length is the size of the axis, of x or of what it is a multiple of."""
    found = _origin(length)
    return found is not None and found[1] == place and _unscaled(found[0]) is _unscaled(x)


def _unscaled(x: Value) -> Value:
    node = x.producer()
    while node is not None and not node.domain and node.op_type in _SCALED and node.inputs[0] is not None:
        if len(node.inputs) == 2 and static_shape(node.inputs[1]) not in ((), (1,)):
            break
        x = node.inputs[0]
        node = x.producer()
    return x


def _is_fitted(op: Builder, node: ir.Node) -> bool:
    """Whether a DFT stands behind a Slice or Pad as `spectrum` writes it: by its length, to a size that nobody has given a name."""
    x, place = node.inputs[0], None
    place = None if x is None else _place(op, x, _axis(op, node))
    size = None if x is None or x.shape is None or place is None else x.shape[place]
    if isinstance(size, int) or (size is not None and not is_open(size.value)):
        return False
    maker = None if x is None else x.producer()
    if maker is not None and maker.op_type == "Cast" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    index = {"Slice": 2, "Pad": 1}.get("" if maker is None or maker.domain else maker.op_type)
    sizes = None if maker is None or index is None else input_of(maker, index)
    return sizes is not None and op.ints(sizes) is None and not _behind(sizes).isdisjoint(_behind(input_of(node, 1)))


def _behind(number: Value | None) -> set[Value]:
    """A number, and those that it was made of by few steps of arithmetic; no constants."""
    found: set[Value] = set()
    steps = [] if number is None else [number]
    for _ in range(6):
        found.update(steps)
        makers = [node for each in steps if (node := each.producer()) is not None and node.op_type not in ("Constant", "Shape")]
        steps = [v for node in makers for v in node.inputs if v is not None and array_of(v) is None]
    return found


def _learn_types(node: ir.Node) -> None:
    """Types that a translation has not said: what is computed from has that of what it was made of; lengths are whole numbers."""
    x, behind = node.inputs[0], node.inputs[0]
    while behind is not None and behind.dtype is None and (maker := behind.producer()) is not None and maker.op_type != "Cast":
        behind = input_of(maker, 0)
    if x is not None and behind is not None and x.dtype is None and behind.dtype is not None:
        x.type = ir.TensorType(behind.dtype)
    if (length := input_of(node, 1)) is not None and length.type is None:
        length.type = ir.TensorType(ir.DataType.INT64)
