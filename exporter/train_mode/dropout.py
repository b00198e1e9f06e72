"""Dropout from a seed: one file gives one mask on every runtime.

ONNX's Dropout draws from a generator of the runtime's own. Here the mask is computed by standard operators from an int64
scalar input ``seed``, the number of the node and the position of the element, by an integer hash: two rounds of
xor-shift and multiply modulo 2**32. Inside a Loop or a Scan the number of the pass goes in, too: a mask is a function of
these numbers alone, so that a gradient graph that runs a body again has it again.

Not every onnxruntime adds and multiplies uint32 (1.20 does not). So shifts and XORs are done on uint32, sums and products on
int64, where none of them overflows; the Cast back to uint32 keeps the lower 32 bits, as ONNX defines it for integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
import torch

from symbolics.errors import UnsupportedOperatorError
from symbolics.graph.walk import subgraphs

__all__ = ["SEED", "draw_seed", "dropout_mask", "dropouts", "inference_mode", "ratio_of", "seed_dropout", "trains"]

#: The name of the input; a model that has a value of this name already gets ``seed_1``, ...
SEED = "seed"

_MULTIPLIER = 0x045D9F3B
_GOLDEN = 0x9E3779B9
#: The same modulo 2**32, but small enough for its product with any uint32 to be an int64.
_SIGNED_GOLDEN = _GOLDEN - 2**32


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


#: From a body to the number of its pass: an int64 scalar in the body, None where a body has but one (the branches of an If).
_Counter = Callable[[], ir.Value | None]


def seed_dropout(model: ir.Model) -> str | None:
    """Compute the masks of all Dropout nodes from an input, in place; inside Loop and Scan each pass has masks of its own.

    Returns:
        The name of the input, None where there is no Dropout in training mode (nothing has changed then).

    Raises:
        UnsupportedOperatorError: A Dropout is in a body whose passes have no numbers (SequenceMap), or its ratio is computed.
    """
    graph = model.graph
    found = [entry for entry in _dropouts(graph, ()) if trains(entry[0])]
    if not found:
        return None
    taken = {value.name for node in graph for value in node.outputs} | {v.name for v in graph.inputs} | set(graph.initializers)
    name = next(n for n in (SEED, *(f"{SEED}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
    seed = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.append(seed)
    for number, (node, counters) in enumerate(found):
        passes = [value for counter in counters if (value := counter()) is not None]
        _replace(graph, node, seed, passes, number, f"{name}/{number}")
    return name


def dropouts(model: ir.Model) -> list[ir.Node]:
    """The Dropout nodes that drop, those of bodies included: a node's place is the number that goes into its mask."""
    return [node for node, _ in _dropouts(model.graph, ()) if trains(node)]


def _dropouts(graph: ir.Graph, counters: tuple[_Counter, ...]) -> Iterator[tuple[ir.Node, tuple[_Counter, ...]]]:
    """Dropout nodes, those of bodies included, each with the counters of the bodies around it."""
    for node in graph:
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx"):
            yield node, counters
        for body in subgraphs(node):
            yield from _dropouts(body, (*counters, functools.cache(functools.partial(_number_of_pass, node, body))))


def _number_of_pass(node: ir.Node, body: ir.Graph) -> ir.Value | None:
    """The number of the pass through a body. A Scan has none: it gets a state that counts, in place."""
    if node.op_type == "If":
        return None
    if node.op_type == "Loop":
        return body.inputs[0]
    if node.op_type != "Scan":
        raise UnsupportedOperatorError(
            f"{node.op_type} {node.name!r} has a Dropout in its body, whose masks cannot be drawn from a seed: the passes have no numbers. "
            "Export the model with dropout 0, or as a loop"
        )
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    prefix = f"{node.name or node.op_type}/{SEED}"
    kind, scalar = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    count = ir.Value(name=f"{prefix}/pass", type=kind, shape=scalar)
    zero, one = (
        ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(n, np.int64)))], name=f"{prefix}/{n}") for n in (0, 1)
    )
    following = ir.Node("", "Add", [count, one.outputs[0]], name=f"{prefix}/next")
    for made in (zero, one, following):
        made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = made.name, kind, scalar
    body.inputs.insert(states, count)
    body.extend([one, following])
    body.outputs.insert(states, following.outputs[0])
    assert node.graph is not None
    node.graph.insert_before(node, zero)
    _insert_state(node, states, zero.outputs[0], f"{prefix}/passes")
    return count


def _insert_state(node: ir.Node, place: int, value: ir.Value, name: str) -> None:
    """One more input and one more output in the middle of a node: all that follow move by one."""
    inputs = [*node.inputs[:place], value, *node.inputs[place:]]
    node.resize_inputs(len(inputs))
    for index in range(place, len(inputs)):
        node.replace_input_with(index, inputs[index])
    node.resize_outputs(len(node.outputs) + 1)
    for index in range(len(node.outputs) - 1, place, -1):
        old, new = node.outputs[index - 1], node.outputs[index]
        moved = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name, new.type, new.shape = None, moved, old.type, old.shape
    counted = node.outputs[place]
    counted.name, counted.type, counted.shape = name, value.type, value.shape


