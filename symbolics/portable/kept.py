"""What a traced forward keeps for its backward."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private

__all__ = ["changed_by", "keep"]

aten = torch.ops.aten

# A value under another name.
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
# Parts or other shapes of a value: read from it anew, they cost nothing.
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor,
    aten.select.int,
}  # fmt: skip


def keep(traced: torch.fx.GraphModule, names: frozenset[str], outputs: int) -> int:
    """Make further outputs, behind those of the forward, of what the backward reads of the forward's inner values.

    What eager's forward saves and is neither input nor output is a constant to a second derivative: here it is cut off likewise.

    Args:
        traced: Both directions as one graph; its results are those of the forward, then gradients.
        names: Those of its nodes that are the forward's.
        outputs: How many results the forward has.

    Returns:
        How many values are kept.

    Raises:
        ValueError: The backward changes such a value.
    """
    nodes = list(traced.graph.nodes)
    forward, last = {node for node in nodes if node.name in names}, nodes[-1]
    results = list(last.args[0])
    known = {_source(node) for node in results[:outputs]}
    kept: dict[torch.fx.Node, None] = {}
    for node in nodes[:-1]:
        if node in forward:
            continue
        if any(_is_inner(_source(value), forward) for value in changed_by(node)):
            raise ValueError(f"its backward changes a tensor that its forward has saved ({node.target})")
        for read in node.all_input_nodes:
            value = _source(read)
            while _is_inner(value, forward) and value not in known and value.target in _VIEWS:
                value = _source(value.args[0])
            if _is_inner(value, forward) and value not in known and isinstance(value.meta.get("val"), torch.Tensor):
                kept[value] = None
    last.args = ((*results[:outputs], *kept, *results[outputs:]),)
    traced.recompile()
    return len(kept)


def changed_by(node: torch.fx.Node) -> set[Any]:
    """The values that an operator changes in place: those that it is given, and what these are views of."""
    todo, changed = private.written_values(node), set[Any]()
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, torch.fx.Node) and value not in changed:
            changed.add(value)
            todo += private.shared_values(value)
    return changed


def _is_inner(node: Any, forward: set[Any]) -> bool:
    return node in forward and node.op == "call_function"


def _source(node: Any) -> Any:
    while node.target in _SAME:
        node = node.args[0]
    return node
