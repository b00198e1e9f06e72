"""Operators that are slow on onnxruntime's CPU, or wrong with several threads: other standard operators in their place.

Every runtime reads what it writes. It stands last, behind all gradients: those of an Einsum are Einsums, which are written as well as it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from symbolics.graph.boundaries import is_boundary
from symbolics.graph.builder import Builder
from symbolics.graph.contractions import contract, shape_of_product
from symbolics.graph.copies import replace
from symbolics.graph.row_sums import function_of_rows
from symbolics.graph.rows import by_rows, in_turn
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.small_sums import sum_over_few
from symbolics.graph.values import attr
from symbolics.graph.walk import remove_unread, unread, walk
from symbolics.node.names import ROWS_DOMAIN

__all__ = ["ASK_FOR_SHAPES", "SLOW", "rewrite_slow_operators", "scatter_in_turn"]

#: Operator -> what writes others in its place, or returns None where it is as fast as they are.
SLOW: dict[str, Callable[[Builder, ir.Node], ir.Value | None]] = {
    "Einsum": contract,
    "ScatterElements": by_rows,
    "GatherElements": by_rows,
    "ScatterND": in_turn,
    "ReduceSum": sum_over_few,
    "ReduceMean": sum_over_few,
    "Shape": shape_of_product,  # behind the others: they leave products of which nobody reads more
}

#: Those for which it is worth to infer shapes; sums are in most graphs, and what is known of them has to do.
ASK_FOR_SHAPES = frozenset({"Einsum", "ScatterElements", "GatherElements", "ScatterND"})

_FROM_OPSET = 16  # a Scatter with a reduction, a Shape of some axes


def rewrite_slow_operators(model: ir.Model, nodes: Collection[ir.Node] | None = None) -> int:
    """Put other operators in the place of those of `SLOW`, in place; what two of the new nodes compute alike is computed once.

    Args:
        model: With types and shapes of its values, as far as they are known: what they do not prove stays.
        nodes: Which of its nodes may become others, and no node goes that was there before; default: all.

    Returns:
        How many nodes are other ones.
    """
    graph = model.graph
    slow = [node for node in (walk(graph) if nodes is None else nodes) if node.op_type in SLOW and node.domain == ""]
    if not slow or model.opset_imports.get("", 0) < _FROM_OPSET:
        return 0
    kept = unread(graph) | (set() if nodes is None else {*graph, *graph.initializers.values()} - set(nodes))
    scope, count = Scope(free_prefix(graph, "quick/"), lambda value: False), 0
    for node in sorted(slow, key=lambda node: node.op_type == "Shape"):
        op = Builder(scope)
        with op.arithmetic():
            found = SLOW[node.op_type](op, node)
        if found is None:
            continue
        for new in op.nodes:
            new.metadata_props.update(node.metadata_props)
        replace(scope, node, op.nodes, [found])
        count += 1
    scope.register(graph)
    if any(node.domain == ROWS_DOMAIN for node in walk(graph)):
        function = function_of_rows(model.opset_imports[""])
        model.functions.setdefault(function.identifier(), function)
        model.opset_imports[ROWS_DOMAIN] = 1
    if count:
        remove_unread(graph, kept)
        if nodes is None and not any(map(is_boundary, walk(graph))):  # what two functions compute stays in each
            CommonSubexpressionEliminationPass()(model)
    return count


def scatter_in_turn(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Put in the place of each ScatterND with a reduction what loses no addition; files of before, and of other exporters, have some.

    Returns:
        Whether there were any.
    """
    found = [node for node in nodes if node.op_type == "ScatterND" and attr(node, "reduction") not in (None, "none")]
    return bool(found) and rewrite_slow_operators(model, found) > 0