def _replace(root: ir.Graph, node: ir.Node, seed: ir.Value, passes: Sequence[ir.Value], number: int, prefix: str) -> None:
    """Put the arithmetic of a mask in a Dropout's place; its constants are initializers of the root."""
    graph = node.graph
    x, y = node.inputs[0], node.outputs[0]
    assert graph is not None and x is not None
    p = ratio_of(node)
    nodes: list[ir.Node] = []

    def op(
        op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, shape: ir.Shape | None = None, **attributes: object
    ) -> ir.Value:
        made = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), name=f"{prefix}/{op_type}_{len(nodes)}")
        out = made.outputs[0]
        out.name = made.name
        out.type = None if dtype is None else ir.TensorType(dtype)
        out.shape = shape
        nodes.append(made)
        return out

    def constant(value: float, dtype: ir.DataType) -> ir.Value:
        name = f"{prefix}/constant_{len(root.initializers)}"
        tensor = ir.tensor(np.array(value, dtype=dtype.numpy()), dtype=dtype, name=name)
        root.initializers[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]), const_value=tensor)
        return root.initializers[name]

    u32, i64 = ir.DataType.UINT32, ir.DataType.INT64
    half, multiplier, golden, one = constant(16, u32), constant(_MULTIPLIER, i64), constant(_SIGNED_GOLDEN, i64), constant(1, i64)

    def mixed(h: ir.Value) -> ir.Value:
        """uint32, from an int64 of which the lower 32 bits count."""
        for _ in range(2):
            h = op("Cast", h, to=u32)
            h = op("BitwiseXor", h, op("BitShift", h, half, direction="RIGHT"))
            h = op("Mul", op("Cast", h, to=i64), multiplier)
        h = op("Cast", h, to=u32)
        return op("BitwiseXor", h, op("BitShift", h, half, direction="RIGHT"))

    def lower(number: ir.Value) -> ir.Value:
        """An int64 modulo 2**32."""
        return op("Cast", op("Cast", number, to=u32), to=i64)

    start = op("Cast", mixed(op("Add", lower(seed), constant((number + 1) * _GOLDEN % 2**32, i64))), to=i64)
    for count in passes:
        start = op("Cast", mixed(op("Add", start, op("Mul", op("Add", lower(count), one), golden))), to=i64)
    positions = op("Range", constant(0, i64), op("Size", x), one)
    bits = mixed(op("Add", op("Mul", positions, golden), start))
    bits = op("Cast", op("BitShift", bits, constant(1, u32), direction="RIGHT"), to=ir.DataType.INT32)
    kept = op("GreaterOrEqual", bits, constant(_threshold(p), ir.DataType.INT32))
    mask = op("Reshape", kept, op("Shape", x), dtype=ir.DataType.BOOL, shape=x.shape)
    kind = x.dtype
    scale = constant(0.0 if p >= 1 else 1 / (1 - p), kind or ir.DataType.FLOAT)
    if kind is None:  # a body of another exporter need not say the types of its values
        factor, scale = op("CastLike", mask, x), op("CastLike", scale, x)
    else:
        factor = op("Cast", mask, to=kind, dtype=kind, shape=x.shape)
    dropped = op("Mul", op("Mul", x, factor, dtype=kind, shape=x.shape), scale, dtype=kind, shape=x.shape)
    graph.insert_before(node, nodes)
    pairs = [(y, dropped)] if len(node.outputs) < 2 else [(y, dropped), (node.outputs[1], mask)]
    for old, new in pairs:
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
    graph.remove(node, safe=True)


def ratio_of(node: ir.Node) -> float:
    """What share of the elements a Dropout drops.

    Raises:
        UnsupportedOperatorError: It is computed in the graph.
    """
    value = node.inputs[1] if len(node.inputs) > 1 else None
    if value is None:
        return 0.5
    ratio = _constant(value)
    if ratio is None:
        raise UnsupportedOperatorError(
            f"the ratio of Dropout {node.name!r} is computed in the graph ({value.name!r}): its mask cannot be drawn from a seed. Give it as a number"
        )
    return float(ratio)


def _threshold(ratio: float) -> int:
    """Elements whose 31 bits are below are dropped."""
    return min(int(ratio * 2**31), 2**31 - 1)


def dropout_mask(seed: int, number: int, shape: Sequence[int], ratio: float, passes: Sequence[int] = ()) -> np.ndarray:
    """The mask that a file draws after `seed_dropout`, by numpy.

    Args:
        seed: What the input gets.
        number: Of the node: 0 for the first Dropout in training mode.
        shape: Of the tensor that drops.
        ratio: Of the elements, how many are dropped; as the file has it, a float32.
        passes: The numbers of the passes through the Loops and Scans around the node, the outermost first.

    Returns:
        bool of that shape: what is kept.
    """

    def mixed(h: np.ndarray) -> np.ndarray:
        for _ in range(2):
            h = (h ^ (h >> np.uint32(16))) * np.uint32(_MULTIPLIER)
        return h ^ (h >> np.uint32(16))

    def lower(*numbers: int) -> np.ndarray:
        return np.array([n % 2**32 for n in numbers], np.uint32)  # an array: its arithmetic wraps around without a warning

    golden = np.uint32(_GOLDEN)
    start = mixed(lower(seed) + lower(number + 1) * golden)
    for count in passes:
        start = mixed(start + lower(count + 1) * golden)
    bits = mixed(np.arange(math.prod(shape), dtype=np.uint32) * golden + start) >> np.uint32(1)
    return (bits >= np.uint32(_threshold(ratio))).reshape(shape)


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


def draw_seed(generator: torch.Generator | None = None) -> torch.Tensor:
    """The seed of one forward's masks, an int64 scalar, from torch's generator."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, generator=generator)
