"""What values weigh and nodes cost: bytes, and how long a node takes as the bytes that memory would move in that time."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from exporter.gradient_graph.inference import infer_shapes
from exporter.gradient_graph.partition import is_cheap
from symbolics.graph.values import RANDOM, attr, is_static, static_shape, trains
from symbolics.graph.walk import reads, subgraphs, walk
from symbolics.node.names import DRAWN_PROPERTY

__all__ = ["Kind", "Sizes", "is_fused", "is_operand", "is_product", "kind_of", "seconds_as_bytes"]

_ELEMENTWISE = """
    Abs Add And BitwiseNot Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN
    LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus
    Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
"""
_NORMALIZING = "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization LogSoftmax LpNormalization MeanVarianceNormalization RMSNormalization Softmax"
_MOVING = "Concat DepthToSpace Gather Pad Slice SpaceToDepth Split Tile Trilu"
_LIGHT = frozenset(f"{_ELEMENTWISE} {_NORMALIZING} {_MOVING}".split())
_PRODUCTS = frozenset("Conv ConvTranspose Gemm MatMul".split())
_FUSED = frozenset(_ELEMENTWISE.split()) - {"Relu"} | _PRODUCTS | {"Transpose", "Cast"}
_SAME_ELEMENTS = frozenset(_ELEMENTWISE.split()) | {"BitShift", "BitwiseXor", "Cast", "Reshape"}
_OPERANDS = frozenset("Cast Div Mul Transpose".split())
# Several times as long as the bytes take.
_SLOW = frozenset("Celu Cos Cosh Elu Erf Exp Gelu Log LogSoftmax Mish Pow Selu Sigmoid Sin Sinh Softmax Softplus Swish Tan Tanh".split())
_SLOWER = 3
# Floating-point operations in the time in which memory moves a byte: between 4 and 10 on the CPUs that this was measured on.
_OPERATIONS_PER_BYTE = 6
_UNKNOWN_PASSES = 8


class Kind(enum.Enum):
    """May a node run again, and what would it cost."""

    LIGHT = "a few passes over its operands"
    HEAVY = "much to compute, to the same bits"
    NEVER = "random, somebody else's code, or a graph in it"


def kind_of(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> Kind:
    """May a node run again. A call of a Function never may, an ONNX function of the model where all in it may."""
    if (function := functions.get(node.op_identifier())) is not None:
        kinds = {kind_of(inner, functions) for inner in walk(function)}
        return Kind.NEVER if Kind.NEVER in kinds else Kind.HEAVY
    if node.domain not in ("", "ai.onnx") or node.op_type in RANDOM or DRAWN_PROPERTY in node.metadata_props or subgraphs(node):
        return Kind.NEVER
    if any(value.type is not None and not isinstance(value.type, ir.TensorType) for value in node.outputs):
        return Kind.NEVER
    if trains(node) and not _has_copies(node):
        return Kind.NEVER
    return Kind.LIGHT if node.op_type in _LIGHT or is_cheap(node) else Kind.HEAVY


def _has_copies(node: ir.Node) -> bool:
    """Whether what onnxruntime's BatchNormalization writes over, when it trains, is made for it: a copy of it gets its own."""
    return all(value is not None and (maker := value.producer()) is not None and maker.op_type == "Where" for value in node.inputs[3:5])


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies matrices, of which runtimes make another one with what follows: a bias, an activation."""
    return node.domain == "" and node.op_type in _PRODUCTS


def is_fused(node: ir.Node) -> bool:
    """Whether runtimes put a node and its neighbours into one where nobody else sees what is between them: to other bits."""
    return node.domain == "" and node.op_type in _FUSED


def is_operand(node: ir.Node | None, reader: ir.Node) -> bool:
    """Whether onnxruntime makes a factor or a transposition a part of the product that reads it, whoever else does."""
    if node is None or node.domain or node.op_type not in _OPERANDS or reader.domain:
        return False
    if is_product(reader):
        return True
    return reader.op_type == "Transpose" and any(map(is_product, reader.outputs[0].consumers()))


class Sizes:
    """Bytes and dims of the values of a model.

    Static shapes say them. Where one is not static, ONNX's inference runs on a copy of the model whose inputs have the shapes of the
    example; what it leaves open (outputs of PythonOps, sizes that depend on data) counts as the largest input of its node, or as
    what is computed of it elementwise.

    Args:
        model: Not changed.
        example: name of an input -> its shape in the example.
    """

    def __init__(self, model: ir.Model, example: Mapping[str, Sequence[int]]) -> None:
        self._dims: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[ir.Value, int] = {}
        if not all(is_static(value.shape) for node in model.graph for value in node.outputs if value.name):
            self._infer(model.clone(), example)
        nodes, unknown = list(model.graph), []
        for node in nodes:
            for value in node.outputs:
                known = self.dims(value) is not None
                self._bytes[value] = self._product(value) if known else max(map(self.bytes, reads(node)), default=0)
                if not known:
                    unknown.append(value)
        for value in reversed(unknown):  # what is computed elementwise has no more elements than what is made of it
            readers = [user for user in value.consumers() if user.op_type in _SAME_ELEMENTS and user.outputs[0] in self._bytes]
            elements = max((self.bytes(user.outputs[0]) / _itemsize(user.outputs[0]) for user in readers), default=0)
            self._bytes[value] = max(self._bytes[value], math.ceil(elements * _itemsize(value)))

    def _infer(self, model: ir.Model, example: Mapping[str, Sequence[int]]) -> None:
        for value in model.graph.inputs:
            if value.name is not None and value.name in example:
                value.shape = ir.Shape(example[value.name])
        for node in walk(model.graph):
            for value in node.outputs:
                if not is_static(value.shape) and node.domain in ("", "ai.onnx"):
                    value.shape = None
        infer_shapes(model)
        values = (*model.graph.inputs, *(value for node in model.graph for value in node.outputs))
        self._dims = {value.name: dims for value in values if value.name and (dims := static_shape(value)) is not None}

    def dims(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape, None where it is not known."""
        if value is None or (dims := static_shape(value)) is not None:
            return None if value is None else dims
        return self._dims.get(value.name or "")

    def bytes(self, value: ir.Value) -> int:
        """The size of a value."""
        found = self._bytes.get(value)
        return self._product(value) if found is None else found

    def _product(self, value: ir.Value) -> int:
        dims = self.dims(value)
        return 0 if dims is None else math.ceil(math.prod(dims) * _itemsize(value))


