"""A thin op builder over onnx_ir: ``op.MatMul(a, b)`` appends a node, ``a * b`` on values is ``op.Mul(a, b)``.

It knows element types, promotes Python numbers, remembers what it built and folds integer constants; shapes it takes from
the forward graph. Rules need nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from symbolics.graph.scope import Scope
from symbolics.graph.values import attr, static_shape, unsupported

__all__ = ["Builder", "Operand"]

Operand = ir.Value | int | float | bool | Sequence[int] | np.ndarray | None

_BOOLEAN = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "IsNaN", "IsInf", "Xor"})
_INTEGER = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin"})
_TYPED_BY = {"Where": 1, "CastLike": 1, "OneHot": 2}  # the output has the type of this input, otherwise of the first

_FOLD: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Max": lambda *a: np.maximum.reduce(np.broadcast_arrays(*a)),
    "Min": lambda *a: np.minimum.reduce(np.broadcast_arrays(*a)),
}


# ------------------------------------------------------------------------------------------------------- the builder
class Builder:
    """Collects new nodes in ``nodes``; the caller puts them into a graph.

    Numbers among the inputs take the element type of the first tensor that is no boolean; lists are int64.
    """

    def __init__(self, scope: Scope, parent: Builder | None = None) -> None:
        self.scope = scope
        self.parent = parent
        self.nodes: list[ir.Node] = []
        self._memo: dict[Hashable, ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Operand, **attributes: Any) -> Any:
            return self.node(op_type, inputs, **attributes)

        setattr(self, op_type, emit)
        return emit

    def node(self, op_type: str, inputs: Sequence[Operand], *, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Append a node. Its output, or the tuple of its outputs where there are several."""
        values = self._operands(inputs)
        if op_type in _FOLD and (folded := self._fold(op_type, values)) is not None:
            return folded
        node = ir.Node(domain, op_type, values, [_attribute(k, v) for k, v in attributes.items() if v is not None], num_outputs=outputs)
        node.name = self.scope.name(op_type)
        body = next((v for v in attributes.values() if isinstance(v, ir.Graph)), None)
        dtype = None if body is not None else _output_type(op_type, values, attributes)
        for i, out in enumerate(node.outputs):
            out.name = node.name if i == 0 else f"{node.name}_{i}"
            if dtype is not None and (i == 0 or op_type == "Split"):
                out.type = ir.TensorType(dtype)
        if body is not None:  # If, Loop, Scan: what their bodies give; a Loop's body says first whether to go on
            for out, inner in zip(node.outputs, body.outputs[1 if op_type == "Loop" else 0 :]):
                out.type = inner.type
        if op_type == "TopK":
            node.outputs[1].type = ir.TensorType(ir.DataType.INT64)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def add(self, node: ir.Node) -> ir.Node:
        """Append a node made elsewhere; its unnamed outputs get names."""
        self.nodes.append(node)
        return node

    def child(self) -> Builder:
        """A builder for the body of a control flow node; it may use what this one built so far."""
        return Builder(self.scope, self)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[Builder]:
        """Within it ``+ - * /`` on values append to this builder."""
        before = ir.set_value_magic_handler(self)
        try:
            yield self
        finally:
            ir.set_value_magic_handler(before)

    def memo(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """What ``make`` built the first time it was asked for ``key``, in this scope or an enclosing one."""
        scope: Builder | None = self
        while scope is not None:
            if (known := scope._memo.get(key)) is not None:
                return known
            scope = scope.parent
        made = self._memo[key] = make()
        return made

    # -------------------------------------------------------------------------------------------------- constants
    def constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A constant, once per build."""
        return self.scope.constant(value, dtype)

    def i64(self, value: Any) -> ir.Value:
        """An int64 constant: a scalar of a number, a vector of a list."""
        return self.scope.constant(value, ir.DataType.INT64)

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar of the element type of ``like``."""
        return self.scope.constant(value, like.dtype or ir.DataType.FLOAT)

    def const(self, value: ir.Value | None) -> np.ndarray | None:
        """The array of a value that no training step changes, otherwise None."""
        return self.scope.const(value)

    def ints(self, value: ir.Value | None) -> list[int] | None:
        """A constant vector of integers, None where the value is no constant."""
        array = self.const(value)
        return None if array is None else [int(i) for i in array.reshape(-1)]

    # ----------------------------------------------------------------------------------------------------- shapes
    def shape(self, x: ir.Value) -> ir.Value:
        """The shape as int64 vector; a constant where it is static."""
        dims = static_shape(x)
        return self.i64(list(dims)) if dims is not None else self.memo(("shape", x), lambda: self.Shape(x))

    def dim(self, x: ir.Value, axis: int) -> int | ir.Value:
        """One dim: a number where it is static, otherwise an int64 vector of one element."""
        if x.shape is not None and type(x.shape[axis]) is int:
            return x.shape[axis]
        if axis < 0 and x.shape is not None:
            axis += len(x.shape)
        return self.memo(("dim", x, axis), lambda: self.Shape(x, start=axis, end=axis + 1 if axis != -1 else None))

    def indices(self, x: ir.Value, axis: int) -> ir.Value:
        """0, 1, ... along an axis, as int64 vector: a constant where the dim is static."""
        length = self.dim(x, axis)
        if isinstance(length, int):
            return self.i64(list(range(length)))
        return self.Range(self.i64(0), self.Squeeze(length, [0]), self.i64(1))

    def vector(self, dims: Sequence[int | ir.Value]) -> ir.Value:
        """An int64 vector of numbers and vectors, end to end."""
        if all(isinstance(d, int) for d in dims):
            return self.i64(list(dims))
        parts: list[ir.Value | list[int]] = []
        for d in dims:
            if isinstance(d, ir.Value):
                parts.append(d)
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(d)
            else:
                parts.append([d])
        return self.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]

    def size(self, x: ir.Value) -> int | ir.Value:
        """The number of elements: a number where it is static, otherwise an int64 scalar."""
        dims = static_shape(x)
        return int(np.prod(dims)) if dims is not None else self.memo(("size", x), lambda: self.Size(x))

    def rank(self, node: ir.Node, x: ir.Value) -> int:
        """The rank of an input or output of the node; the rules that ask for it cannot do without."""
        if x.shape is None:
            raise unsupported(node, f"the rank of {x.name!r} is not known; run shape inference on the model, or add the shape to it")
        return len(x.shape)

    def reshape(self, x: ir.Value, dims: Sequence[int | ir.Value] | ir.Value) -> ir.Value:
        """Reshape to numbers (0 copies, -1 fills) and one-element vectors."""
        if isinstance(dims, ir.Value):
            return self.Reshape(x, dims)
        if all(isinstance(d, int) and d for d in dims) or dims == [-1]:
            return self._reshape_static(x, [int(d) for d in dims])
        return self.Reshape(x, self.vector(dims))

    def _reshape_static(self, x: ir.Value, dims: list[int]) -> ir.Value:
        """Reshape to numbers, -1 fills: of what was reshaped before it, or nothing where that has the shape already."""
        whole = static_shape(x)
        if whole is not None and -1 in dims and 0 not in whole:
            dims = [int(np.prod(whole)) // -int(np.prod(dims)) if d == -1 else d for d in dims]
        if (before := _before_reshape(x)) is not None:
            x = before
        if static_shape(x) == tuple(dims):
            return x
        maker = x.producer()
        if maker is not None and maker.graph is None and maker.op_type == "Mul" and not maker.domain and -1 not in dims:
            for left, right in (maker.inputs, maker.inputs[::-1]):  # the product of what had the shape before: reshape the other
                if (before := _before_reshape(left)) is not None and static_shape(before) == tuple(dims):
                    if static_shape(right) == static_shape(left):
                        return self._static(self.Mul(before, self._reshape_static(right, dims)), dims)
        return self.memo(("reshape", x, tuple(dims)), lambda: self._static(self.Reshape(x, dims), dims))

    def _static(self, x: ir.Value, dims: Sequence[int]) -> ir.Value:
        if -1 not in dims and 0 not in dims:
            x.shape = ir.Shape(dims)
        return x

    def rows(self, x: ir.Value, width: int | ir.Value) -> ir.Value:
        """All axes but the last, which has this width, as one."""
        return self.reshape(x, [-1, width]) if isinstance(width, int) else self.memo(("rows", x), lambda: self.reshape(x, [-1, width]))

    def matrix_of(self, x: ir.Value) -> ir.Value | None:
        """The matrix that x was reshaped from, where it was one."""
        before = _before_reshape(x)
        dims = None if before is None else static_shape(before)
        return before if dims is not None and len(dims) == 2 else None

    def add_up(self, parts: Sequence[ir.Value], like: ir.Value) -> ir.Value:
        """The sum of values of the shape of ``like``; of what they were reshaped from, where one was one matrix."""
        matrix = next((static_shape(m) for p in parts if (m := self.matrix_of(p)) is not None), None)
        whole = static_shape(like)
        if matrix is None or whole is None or whole[-1:] != matrix[-1:] or np.prod(whole) != np.prod(matrix):
            total = self.Add(*parts) if len(parts) == 2 else self.Sum(*parts)
            total.shape = like.shape
            return total
        parts = [self._reshape_static(p, list(matrix)) for p in parts]
        total = self._static(self.Add(*parts) if len(parts) == 2 else self.Sum(*parts), matrix)
        return self._reshape_static(total, list(whole))

    def flat(self, x: ir.Value) -> ir.Value:
        """x as a vector."""
        return self.memo(("flat", x), lambda: self.Reshape(x, [-1]))

    def reshape_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of ``like``."""
        dims = None if like.shape is None else [d if type(d) is int else -1 for d in like.shape]
        if dims is not None and dims.count(-1) <= 1 and 0 not in dims:
            return self._as_transpose(x, dims) or self.reshape(x, dims)
        return self.Reshape(x, self.shape(like), allowzero=1)

    def _as_transpose(self, x: ir.Value, dims: list[int]) -> ir.Value | None:
        """Reshape(Transpose(Reshape(z))) that merges leading axes of z for the Transpose alone, as a Transpose of z."""
        turn = x.producer()
        merge = turn.inputs[0].producer() if turn is not None and turn.op_type == "Transpose" and turn.inputs[0] is not None else None
        perm = None if turn is None else attr(turn, "perm")
        if merge is None or merge.op_type != "Reshape" or perm is None or perm[0] != 0 or merge.domain or turn.domain:
            return None
        z, merged = merge.inputs[0], self.ints(merge.inputs[1])
        shape = None if z is None else static_shape(z)
        lead = 0 if shape is None else len(shape) - len(perm) + 1
        if merged is None or shape is None or lead < 1 or list(shape[lead:]) != merged[1:]:
            return None
        if dims != [*shape[:lead], *[merged[p] for p in perm[1:]]]:
            return None
        return self.transpose(z, [*range(lead), *[lead - 1 + p for p in perm[1:]]])

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Transpose; one of a Transpose is one Transpose, or none."""
        inner = x.producer()
        if inner is not None and not inner.domain and inner.op_type == "Transpose" and (first := attr(inner, "perm")) is not None:
            x, perm = inner.inputs[0], [first[p] for p in perm]
        if list(perm) == list(range(len(perm))):
            return x
        if inner is not None and inner.graph is None and inner.op_type == "Gemm" and list(perm) == [1, 0] and len(inner.inputs) == 2:
            a, b = inner.inputs
            flags = {"transA": 1 - attr(inner, "transB", 0), "transB": 1 - attr(inner, "transA", 0), "alpha": attr(inner, "alpha")}
            return self.Gemm(b, a, **{k: v for k, v in flags.items() if v})
        turned = self.Transpose(x, perm=list(perm))
        if x.shape is not None:
            turned.shape = ir.Shape([x.shape[p] for p in perm])
        return turned

    def concat(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        """Concat; of values that were transposed and reshaped alike it is one Transpose and one Reshape of a Concat."""
        shapes = [static_shape(p) for p in parts]
        if None not in shapes and axis % len(shapes[0]) == len(shapes[0]) - 1:
            axis %= len(shapes[0])
            apart = [z for p in parts if (z := _before_reshape(p)) is not None and static_shape(z) is not None]
            inner = [static_shape(z) for z in apart]
            if len(apart) == len(parts) and all(
                s[:axis] == t[:axis] and s[axis + 1 :] == inner[0][axis + 1 :] for s, t in zip(inner, shapes)
            ):
                whole = [*shapes[0][:axis], sum(s[axis] for s in shapes)]
                dims = [*inner[0][:axis], sum(s[axis] for s in inner), *inner[0][axis + 1 :]]
                return self._reshape_static(self._static(self._concat_transposed(apart, axis), dims), whole)
        return self.Concat(*parts, axis=axis)

    def _concat_transposed(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        makers = [p.producer() for p in parts]
        perms = {tuple(attr(m, "perm") or ()) if m is not None and m.graph is None and m.op_type == "Transpose" else () for m in makers}
        if len(perms) == 1 and (perm := perms.pop()):
            return self.Transpose(self.Concat(*[m.inputs[0] for m in makers if m is not None], axis=perm[axis]), perm=list(perm))
        return self.Concat(*parts, axis=axis)

    def scale(self, x: ir.Value, factor: float) -> ir.Value:
        """x times a number; what is itself a new product with a number takes the product of both."""
        inner = x.producer()
        if inner is not None and inner.graph is None and inner.op_type == "Mul" and x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            known = self.const(inner.inputs[1])
            if known is not None and known.ndim == 0:
                return self.Mul(inner.inputs[0], float(known) * factor)
        return self.Mul(x, factor)

    def expand_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """x broadcast to the shape of another value."""
        return self.Expand(x, self.shape(like))

    def zeros(self, shape: ir.Value | Sequence[int], dtype: ir.DataType) -> ir.Value:
        """A tensor of zeros."""
        zero = ir.tensor(np.zeros(1, dtype.numpy()), dtype=dtype)
        return self.ConstantOfShape(shape, value=zero)

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Zeros of the shape and type of x, once per build."""
        zeros = self.memo(("zeros", x), lambda: self.zeros(self.shape(x), x.dtype))
        zeros.shape = x.shape
        return zeros

    def mask(self, condition: ir.Value, like: ir.Value) -> ir.Value:
        """A boolean as ones and zeros of the element type of ``like``."""
        return self.Cast(condition, to=like.dtype)

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """x in a type, as it is where it has it."""
        return x if dtype is None or x.dtype is dtype else self.Cast(x, to=dtype)

    def count_over(self, x: ir.Value, axes: Sequence[int], like: ir.Value) -> float | ir.Value:
        """How many elements x has along the axes, in the element type of ``like``."""
        dims = [self.dim(x, a) for a in axes]
        if all(isinstance(d, int) for d in dims):
            return float(np.prod(dims))
        return self.Cast(self.ReduceProd(self.vector(dims), keepdims=0), to=like.dtype)

    # -------------------------------------------------------------------------------------------------- movements
    def pad(self, x: ir.Value, before: Sequence[int | ir.Value], after: Sequence[int | ir.Value], axes: Sequence[int]) -> ir.Value:
        """Pad with zeros; negative numbers cut off. Static cuts become Slices, which every runtime has."""
        if not all(isinstance(v, int) for v in (*before, *after)):
            return self.Pad(x, self.vector([*before, *after]), None, list(axes))
        cut = [(a, max(-b, 0), -max(-e, 0) or np.iinfo(np.int64).max) for a, b, e in zip(axes, before, after) if b < 0 or e < 0]
        if cut:
            x = self.Slice(x, [b for _, b, _ in cut], [e for _, _, e in cut], [a for a, _, _ in cut])
        if any(v > 0 for v in (*before, *after)):
            x = self.Pad(x, [max(v, 0) for v in (*before, *after)], None, list(axes))
        return x

    def move_last(self, x: ir.Value, axis: int, rank: int) -> ir.Value:
        """Transpose that swaps ``axis`` with the last one (its own inverse)."""
        axis %= rank
        perm = list(range(rank))
        perm[axis], perm[-1] = perm[-1], perm[axis]
        return x if axis == rank - 1 else self.Transpose(x, perm=perm)

    def numbers(self, x: ir.Value) -> ir.Value:
        """The element numbers 0..n-1 in the shape of x: where a movement puts them is where the elements go."""
        dims = static_shape(x)
        if dims is not None and np.prod(dims) <= 4096:
            return self.i64(np.arange(int(np.prod(dims))).reshape(dims))
        size = self.size(x)
        count = self.Range(self.i64(0), self.i64(size) if isinstance(size, int) else size, self.i64(1))
        return self.reshape_like(count, x)

    def scatter_numbers(self, g: ir.Value, numbers: ir.Value, x: ir.Value, *, unique: bool = False) -> ir.Value:
        """Add the elements of g to those elements of a zero x whose numbers are given."""
        size = self.size(x)
        zeros = self.zeros([size] if isinstance(size, int) else self.Reshape(size, [1]), g.dtype)
        out = self.ScatterElements(zeros, self.flat(numbers), self.flat(g), axis=0, reduction=None if unique else "add")
        return self.reshape_like(out, x)

    def sum_to(self, g: ir.Value, x: ir.Value, full: ir.Value | None = None, others: Sequence[ir.Value] = ()) -> ir.Value:
        """Sum g, which has the shape of ``full`` (default: its own), to the shape of x: the adjoint of broadcasting x.

        ``others`` are the operands with which x was broadcast; they may show that a symbolic dim was not stretched.
        """
        full = full or g
        if x.shape is not None and full.shape is not None and len(full.shape) >= len(x.shape):
            lead = len(full.shape) - len(x.shape)
            verdicts = [_stretched(i, x, full, others) for i in range(len(x.shape))]
            if None not in verdicts:
                axes = [lead + i for i, stretched in enumerate(verdicts) if stretched]
                if lead and axes:  # leading axes go, the others stay as 1
                    g = self.ReduceSum(g, list(range(lead)) + axes, keepdims=0)
                    return self.reshape_like(g, x)
                if lead or axes:
                    return self.ReduceSum(g, list(range(lead)) or axes, keepdims=0 if lead else 1)
                return g
        shape = self.shape(x)
        if x.shape is None or full.shape is None or len(full.shape) < len(x.shape):
            lead_value = self.Sub(self.Size(self.shape(full)), self.Size(shape))
            ones = self.Expand(self.i64([1]), self.Reshape(lead_value, [1]))
            padded = self.Concat(ones, shape, axis=0)
        else:
            lead = len(full.shape) - len(x.shape)
            padded = self.Concat([1] * lead, shape, axis=0) if lead else shape
        axes = self.Reshape(self.NonZero(self.Equal(padded, 1)), [-1])
        return self.Reshape(self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)

    # ---------------------------------------------------------------------------------------------------- private
    def _operands(self, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        if all(type(i) is ir.Value for i in inputs):
            return list(inputs)
        like = next((i.dtype for i in inputs if isinstance(i, ir.Value) and i.dtype not in (None, ir.DataType.BOOL)), ir.DataType.FLOAT)
        out: list[ir.Value | None] = []
        for i in inputs:
            if i is None or isinstance(i, ir.Value):
                out.append(i)
            elif isinstance(i, (list, tuple)):
                out.append(self.constant(i, ir.DataType.INT64))
            elif isinstance(i, np.ndarray):
                out.append(self.constant(i, ir.DataType.from_numpy(i.dtype)))
            else:
                out.append(self.constant(i, like))
        return out

    def _fold(self, op_type: str, values: Sequence[ir.Value | None]) -> ir.Value | None:
        arrays = []
        for v in values:
            if v is None or v.dtype is not ir.DataType.INT64 or (array := self.const(v)) is None or array.size > 64:
                return None
            arrays.append(array)
        return self.i64(_FOLD[op_type](*arrays))


def _before_reshape(x: ir.Value) -> ir.Value | None:
    """What a Reshape of the build reshaped."""
    maker = x.producer()
    if maker is None or maker.graph is not None or maker.op_type != "Reshape" or maker.domain:
        return None
    return maker.inputs[0]


def _stretched(i: int, x: ir.Value, full: ir.Value, others: Sequence[ir.Value]) -> bool | None:
    """Whether axis i of x (counted in x) was stretched by broadcasting; None where shapes do not tell."""
    lead = len(full.shape) - len(x.shape)
    mine, theirs = x.shape[i], full.shape[lead + i]
    if type(mine) is int and mine != 1:
        return False
    if type(theirs) is int and (mine == 1 or theirs == 1):
        return theirs != 1
    if type(mine) is not int and type(theirs) is not int and mine.value is not None and mine.value == theirs.value:
        return False
    if mine == 1:
        return True  # the output may be 1 too: then the sum does nothing
    behind = len(x.shape) - i  # the axis counted from the end
    if others and all(o.shape is not None and (len(o.shape) < behind or o.shape[-behind] == 1) for o in others):
        return False
    return None


def _output_type(op_type: str, values: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> ir.DataType | None:
    if op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if op_type in _INTEGER:
        return ir.DataType.INT64
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type == "ConstantOfShape":
        value = attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.dtype
    index = _TYPED_BY.get(op_type, 0)
    source = values[index] if index < len(values) else None
    return None if source is None else source.dtype


def _attribute(name: str, value: Any) -> ir.Attr:
    if isinstance(value, ir.Attr):
        return ir.Attr(name, value.type, value.value)
    if isinstance(value, (bool, int, np.integer)):
        return ir.AttrInt64(name, int(value))
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if isinstance(value, ir.Graph):
        return ir.AttrGraph(name, value)
    if isinstance(value, ir.Tensor):
        return ir.AttrTensor(name, value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], float):
        return ir.AttrFloat32s(name, list(value))
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return ir.AttrStrings(name, list(value))
    return ir.AttrInt64s(name, [int(v) for v in value])
