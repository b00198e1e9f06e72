"""Dropout from a seed: one file gives one mask on every runtime.

ONNX's Dropout draws from a generator of the runtime's own. Here the mask is computed by standard operators from an int64
scalar input ``seed``, the number of the node and the position of the element (`exporter.train_mode.masks`). Inside a Loop or a Scan the
number of the pass goes in, too: a mask is a function of these numbers alone, so that a gradient graph that runs a body again has it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
import torch

from exporter.train_mode.draws import DRAWS, draws_without_a_seed, random_numbers
from exporter.train_mode.generator import Generator
from exporter.train_mode.masks import kept_by
from symbolics.errors import UnsupportedOperatorError
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope
from symbolics.graph.values import array_of, attr, static_shape, trains
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.names import DRAWN_PROPERTY

__all__ = ["SEED", "draw_seed", "dropout_mask", "dropouts", "inference_mode", "ratio_of", "seed_dropout"]

#: The name of the input; a model that has a value of this name already gets ``seed_1``, ...
SEED = "seed"

_I64, _F32 = ir.DataType.INT64, ir.DataType.FLOAT


#: The number of a body's pass: an int64 scalar in the body, None where a body has but one (the branches of an If).
_Counter = Callable[[Scope], ir.Value | None]


#: The operators with bodies that a number goes into, or that are run once.
_NUMBERED = frozenset(("If", "Loop", "Scan"))


def seed_dropout(model: ir.Model) -> str | None:
    """Compute the masks of all Dropout nodes from an input, in place; inside Loop and Scan each pass has masks of its own.

    Normal and uniform random numbers, and random classes, come from that input, too.

    Returns:
        The name of the input, None where nothing is drawn so (nothing has changed then).

    Raises:
        UnsupportedOperatorError: A Dropout is in a body whose passes have no numbers (SequenceMap), or its ratio is computed.
    """
    graph = model.graph
    found = list(_nodes_that(_drops, graph, ()))
    rest = list(_nodes_that(draws_without_a_seed, graph, (), numbered=True))
    if not found and not rest:
        return None
    taken = {value.name for node in graph for value in node.outputs} | {v.name for v in graph.inputs} | set(graph.initializers)
    name = next(n for n in (SEED, *(f"{SEED}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
    seed = ir.Value(name=name, type=ir.TensorType(_I64), shape=ir.Shape([]))
    graph.inputs.append(seed)
    scope = Scope(f"{name}/", lambda value: False)
    generator, number = Generator(scope, seed, len(found) + DRAWS * len(rest)), 0
    for node, counters in (*found, *rest):
        op = Emitter(scope)
        passes = [value for counter in counters if (value := counter(scope)) is not None]
        if node.op_type == "Dropout":
            kept, dropped = _masked(generator, op, node, passes, number)
            replace(scope, node, op.nodes, [dropped, kept])
            number += 1
        else:
            replace(scope, node, op.nodes, [random_numbers(generator, op, node, passes, number)])
            number += DRAWS
    graph.insert_before(graph[0], generator.op.nodes)
    scope.register(graph)
    return name


def dropouts(model: ir.Model) -> list[ir.Node]:
    """The Dropout nodes that drop, those of bodies included: a node's place is the number that goes into its mask."""
    return [node for node, _ in _nodes_that(_drops, model.graph, ())]


def _drops(node: ir.Node) -> bool:
    return node.op_type == "Dropout" and trains(node)


def _nodes_that(
    draw: Callable[[ir.Node], bool], graph: ir.Graph, counters: tuple[_Counter, ...], numbered: bool = False
) -> Iterator[tuple[ir.Node, tuple[_Counter, ...]]]:
    """Nodes that draw, those of bodies included (``numbered``: where their passes have numbers), each with the counters of the bodies around it."""
    for node in graph:
        if draw(node):
            yield node, counters
        for body in subgraphs(node) if not numbered or node.op_type in _NUMBERED else ():
            yield from _nodes_that(draw, body, (*counters, functools.cache(functools.partial(_number_of_pass, node, body))), numbered)


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


def _masked(generator: Generator, op: Emitter, node: ir.Node, passes: Sequence[ir.Value], number: int) -> tuple[ir.Value, ir.Value]:
    """The mask of a Dropout, as `dropout_mask` computes it, and what the Dropout gives."""
    x, p = node.inputs[0], ratio_of(node)
    assert x is not None
    dims = static_shape(x)
    kept = op.GreaterOrEqual(generator.draw(op, number, passes, dims, x), op.constant(p, _F32))
    producer = kept.producer()
    assert producer is not None
    producer.metadata_props[DRAWN_PROPERTY] = "dropout"
    kept = generator.shaped(op, kept, dims, x)
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
    return kept_by(seed, number, shape, ratio, passes)


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
