"""The boundaries of a call in the sweep: between those of its gradient lies a call of its own."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from symbolics.gradients.registry import Grads, Rule
from symbolics.graph.boundaries import BEHIND, boundary, edge_of
from symbolics.graph.builder import Builder
from symbolics.node.names import BOUNDARY_OP, INNER_DOMAIN

__all__ = ["BOUNDARIES"]


def _through(op: Builder, node: ir.Node, g: ir.Value | None) -> Grads:
    if g is None:
        return [None]
    edge = edge_of(node)
    origin = replace(edge.origin, name=f"{edge.origin.name}_gradient")
    turned = replace(edge, origin=origin, call=edge.call + BEHIND, out=not edge.out, place=f"{edge.place}_grad")
    made = op.add(boundary(g, turned, op.scope.name(BOUNDARY_OP))).outputs[0]
    made.type, made.shape = node.outputs[0].type, node.outputs[0].shape
    return [made]


#: For the rules of an engine.
BOUNDARIES = {(INNER_DOMAIN, BOUNDARY_OP): Rule(_through)}
