"""What the scopes of one build share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from symbolics.graph.values import attr, constant_of, name_of, static_shape
from symbolics.graph.walk import walk

__all__ = ["Scope", "free_prefix", "graph_names"]

_FOLDED_SIZE = 4096
_FOLDED_DEPTH = 40
# Arithmetic of shapes, indices and scalars is computed beforehand, and nothing else: what a node makes must be known to be
# small before it is made, since a file may ask for a terabyte.
_ELEMENTWISE = frozenset(
    """
    Abs Add And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Clip Cos Div Equal Erf Exp Floor Greater GreaterOrEqual
    Identity IsInf IsNaN Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal Relu Round Sign Sin Sqrt Sub Sum Tanh Where Xor
    """.split()
)
_NO_MORE = frozenset(
    """
    ArgMax ArgMin CumProd CumSum Flatten ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum ReduceSumSquare Reshape Slice Split Squeeze Transpose Trilu Unsqueeze
    """.split()
)


def free_prefix(graph: ir.Graph, prefix: str) -> str:
    """The prefix, behind as many underscores as it takes until no value and no node of the graph has a name that starts so."""
    names = graph_names(graph)
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def graph_names(graph: ir.Graph) -> set[str]:
    """The names of the graph's values and nodes; those of a node's results may have become other ones since it was made."""
    named: list[ir.Value | ir.Node] = [*graph.inputs, *graph.initializers.values()]
    for node in walk(graph):
        named += (node, *node.outputs)
    return {each.name for each in named if each.name}


class Scope:
    """What the scopes of one build share: fresh names, constants, and the engine's way to differentiate a body."""

    def __init__(self, prefix: str, folded: Callable[[ir.Value], bool]) -> None:
        self.prefix = prefix
        self.constants: dict[Hashable, ir.Value] = {}
        self.active: set[ir.Value] = set()
        self.presence: dict[ir.Value, tuple[frozenset[ir.Value], bool]] = {}  # see symbolics.graph.presence
        self.backward: Callable[..., dict[ir.Value, ir.Value]] = _no_engine
        self.functions: Mapping[Any, ir.Function] = {}
        self.called: dict[Hashable, ir.Function] = {}  # see symbolics.graph.named
        self.opset = 18
        self._folded = folded
        self._count = 0
        self._residuals: dict[str, int] = {}
        self._own: set[ir.Value] = set()
        self._known: dict[ir.Value, np.ndarray] = {}

    def name(self, stem: str) -> str:
        """A name that nothing in the model has."""
        self._count += 1
        return f"{self.prefix}{stem}_{self._count}"

    def residual_name(self, stem: str, node: ir.Node) -> str:
        """A name for an output that a node of the forward gets: the same in every build, however many names its rules took before."""
        known = f"{self.prefix}{stem} of {next((v.name for v in node.outputs if v.name), node.op_type)}"
        self._residuals[known] = count = self._residuals.get(known, 0) + 1
        return known if count == 1 else f"{known} ({count})"

    def constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A constant; equal ones are one."""
        array = np.asarray(value, dtype=dtype.numpy())
        key = (dtype, array.shape, array.tobytes())
        if (known := self.constants.get(key)) is None:
            name = self.name("constant")
            known = ir.Value(
                name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=ir.tensor(array, dtype=dtype, name=name)
            )
            self.constants[key] = known
            self._own.add(known)
        return known

    def register(self, graph: ir.Graph) -> None:
        """Those constants that something uses are initializers of the graph, no others."""
        for value in self.constants.values():
            if value.uses() or value.is_graph_output():
                graph.initializers[name_of(value)] = value
            else:
                graph.initializers.pop(name_of(value), None)

    def const(self, value: ir.Value | None, depth: int = 0) -> np.ndarray | None:
        """The array of a value that no training step changes, otherwise None; so many nodes deep it looks, and no further."""
        if value is None or depth > _FOLDED_DEPTH:
            return None
        if value in self._own and value.const_value is not None:
            return value.const_value.numpy()
        producer = value.producer()
        if producer is not None:
            if value not in self._known and (arrays := self.evaluate(producer, depth)) is not None:
                self._known.update(zip(producer.outputs, arrays))
            return self._known.get(value)
        if value.const_value is not None and value.is_initializer() and not value.is_graph_input() and self._folded(value):
            return value.const_value.numpy()
        return None

    def evaluate(self, node: ir.Node, depth: int = 0) -> list[np.ndarray] | None:
        """The outputs of a node that only constants and static shapes go into, None for any other."""
        if node.domain != "":
            return None
        if node.op_type == "Constant":
            tensor = constant_of(node.outputs[0])
            return None if tensor is None or tensor.dtype is ir.DataType.STRING else [tensor.numpy()]
        if node.op_type == "Shape" and (dims := _dims(node)) is not None and all(isinstance(dim, int) for dim in dims):
            return [np.array(dims, np.int64)]
        if node.op_type == "Size" and (shape := static_shape(node.inputs[0])) is not None:
            return [np.array(int(np.prod(shape)), np.int64)]
        arrays = []
        dims = _dims(node.inputs[0].producer()) if node.op_type in ("Gather", "Slice") and node.inputs[0] is not None else None
        for i, v in enumerate(node.inputs):
            array = np.arange(len(dims)) if dims is not None and i == 0 else None if v is None else self.const(v, depth + 1)
            if v is not None and (array is None or array.size > _FOLDED_SIZE or v.type is None):
                return None
            arrays.append(array)
        try:
            small = 0 <= _elements(node, arrays) <= _FOLDED_SIZE
        except (ValueError, TypeError, IndexError, AttributeError, OverflowError, ZeroDivisionError):  # it could not be run either
            small = False
        results = _run(node, arrays, self.opset) if small else None
        return results if dims is None or results is None else _sizes_at(dims, results[0])


def _dims(node: ir.Node | None) -> list[Any] | None:
    """The sizes that a Shape gives out, as far as they are known."""
    if node is None or (node.domain, node.op_type) != ("", "Shape") or node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    return list(node.inputs[0].shape)[slice(attr(node, "start"), attr(node, "end"))]


def _sizes_at(dims: list[Any], places: np.ndarray) -> list[np.ndarray] | None:
    """Some of the sizes, where those are known: the others may be open."""
    taken = [dims[place] for place in places.reshape(-1)]
    return [np.array(taken, np.int64).reshape(places.shape)] if all(isinstance(dim, int) for dim in taken) else None


def _elements(node: ir.Node, arrays: Sequence[Any]) -> float:
    """How many elements a node makes of these inputs at most; -1 for an operator that is not computed beforehand.

    Raises:
        ValueError, TypeError, IndexError, AttributeError, OverflowError, ZeroDivisionError: The inputs are not those of the operator.
    """
    op_type = node.op_type
    if op_type in _ELEMENTWISE:
        return math.prod(np.broadcast_shapes(*[a.shape for a in arrays if a is not None]))
    if op_type in _NO_MORE:
        return int(arrays[0].size)
    if op_type == "Concat":
        return sum(a.size for a in arrays)
    if op_type == "Gather":
        return arrays[1].size * arrays[0].size // arrays[0].shape[attr(node, "axis")]
    if op_type == "Range":
        start, limit, delta = (a.item() for a in arrays)
        return max(0, math.ceil((limit - start) / delta))
    if op_type == "ConstantOfShape":
        return math.prod(arrays[0].tolist())
    if op_type == "Expand":
        return math.prod(np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].tolist())))
    if op_type == "Tile":
        return arrays[0].size * math.prod(arrays[1].tolist())
    return -1


def _run(node: ir.Node, arrays: list[np.ndarray | None], opset: int) -> list[np.ndarray] | None:
    """The outputs of one node by the reference evaluator; None where it cannot."""
    inputs = [None if v is None else ir.Value(name=f"i{k}", type=v.type) for k, v in enumerate(node.inputs)]
    twin = ir.Node("", node.op_type, inputs, node.attributes.values(), num_outputs=len(node.outputs))
    for k, o in enumerate(twin.outputs):
        o.name = f"o{k}"
    graph = ir.Graph([v for v in inputs if v is not None], twin.outputs, nodes=[twin], name="fold", opset_imports={"": opset})
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
    try:
        with np.errstate(all="ignore"):
            results = [np.asarray(r) for r in ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10))).run(None, feeds)]
    except Exception:  # an evaluator that cannot is no obstacle: the node stays
        return None
    return None if any(r.size > _FOLDED_SIZE or r.dtype.kind not in "fiub" for r in results) else results


def _no_engine(*_: Any) -> dict[ir.Value, ir.Value]:
    raise RuntimeError("this scope has no engine")
