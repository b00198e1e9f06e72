"""What ONNX's shape inference leaves open: ranks, for want of a constant mostly, and names of dims that shapes were made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from symbolics.graph.quantised import fill_in, product_rank
from symbolics.graph.values import array_of, attr, rank_of, static_shape
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.limits import MAX_RANK

__all__ = ["BROADCAST", "dims_of", "guess_ranks", "is_open", "may_lose_axes", "name_dims", "same_dim", "write_sizes"]

#: Operators whose inputs are broadcast to one shape.
BROADCAST = frozenset(
    """
    Add Sub Mul Div Pow Where Max Min Sum Mean Mod Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor PRelu
    """.split()
)
_OF_ONE_ELEMENT = frozenset(
    """
    Abs Neg Exp Log Sqrt Reciprocal Erf Sin Cos Tan Tanh Sigmoid Softplus Softsign Relu LeakyRelu Elu Selu Celu Gelu HardSigmoid
    HardSwish Mish Swish Clip Sign Floor Ceil Round Not IsNaN IsInf Identity Cast CastLike Dropout
    """.split()
)
_SAME = _OF_ONE_ELEMENT | frozenset(
    """
    Softmax LogSoftmax CumSum CumProd Trilu Slice Concat Split Pad Tile Transpose ScatterElements ScatterND GatherElements Resize
    Conv ConvTranspose MaxPool AveragePool LayerNormalization BatchNormalization InstanceNormalization GroupNormalization RMSNormalization
    ReverseSequence Compress TopK QuantizeLinear DequantizeLinear QLinearConv
    """.split()
)

#: Operators of ai.onnx.ml, of which ONNX infers nothing, that give out the shape they take, and the type: None is that of the input.
_ML_SAME = {"Scaler": ir.TensorType(ir.DataType.FLOAT), "Normalizer": ir.TensorType(ir.DataType.FLOAT), "Imputer": None, "Binarizer": None}


def same_dim(a: object, b: object) -> bool:
    """Whether two sizes are known to be equal: one number, or one symbol."""
    if isinstance(a, ir.SymbolicDim) and isinstance(b, ir.SymbolicDim):
        return a.value is not None and a.value == b.value
    return isinstance(a, int) and isinstance(b, int) and a == b


def may_lose_axes(value: ir.Value) -> bool:
    """Whether a value has fewer axes than it says where an open size is 1: it is what a Squeeze of all axes of size 1 gives, element by element."""
    while (node := value.producer()) is not None and not node.domain:
        first = node.inputs[0] if node.inputs else None
        if first is None:
            return False
        if node.op_type == "Squeeze" and "axes" not in node.attributes and not any(node.inputs[1:]):
            return static_shape(first) is None
        if node.op_type not in _OF_ONE_ELEMENT:
            return False
        value = first
    return False


def guess_ranks(graph: ir.Graph) -> bool:
    """Fill in ranks and types; whether anything was found."""
    found = False
    nodes = list(walk(graph))
    for node in nodes[::-1] + nodes:  # bodies stand behind their node, and read what is before it
        for given, rank in zip(node.inputs, _asked(node)):
            if given is not None and given.shape is None and given.type is not None and rank is not None and 0 <= rank <= MAX_RANK:
                given.shape = ir.Shape([None] * rank)
                found = True
        if _is_ml_same(node) and node.inputs[0] is not None and node.outputs[0].type is None:
            node.outputs[0].type = _ML_SAME[node.op_type] or node.inputs[0].type
            found = found or node.outputs[0].type is not None
        found = fill_in(node) or found
        if (node.domain == "" or _is_ml_same(node)) and any(o.shape is None for o in node.outputs):
            for out, rank in zip(node.outputs, _ranks(node)):
                if rank is not None and 0 <= rank <= MAX_RANK and out.shape is None:
                    out.shape = ir.Shape([None] * rank)
                    found = True
    return found


def _is_ml_same(node: ir.Node) -> bool:
    return node.domain == "ai.onnx.ml" and node.op_type in _ML_SAME and len(node.inputs) == len(node.outputs) == 1


#: The ranks that an operator takes its inputs with, and no others.
_TAKES: dict[str, tuple[int | None, ...]] = {
    "LSTM": (3, 3, 3, 2, 1, 3, 3, 2),
    "GRU": (3, 3, 3, 2, 1, 3),
    "RNN": (3, 3, 3, 2, 1, 3),
    "Gemm": (2, 2),
    "BatchNormalization": (None, 1, 1, 1, 1),
}


def _asked(node: ir.Node) -> Sequence[int | None]:
    """The ranks of the inputs, as the operator asks for them, or as its output tells."""
    if node.domain != "":
        return ()
    if (takes := _TAKES.get(node.op_type)) is not None:
        return takes
    if node.op_type in ("Conv", "ConvTranspose"):
        known = [rank for v in node.inputs[:2] if (rank := rank_of(v)) is not None]
        return known[:1] * 2
    out = rank_of(node.outputs[0]) if node.outputs else None
    if out is None:
        return ()
    if node.op_type in _SAME:
        return [out]
    length = _length(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type in ("Squeeze", "Unsqueeze") and length is not None:
        return [out - length if node.op_type == "Unsqueeze" else out + length]
    return ()


def _ranks(node: ir.Node) -> list[int | None]:
    """The ranks of the outputs."""
    op_type, n = node.op_type, len(node.outputs)
    if op_type in ("If", "Loop", "Scan"):
        return _of_bodies(node)
    first = rank_of(node.inputs[0]) if node.inputs else None
    if op_type in _SAME or _is_ml_same(node):
        return [first] * n
    known = [rank for v in node.inputs if (rank := rank_of(v)) is not None]
    if op_type in BROADCAST:
        return [max(known) if known and len(known) == len(node.inputs) else None]
    if op_type == "MatMul" and len(known) == 2:
        return [max(*known, 2) - known.count(1)]
    if op_type == "QLinearMatMul":
        return [product_rank(node.inputs[:1], node.inputs[3:4])]
    if op_type == "Gemm":
        return [2]
    length = _length(node.inputs[1]) if len(node.inputs) > 1 else None
    if op_type == "Reshape":
        return [length]
    if op_type == "Expand" and length is not None and first is not None:
        return [max(length, first)]
    if op_type == "Gather" and len(known) == 2:
        return [sum(known) - 1]
    if op_type in ("Squeeze", "Unsqueeze") and first is not None and length is not None:
        return [first + length if op_type == "Unsqueeze" else first - length]
    if op_type == "Squeeze" and (len(node.inputs) < 2 or node.inputs[1] is None):
        return [_squeezed(node)]
    if op_type.startswith("Reduce"):
        if attr(node, "keepdims"):
            return [first]
        return [first - length if first is not None and length else None]
    if op_type == "ConstantOfShape" and node.inputs:
        return [_length(node.inputs[0])]
    return [None] * n


_ALONG_AXIS = frozenset(["Split", "Concat", "Softmax", "LogSoftmax"])  # each of their inputs has the axis that they name


def _squeezed(node: ir.Node) -> int | None:
    """A Squeeze without axes drops every 1, also of a dim not known: its rank is open, unless readers need all those dims."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None:
        return None
    most = sum(d != 1 for d in shape)
    least = sum(isinstance(d, int) and d != 1 for d in shape)
    for reader in node.outputs[0].consumers():
        if reader.domain == "" and reader.op_type in _ALONG_AXIS:
            axis = attr(reader, "axis")
            least = max(least, axis + 1 if axis >= 0 else -axis)
    return most if least == most else None


