"""Dropout from a seed: one file gives one mask on every runtime.

ONNX's Dropout draws from a generator of the runtime's own. Here the mask is computed by standard operators from an int64
scalar input ``seed``, the number of the node and the position of the element, by an integer hash (two rounds of
xor-shift and multiply on uint32, whose arithmetic wraps around by definition).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["SEED", "inference_mode", "seed_dropout", "trains"]

#: The name of the input; a model that has a value of this name already gets ``seed_1``, ...
SEED = "seed"

_MULTIPLIER = 0x045D9F3B
_GOLDEN = 0x9E3779B9


def _constant(value: ir.Value | None) -> np.ndarray | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def trains(node: ir.Node) -> bool:
    """Whether a node behaves as in training: a Dropout that drops, a BatchNormalization of the batch's own statistics."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "BatchNormalization":
        mode = node.attributes.get("training_mode")
        return mode is not None and bool(mode.as_int())
    if node.op_type == "Dropout":
        mode = _constant(node.inputs[2]) if len(node.inputs) > 2 else None
        return mode is not None and bool(mode.any())
    return False


def seed_dropout(model: ir.Model) -> str | None:
    """Compute the masks of the main graph's Dropout nodes from an input, in place. Those in bodies of control flow stay.

    Returns:
        The name of the input, None where there is no Dropout in training mode (nothing has changed then).
    """
    graph = model.graph
    found = [node for node in graph if node.op_type == "Dropout" and trains(node) and (len(node.inputs) < 2 or node.inputs[1] is None or _constant(node.inputs[1]) is not None)]
    if not found:
        return None
    taken = {value.name for node in graph for value in node.outputs} | {v.name for v in graph.inputs} | set(graph.initializers)
    name = next(n for n in (SEED, *(f"{SEED}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
    seed = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.append(seed)
    for number, node in enumerate(found):
        _replace(graph, node, seed, number, f"{name}/{number}")
    return name


def _replace(graph: ir.Graph, node: ir.Node, seed: ir.Value, number: int, prefix: str) -> None:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    ratio = _constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    p = 0.5 if ratio is None else float(ratio)
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, shape: ir.Shape | None = None, **attributes: object) -> ir.Value:
        made = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), name=f"{prefix}/{op_type}_{len(nodes)}")
        out = made.outputs[0]
        out.name = made.name
        out.type = None if dtype is None else ir.TensorType(dtype)
        out.shape = shape
        nodes.append(made)
        return out

    def constant(value: float, dtype: ir.DataType) -> ir.Value:
        name = f"{prefix}/constant_{len(graph.initializers)}"
        tensor = ir.tensor(np.array(value, dtype=dtype.numpy()), dtype=dtype, name=name)
        graph.initializers[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]), const_value=tensor)
        return graph.initializers[name]

    u32, i64 = ir.DataType.UINT32, ir.DataType.INT64
    half, multiplier = constant(16, u32), constant(_MULTIPLIER, u32)

    def mixed(h: ir.Value) -> ir.Value:
        for _ in range(2):
            h = op("Mul", op("BitwiseXor", h, op("BitShift", h, half, direction="RIGHT")), multiplier)
        return op("BitwiseXor", h, op("BitShift", h, half, direction="RIGHT"))

    start = op("Add", op("Cast", seed, to=u32), constant((number + 1) * _GOLDEN % 2**32, u32))
    positions = op("Range", constant(0, i64), op("Size", x), constant(1, i64))
    spread = op("Mul", op("Cast", positions, to=u32), constant(_GOLDEN, u32))
    bits = op("Cast", op("BitShift", mixed(op("Add", spread, mixed(start))), constant(1, u32), direction="RIGHT"), to=ir.DataType.INT32)
    kept = op("GreaterOrEqual", bits, constant(min(int(p * 2**31), 2**31 - 1), ir.DataType.INT32))
    mask = op("Reshape", kept, op("Shape", x), dtype=ir.DataType.BOOL, shape=x.shape)
    kind = x.dtype or ir.DataType.FLOAT
    scale = constant(0.0 if p >= 1 else 1 / (1 - p), kind)
    dropped = op("Mul", op("Mul", x, op("Cast", mask, to=kind, dtype=kind, shape=x.shape), dtype=kind, shape=x.shape), scale, dtype=kind, shape=x.shape)
    graph.insert_before(node, nodes)
    pairs = [(y, dropped)] if len(node.outputs) < 2 else [(y, dropped), (node.outputs[1], mask)]
    for old, new in pairs:
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
    graph.remove(node, safe=True)


def inference_mode(model: ir.Model) -> None:
    """What eval() means for a graph, in place: Dropout drops nothing, BatchNormalization takes the running statistics."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if not trains(node):
            continue
        if node.op_type == "Dropout":
            node.resize_inputs(2)
        elif not any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
            node.resize_outputs(1)
