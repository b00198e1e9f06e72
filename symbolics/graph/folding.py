"""Nodes that only constants go into, computed while the graph is built."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.copies import inline_body
from symbolics.graph.values import attr
from symbolics.graph.walk import discard, walk

__all__ = ["fold", "taken_branch"]


def fold(op: Builder, nodes: list[ir.Node]) -> tuple[list[ir.Node], bool]:
    """Remove from their graph the nodes that only constants and static shapes go into, so that ranks behind them are known.

    The nodes that are left, and whether any went.
    """
    left: list[ir.Node] = []
    before = len(nodes)
    todo = nodes[::-1]
    dead: set[ir.Node] = set()
    while todo:
        node = todo.pop()
        if node.graph is None or node in dead:  # expanded itself since, or in a branch not taken
            continue
        ends_graph = any(o.is_graph_output() for o in node.outputs)
        if not ends_graph and (branch := taken_branch(op, node)) is not None:
            copies, results = inline_body(op, branch, ())
            node.graph.insert_before(node, copies)
            todo += list(walk(copies))[::-1]
            dead.update(walk([node]))
        elif not ends_graph and (arrays := op.scope.evaluate(node)) is not None:
            results = [op.constant(a, o.dtype or ir.DataType.from_numpy(a.dtype)) for o, a in zip(node.outputs, arrays)]
        else:
            left.append(node)
            continue
        for o, v in zip(node.outputs, results):
            o.replace_all_uses_with(v)
        discard(node)
        node.graph.remove(node)
    return left, len(left) != before


def taken_branch(op: Builder, node: ir.Node) -> ir.Graph | None:
    """The branch of an If whose condition is known."""
    if node.op_type != "If" or node.domain != "":
        return None
    condition = op.const(node.inputs[0])
    return None if condition is None else attr(node, "then_branch" if condition.any() else "else_branch")