def _length(vector: ir.Value | None) -> int | None:
    dims = static_shape(vector)
    return dims[0] if dims is not None and len(dims) == 1 else None


def _of_bodies(node: ir.Node) -> list[int | None]:
    """If: what its branches agree on. Loop, Scan: the body's, and one more where iterations are stacked."""
    bodies = subgraphs(node)
    if node.op_type == "If":
        pairs = zip(*[[rank_of(v) for v in b.outputs] for b in bodies])
        return [p[0] if len(set(p)) == 1 else None for p in pairs]
    outputs = list(bodies[0].outputs)
    states = len(node.inputs) - 2 if node.op_type == "Loop" else len(node.inputs) - attr(node, "num_scan_inputs")
    outputs = outputs[1:] if node.op_type == "Loop" else outputs
    initial = node.inputs[2:] if node.op_type == "Loop" else node.inputs
    inner = bodies[0].inputs[2:] if node.op_type == "Loop" else bodies[0].inputs
    for value, source in zip(list(inner)[:states], initial):
        if value.shape is None and source is not None and source.shape is not None:
            value.shape = ir.Shape([None] * len(source.shape))
        value.type = value.type or (None if source is None else source.type)
    ranks = [rank_of(v) for v in outputs]
    return [r if r is None or i < states else r + 1 for i, r in enumerate(ranks)]


