"""Ranks of values where ONNX's shape inference gives up, for want of a constant mostly."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients._bodies import subgraphs, walk
from symbolics.gradients._values import attr, rank_of

__all__ = ["guess_ranks"]

_BROADCAST = frozenset(["Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "Sum", "Mean", "Mod", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "PRelu"])
_SAME = frozenset(
    ["Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Sin", "Cos", "Tan", "Tanh", "Sigmoid", "Softplus", "Softsign", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Swish", "Clip", "Sign", "Floor", "Ceil", "Round", "Not", "IsNaN", "IsInf", "Identity", "Cast", "CastLike", "Dropout", "Softmax", "LogSoftmax", "CumSum", "CumProd", "Trilu", "Slice", "Concat", "Split", "Pad", "Tile", "Transpose", "ScatterElements", "ScatterND", "GatherElements", "Resize", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "LayerNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "ReverseSequence", "Compress", "TopK"]
)


def guess_ranks(graph: ir.Graph) -> bool:
    """Fill in ranks and types; whether anything was found."""
    found = False
    for node in list(walk(graph))[::-1] + list(walk(graph)):  # bodies stand behind their node, and read what is before it
        if node.domain == "" and any(o.shape is None for o in node.outputs):
            for out, rank in zip(node.outputs, _ranks(node)):
                if rank is not None and rank >= 0 and out.shape is None:
                    out.shape = ir.Shape([None] * rank)
                    found = True
    return found


def _ranks(node: ir.Node) -> list[int | None]:
    """The ranks of the outputs."""
    op_type, n = node.op_type, len(node.outputs)
    if op_type in ("If", "Loop", "Scan"):
        return _of_bodies(node)
    ranks = [None if v is None else rank_of(v) for v in node.inputs]
    if not ranks:
        return [None] * n
    first = ranks[0]
    if op_type in _SAME:
        return [first] * n
    if op_type in _BROADCAST:
        return [None if None in ranks else max(ranks)]
    if op_type == "MatMul" and None not in ranks:
        a, b = ranks
        return [max(a, b, 2) - (a == 1) - (b == 1)]
    if op_type == "Gemm":
        return [2]
    length = _length(node.inputs[1]) if len(node.inputs) > 1 else None
    if op_type == "Reshape":
        return [length]
    if op_type == "Expand" and length is not None and first is not None:
        return [max(length, first)]
    if op_type == "Gather" and None not in ranks[:2]:
        return [first + ranks[1] - 1]
    if op_type in ("Squeeze", "Unsqueeze") and first is not None and length is not None:
        return [first + length if op_type == "Unsqueeze" else first - length]
    if op_type.startswith("Reduce"):
        if attr(node, "keepdims", 1):
            return [first]
        return [first - length if first is not None and length else None]
    if op_type == "ConstantOfShape":
        return [_length(node.inputs[0])]
    return [None] * n


def _length(vector: ir.Value | None) -> int | None:
    if vector is None or vector.shape is None or len(vector.shape) != 1 or type(vector.shape[0]) is not int:
        return None
    return vector.shape[0]


def _of_bodies(node: ir.Node) -> list[int | None]:
    """If: what its branches agree on. Loop, Scan: the body's, and one more where iterations are stacked."""
    bodies = list(subgraphs(node))
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
