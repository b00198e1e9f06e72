"""Outputs of a graph that are one value: each becomes a value of its own, with a cotangent and a buffer of its own."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from symbolics.graph.scope import graph_names
from symbolics.graph.values import name_of
from symbolics.graph.walk import subgraphs

__all__ = ["own_outputs", "own_outputs_of_bodies"]


def own_outputs(graph: ir.Graph, others: Iterable[ir.Value] = (), whole: ir.Graph | None = None) -> bool:
    """Give an output that stands twice, or is one of ``others``, a node of its own, in place. ``y`` that stands twice becomes ``y`` and ``y_2``.

    Args:
        graph: The graph, which may be a body.
        others: What else no output may be.
        whole: The graph of the model, whose names the new ones must not be. Default: ``graph``.

    Returns:
        Whether there is a new node.
    """
    seen, taken, found = set(others), set[str](), False
    for index, value in enumerate(list(graph.outputs)):
        if value in seen:
            node = ir.Node("", "Identity", [value])
            copy, taken = node.outputs[0], taken or graph_names(whole or graph)
            copy.type, copy.shape, number = value.type, value.shape, 2
            while f"{name_of(value)}_{number}" in taken:
                number += 1
            copy.name = f"{name_of(value)}_{number}"
            taken.add(copy.name)
            graph.append(node)
            value = graph.outputs[index] = copy
            found = True
        seen.add(value)
    return found


def own_outputs_of_bodies(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Let a node of its own make each output of the bodies of If and Scan, in place: onnxruntime leaves others as they were in memory.

    Args:
        model: The model, of which the bodies are.
        nodes: Its nodes.

    Returns:
        Whether there is a new node.
    """
    found = False
    for node in nodes:
        if node.op_type in ("If", "Scan") and node.domain in ("", "ai.onnx"):
            for body in subgraphs(node):
                given = [value for value in body.outputs if value.producer() is None]
                found = own_outputs(body, given, model.graph) or found
    return found