# ------------------------------------------------------------------------------------------------------- names of dims
Dim = int | str | None  # a number, a name, or unknown
_POINTWISE = BROADCAST.union("Softmax LogSoftmax Cast IsNaN Not Tanh Exp Erf Sigmoid Relu Gelu Neg Sqrt Identity Dropout".split())


def name_dims(graph: ir.Graph, const: Callable[[ir.Value | None], np.ndarray | None]) -> None:
    """Fill in unknown dims: exporters compute shapes from the shapes of other values, whose dims have names.

    The names tell that nothing was broadcast, which spares the gradient its sums over axes found at run time.
    """
    vectors: dict[ir.Value, list[Dim]] = {}

    def vector(v: ir.Value | None) -> list[Dim] | None:
        if v is None or v in vectors:
            return None if v is None else vectors[v]
        array = const(v)
        known = array is not None and array.dtype == np.int64 and array.ndim <= 1 and array.size <= 16
        return [int(i) for i in array.reshape(-1)] if array is not None and known else None

    for node in graph:
        if node.domain:
            continue
        if node.op_type in _OF_VECTORS and (found := _vector(node, vector)) is not None:
            vectors[node.outputs[0]] = found
        out = node.outputs[0]
        before = _dims(out) or []
        if any(is_open(d) for d in before):
            dims = _known_dims(node, vector)
            if dims is not None and len(dims) == len(before):
                out.shape = ir.Shape([new if is_open(old) and new is not None else old for old, new in zip(before, dims)])


_OF_VECTORS = frozenset(["Shape", "Slice", "Concat", "Gather", "Squeeze", "Unsqueeze", "Identity"])


def is_open(dim: Dim) -> bool:
    """Unknown, or named by ONNX's inference as a dim that nothing is known of."""
    return dim is None or (isinstance(dim, str) and dim.startswith("unk__"))


def _dims(v: ir.Value | None) -> list[Dim] | None:
    return None if v is None or v.shape is None else [d if isinstance(d, int) else d.value for d in v.shape]


def _vector(node: ir.Node, vector: Callable[[ir.Value | None], list[Dim] | None]) -> list[Dim] | None:
    """The elements of a vector, or of a scalar, that was made of dims."""
    if node.op_type == "Shape":
        dims = _dims(node.inputs[0])
        return None if dims is None else dims[attr(node, "start") : attr(node, "end")]
    inputs = [known for v in node.inputs if (known := vector(v)) is not None]
    if len(inputs) < max(len(node.inputs), 1) or sum(map(len, inputs)) > 2 * MAX_RANK:  # nor is what is longer a shape
        return None
    if node.op_type == "Concat":
        return [d for part in inputs for d in part]
    if node.op_type == "Slice":
        start, end, *rest = [v[0] if len(v) == 1 else None for v in inputs[1:]]
        plain = rest[:1] in ([], [0]) and rest[1:] in ([], [1])
        return inputs[0][start:end] if plain and isinstance(start, int) and isinstance(end, int) else None
    if node.op_type == "Gather":
        source, indices = inputs
        found = [source[i] for i in indices if isinstance(i, int) and -len(source) <= i < len(source)]
        return found if len(found) == len(indices) else None
    return inputs[0]


