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
from symbolics.graph.boundaries import VARIES
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope
from symbolics.graph.values import array_of, attr, trains
from symbolics.graph.walk import subgraphs, walk

__all__ = ["SEED", "draw_seed", "dropout_mask", "dropouts", "inference_mode", "ratio_of", "seed_dropout"]

#: The name of the input; a model that has a value of this name already gets ``seed_1``, ...
SEED = "seed"

_MULTIPLIER = 0x045D9F3B
_GOLDEN = 0x9E3779B9
#: The same modulo 2**32, but small enough for its product with any uint32 to be an int64.
_SIGNED_GOLDEN = _GOLDEN - 2**32

_U32, _I64 = ir.DataType.UINT32, ir.DataType.INT64


#: The number of a body's pass: an int64 scalar in the body, None where a body has but one (the branches of an If).
_Counter = Callable[[Scope], ir.Value | None]


def seed_dropout(model: ir.Model) -> str | None:
    """Compute the masks of all Dropout nodes from an input, in place; inside Loop and Scan each pass has masks of its own.

    Returns:
        The name of the input, None where there is no Dropout in training mode (nothing has changed then).

    Raises:
        UnsupportedOperatorError: A Dropout is in a body whose passes have no numbers (SequenceMap), or its ratio is computed.
    """
    graph = model.graph
    found = list(_dropouts(graph, ()))
    if not found:
        return None
    taken = {value.name for node in graph for value in node.outputs} | {v.name for v in graph.inputs} | set(graph.initializers)
    name = next(n for n in (SEED, *(f"{SEED}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
    seed = ir.Value(name=name, type=ir.TensorType(_I64), shape=ir.Shape([]))
    graph.inputs.append(seed)
    scope = Scope(f"{name}/", lambda value: False)
    for number, (node, counters) in enumerate(found):
        op = Emitter(scope)
        passes = [value for counter in counters if (value := counter(scope)) is not None]
        kept, dropped = _masked(op, node, seed, passes, number)
        replace(scope, node, op.nodes, [dropped, kept])
    scope.register(graph)
    return name


def dropouts(model: ir.Model) -> list[ir.Node]:
    """The Dropout nodes that drop, those of bodies included: a node's place is the number that goes into its mask."""
    return [node for node, _ in _dropouts(model.graph, ())]


def _dropouts(graph: ir.Graph, counters: tuple[_Counter, ...]) -> Iterator[tuple[ir.Node, tuple[_Counter, ...]]]:
    """Dropout nodes that drop, those of bodies included, each with the counters of the bodies around it."""
    for node in graph:
        if node.op_type == "Dropout" and trains(node):
            yield node, counters
        for body in subgraphs(node):
            yield from _dropouts(body, (*counters, functools.cache(functools.partial(_number_of_pass, node, body))))


def _number_of_pass(node: ir.Node, body: ir.Graph, scope: Scope) -> ir.Value | None:
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
    states = len(node.inputs) - attr(node, "num_scan_inputs")
    count = ir.Value(name=scope.name("pass"), type=ir.TensorType(_I64), shape=ir.Shape([]))
    op = Emitter(scope)
    body.inputs.insert(states, count)
    body.outputs.insert(states, op.Add(count, 1))
    body.outputs[states].shape = ir.Shape([])
    body.extend(op.nodes)
    _insert_state(node, states, op.i64(0), scope.name("passes"))
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


def _masked(op: Emitter, node: ir.Node, seed: ir.Value, passes: Sequence[ir.Value], number: int) -> tuple[ir.Value, ir.Value]:
    """The mask of a Dropout, as `dropout_mask` computes it, and what the Dropout gives."""

    def lower(number: ir.Value) -> ir.Value:
        """An int64 modulo 2**32."""
        return op.Cast(op.Cast(number, to=_U32), to=_I64)

    def mixed(h: ir.Value) -> ir.Value:
        """uint32, from an int64 of which the lower 32 bits count."""
        for _ in range(2):
            h = op.Cast(h, to=_U32)
            h = op.BitwiseXor(h, op.BitShift(h, 16, direction="RIGHT"))
            h = op.Mul(op.Cast(h, to=_I64), _MULTIPLIER)
        h = op.Cast(h, to=_U32)
        return op.BitwiseXor(h, op.BitShift(h, 16, direction="RIGHT"))

    x, p = node.inputs[0], ratio_of(node)
    assert x is not None
    own = op.i64((number + 1) * _GOLDEN % 2**32)
    own.meta[VARIES] = True
    start = op.Cast(mixed(op.Add(lower(seed), own)), to=_I64)
    for count in passes:
        start = op.Cast(mixed(op.Add(start, op.Mul(op.Add(lower(count), 1), _SIGNED_GOLDEN))), to=_I64)
    positions = op.Range(op.i64(0), op.Size(x), op.i64(1))
    bits = mixed(op.Add(op.Mul(positions, _SIGNED_GOLDEN), start))
    bits = op.Cast(op.BitShift(bits, 1, direction="RIGHT"), to=ir.DataType.INT32)
    kept = op.Reshape(op.GreaterOrEqual(bits, _threshold(p)), op.Shape(x))
    scale = op.number(0.0 if p >= 1 else 1 / (1 - p), x)
    if x.dtype is None:  # a body of another exporter need not say the types of its values
        factor, scale = op.CastLike(kept, x), op.CastLike(scale, x)
    else:
        factor = op.Cast(kept, to=x.dtype)
    thinned = op.Mul(x, factor)
    kept.shape = factor.shape = thinned.shape = x.shape
    return kept, op.Mul(thinned, scale)


def ratio_of(node: ir.Node) -> float:
    """What share of the elements a Dropout drops.

    Raises:
        UnsupportedOperatorError: It is computed in the graph.
    """
    value = node.inputs[1] if len(node.inputs) > 1 else None
    if value is None:
        return 0.5
    ratio = array_of(value)
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
    for node in walk(model.graph):
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