def _itemsize(value: ir.Value) -> float:
    return 4 if value.dtype is None else value.dtype.itemsize


def seconds_as_bytes(node: ir.Node, sizes: Sizes) -> int:
    """How long a node takes, as the bytes that memory moves in that time.

    It is what it reads and writes, several times that for functions like Exp, and for products two operations for each element of
    the result and of the axis that is summed over, as torch's flop counter (torch.utils.flop_counter) has them.
    """
    if is_cheap(node):
        return 0
    moved = sum(map(sizes.bytes, (*reads(node), *node.outputs)))
    if node.domain == "" and node.op_type in _LIGHT:
        return moved * (_SLOWER if node.op_type in _SLOW else 1)
    summed = _summed(node, sizes)
    if summed is None:
        return moved * _UNKNOWN_PASSES
    base = sizes.dims(node.inputs[0] if node.op_type == "ConvTranspose" else node.outputs[0])
    operations = 2 * math.prod(base or ()) * summed
    return max(moved, operations // _OPERATIONS_PER_BYTE)


def _summed(node: ir.Node, sizes: Sizes) -> int | None:
    """Over how many elements each result of a product sums; of a ConvTranspose, to how many each input contributes."""
    if not is_product(node):
        return None
    first, second = (sizes.dims(value) for value in node.inputs[:2])
    if node.op_type in ("MatMul", "Gemm"):
        return None if not first else first[0 if attr(node, "transA") else -1]
    return None if not second else math.prod(second[1:])