def dims_of(value: ir.Value) -> list[Dim] | None:
    """The sizes of a value: those of its shape; without one, what they are behind an elementwise operator, a MatMul, or what moves axes."""

    def vector(v: ir.Value | None) -> list[Dim] | None:
        array = array_of(v)
        return None if array is None or array.dtype != np.int64 or array.size > MAX_RANK else [int(i) for i in array.reshape(-1)]

    node = value.producer()
    if value.shape is not None or node is None or node.domain != "":
        return _dims(value)
    return _known_dims(node, vector)


def _known_dims(node: ir.Node, vector: Callable[[ir.Value | None], list[Dim] | None]) -> list[Dim] | None:
    before = _dims(node.inputs[0]) if node.inputs else None
    if before is None:
        return None
    if node.op_type == "Reshape":
        target = vector(node.inputs[1])
        return None if target is None else _reshaped(before, target, bool(attr(node, "allowzero")))
    if node.op_type == "Transpose":
        perm = attr(node, "perm")
        return before[::-1] if perm is None else [before[p] for p in perm]
    if node.op_type == "Unsqueeze":
        axes = vector(node.inputs[1]) if len(node.inputs) > 1 else None
        return None if axes is None else _with_ones(before, axes)
    inputs = [v for v in node.inputs if v is not None]
    shapes = [dims for v in inputs if (dims := _dims(v)) is not None]
    if len(shapes) < len(inputs):
        return None
    if node.op_type == "MatMul" and all(len(s) >= 2 for s in shapes):
        a, b = shapes
        return [*_broadcast([a[:-2], b[:-2]]), a[-2], b[-1]]
    if node.op_type in _POINTWISE:
        return _broadcast(shapes[:1] if node.op_type == "Dropout" else shapes)
    return None


def _broadcast(shapes: Sequence[list[Dim]]) -> list[Dim]:
    rank = max(len(s) for s in shapes)
    out: list[Dim] = []
    for column in zip(*[[*[1] * (rank - len(s)), *s] for s in shapes]):
        wide = {d for d in column if d != 1}
        number = next((d for d in wide if isinstance(d, int)), None)
        out.append(1 if not wide else number if number is not None else wide.pop() if len(wide) == 1 else None)
    return out


def _with_ones(before: list[Dim], axes: list[Dim]) -> list[Dim]:
    rank = len(before) + len(axes)
    new = {axis % rank for axis in axes if isinstance(axis, int)}
    rest = iter(before)
    return [1 if place in new else next(rest) for place in range(rank)]


def _reshaped(before: list[Dim], target: list[Dim], allowzero: bool) -> list[Dim]:
    """The dims behind a Reshape; what -1 stands for where all else cancels out."""
    out = [before[i] if d == 0 and not allowzero and i < len(before) else d for i, d in enumerate(target)]
    if -1 not in out:
        return out
    rest, others = list(before), [d for d in out if d != -1]
    for d in list(others):
        if d in rest:
            rest.remove(d)
            others.remove(d)
    numbers = [[d for d in dims if isinstance(d, int)] for dims in (rest, others)]
    fill: Dim = None
    if [len(n) for n in numbers] == [len(rest), len(others)] and 0 not in (*rest, *others):
        fill = math.prod(numbers[0]) // math.prod(numbers[1])
    elif len(rest) == 1 and not others:
        fill = rest[0]
    return [fill if d == -1 else d for d in out]


def write_sizes(graph: ir.Graph, sizes: Mapping[str, int | str]) -> None:
    """Put numbers or other names in the place of the names of sizes, in the shapes of all values."""
    for value in (*graph.inputs, *(value for node in walk(graph) for value in node.outputs)) if sizes else ():
        if value.shape is not None and any(isinstance(dim, ir.SymbolicDim) and dim.value in sizes for dim in value.shape):
            value.shape = ir.Shape([sizes.get(str(dim.value), dim) if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape])
