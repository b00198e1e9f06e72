"""Outputs of a graph that are one value: each becomes a value of its own, so that each has its own cotangent."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from symbolics.graph.scope import graph_names
from symbolics.graph.values import name_of

__all__ = ["own_outputs"]


def own_outputs(graph: ir.Graph, others: Iterable[ir.Value] = ()) -> None:
    """Give an output that stands twice, or is one of ``others``, a node of its own, in place. ``y`` that stands twice becomes ``y`` and ``y_2``."""
    seen, taken = set(others), set[str]()
    for index, value in enumerate(list(graph.outputs)):
        if value in seen:
            node = ir.Node("", "Identity", [value])
            copy, taken = node.outputs[0], taken or graph_names(graph)
            copy.type, copy.shape, number = value.type, value.shape, 2
            while f"{name_of(value)}_{number}" in taken:
                number += 1
            copy.name = f"{name_of(value)}_{number}"
            taken.add(copy.name)
            graph.append(node)
            value = graph.outputs[index] = copy
        seen.add(value)
