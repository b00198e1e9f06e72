"""Hooks on gradients in a trace: those that read a hooked tensor read what its hooks return, also those that read it before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from symbolics import torch_private as private

__all__ = ["read_through"]

_VARIABLE = "pythonop::variable"


def read_through(value: Any, results: Sequence[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    """Let the readers of a value of the trace read what stands for it.

    Args:
        value: What stood for a hooked tensor when its hooks came.
        results: What each hook's call returned, in the order of the hooks.
        tensors: The hooked tensors.
    """
    ends = [private.traced_value(result) for result in results]
    calls = [_way(end, value) for end in ends]
    fed = [use.user for use in value.uses() if use.user.kind() == _VARIABLE and use.offset == 2]
    value.replaceAllUsesWith(ends[0])
    for node in fed:  # what feeds a variable stays in front of all else
        node.replaceInput(2, value)
    for tensor in tensors:
        if private.traced_value(tensor).debugName() == value.debugName():
            private.set_traced_value(tensor, ends[0])
    below = value
    for end, nodes in reversed(list(zip(ends, calls, strict=True))):  # the hook that came first runs first
        for node in nodes:
            node.replaceInputWith(ends[0], below)
        below = end
    place, moved = value.node(), {_identity(node) for nodes in calls for node in nodes}
    inputs = place.kind() == "prim::Param"
    if inputs:
        place = next((node for node in private.traced_graph().nodes() if _identity(node) not in moved), None)
        if place is None:
            return
    for nodes in reversed(calls):
        for node in nodes:
            if inputs:
                node.moveBefore(place)
            else:
                node.moveAfter(place)
                place = node


def _identity(node: Any) -> str:
    return next(iter(node.outputs())).debugName() if node.outputsSize() else ""


def _way(end: Any, start: Any) -> list[Any]:
    """The nodes that make a hook's output of the hooked value, in their order."""
    found: dict[str, Any] = {}
    todo: list[Any] = [end.node()]
    while todo:
        node = todo.pop()
        if _identity(node) in found or node.kind() == "prim::Param":
            continue
        found[_identity(node)] = node
        read = list(node.inputs())[: 2 if node.kind() == _VARIABLE else None]
        todo += [value.node() for value in read if value.debugName() != start.debugName()]

    def compare(one: Any, two: Any) -> int:
        return -1 if one.isBefore(two) else 1

    return sorted(found.values(), key=functools.cmp_to_key(compare))
