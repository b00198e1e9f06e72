"""The order in which a large graph lists its nodes, arranged in memory so that onnxruntime makes a session of it in time.

onnxruntime sorts a graph each time one of its optimizers looks at it: nodes whose inputs are there wait in a linked list, sorted by
their place in the file, and each new one walks that list. Much of a gradient graph (the derivative of an activation, a transposed
weight) can run long before its place comes, so the list grows with the graph, and the time with its square: 416 s for the 135,000
nodes of the training graph of a chain of 30,000, on onnxruntime 1.31.1. Listed in the order in which they can run, nodes hardly wait.

The order in which they do run stays onnxruntime's choice: from the outputs backward, by what each needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import onnx

__all__ = ["MANY_NODES", "list_as_they_can_run"]

#: Nodes from which on it is worth it: below, a session takes about a second.
MANY_NODES = 10_000


def list_as_they_can_run(graph: onnx.GraphProto) -> bool:
    """List the nodes of a graph, in place, in the order in which their inputs are there; its bodies stay as they are.

    Returns:
        Whether it is done; False where a node reads what no earlier one makes, which is left for onnxruntime to refuse.
    """
    nodes = list(graph.node)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    readers: list[list[int]] = [[] for _ in nodes]
    missing = []
    for place, node in enumerate(nodes):
        before = {makers[name] for name in _reads(node) if name in makers}
        if any(maker >= place for maker in before):
            return False
        missing.append(len(before))
        for maker in before:
            readers[maker].append(place)
    ready, order = deque(place for place, count in enumerate(missing) if not count), []
    while ready:
        place = ready.popleft()
        order.append(place)
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    graph.node.extend(nodes[place] for place in order)
    del graph.node[: len(nodes)]
    return True


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, with all that nodes and outputs of its bodies name."""
    yield from node.input
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            yield from (output.name for output in body.output)
            for inner in body.node:
                yield from _reads(inner)
