"""The order in which a training step lists its nodes, arranged in memory so that onnxruntime's order of running them keeps less alive.

onnxruntime runs a graph from its ends backward: the end that is listed last first, and of what a node reads, what is listed last first. Where
updates run apart (`exporter.runtime.accelerate.Update`), the gradient of the first layer is the last end: all gradients of activations are made on the
way to it, and those of weights after them, so that both lie in memory until the step is over. Listed by depth, the deepest ends first, the
gradient of a weight is computed where eager computes it, right beside that of its layer's input, and what needs no gradient (the derivative of
an activation) when its turn comes. That is not always less: a derivative that is computed in the forward may be smaller than all that it is
made of. So both are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType
from symbolics.graph.values import attr
from symbolics.graph.walk import reads

__all__ = ["list_for_memory"]

#: For a size that only a run knows: all of them are compared with one another alone.
_OPEN = 32
# What onnxruntime gives out over the memory of what it reads.
_VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())


def list_for_memory(graph: ir.Graph, facts: Mapping[ir.Value, ShapeAndType]) -> bool:
    """List the nodes of a step's graph by depth, in place, where running it then takes less memory.

    Args:
        graph: Its nodes stand in the order of their values.
        facts: Shapes and element types of values, as far as they are known.

    Returns:
        Whether they are listed anew.
    """
    nodes = list(graph)
    needs = _needs(nodes)
    if any(maker >= place for place, makers in enumerate(needs) for maker in makers):
        return False
    order = _by_depth(needs)
    if _peak(nodes, _run(needs, order), facts) >= _peak(nodes, _run(needs, range(len(nodes))), facts):
        return False
    graph.remove(nodes)
    graph.extend([nodes[place] for place in order])
    return True


def _needs(nodes: Sequence[ir.Node]) -> list[set[int]]:
    """The places of the nodes that make what each node reads."""
    place = {node: number for number, node in enumerate(nodes)}
    return [{place[maker] for value in reads(node) if (maker := value.producer()) in place} for node in nodes]


def _by_depth(needs: Sequence[set[int]]) -> list[int]:
    """Places by how far they are from what is given, and at the end, the deepest first, those whose results nobody reads."""
    depth: list[int] = []
    for makers in needs:
        depth.append(1 + max((depth[maker] for maker in makers), default=0))
    inner = {maker for makers in needs for maker in makers}
    return sorted(range(len(needs)), key=lambda place: depth[place] if place in inner else 2 * len(needs) - depth[place])


def _run(needs: Sequence[set[int]], listed: Sequence[int]) -> list[int]:
    """The order in which onnxruntime runs nodes that are listed so (1.20 to 1.32: depth first from the ends, without its optimizers)."""
    listing = {place: number for number, place in enumerate(listed)}
    inner = {maker for makers in needs for maker in makers}
    waiting = [(place, False) for place in listed if place not in inner]
    seen: set[int] = set()
    order = []
    while waiting:
        place, is_ready = waiting.pop()
        if is_ready:
            order.append(place)
        elif place not in seen:
            seen.add(place)
            waiting.append((place, True))
            waiting += [(maker, False) for maker in sorted(needs[place], key=listing.__getitem__) if maker not in seen]
    return order


def _peak(nodes: Sequence[ir.Node], order: Sequence[int], facts: Mapping[ir.Value, ShapeAndType]) -> float:
    """The most bytes of results that are alive at a time, in one of the orders."""
    memory: dict[ir.Value, ir.Value] = {}  # value -> the one in whose memory it lies
    last: dict[ir.Value, int] = {}
    for number, place in enumerate(order):
        for value in reads(nodes[place]):
            last[memory.get(value, value)] = number
        for output in nodes[place].outputs:
            given = nodes[place].inputs[0] if _takes_no_memory(nodes[place]) else None
            memory[output] = output if given is None else memory.get(given, given)
            last[memory[output]] = len(order) if output.is_graph_output() else number
    held = most = 0.0
    ends: dict[int, float] = {}
    for number, place in enumerate(order):
        for output in nodes[place].outputs:
            if memory[output] is output:
                size = _bytes(facts.get(output))
                held += size
                ends[last[output]] = ends.get(last[output], 0.0) + size
        most = max(most, held)
        held -= ends.get(number, 0.0)
    return most


def _takes_no_memory(node: ir.Node) -> bool:
    """Whether its output lies where its first input does, or is never made: onnxruntime's products read a matrix either way."""
    if node.op_type != "Transpose":
        return node.op_type in _VIEWS and bool(node.inputs)
    axes = attr(node, "perm")
    if not isinstance(axes, (list, tuple)):
        return False  # all axes the other way around; or a file of nonsense, which onnxruntime refuses
    swapped = tuple(axes[-2:]) == (len(axes) - 1, len(axes) - 2) and list(axes[:-2]) == list(range(len(axes) - 2))
    return swapped and all(use.node.op_type in ("Gemm", "MatMul") for use in node.outputs[0].uses())


def _bytes(fact: ShapeAndType | None) -> float:
    shape, kind = fact or (None, None)
    if shape is None or kind is None:
        return 0.0
    return kind.itemsize * math.prod(dim if isinstance(dim, int) else _OPEN for dim in shape)
