"""One backward pass of autograd calls the backward of a Function once, on the sum of all its cotangents: across the sessions of a loaded module, too.

In eager every call of a Function is one node of one autograd graph, and the engine sums what flows back to it before it runs. A loaded
module with ``create_graph=True`` is several nodes, each with a session of its own. Where a call is behind two of them (a loss of outputs and of
gradients), its backward runs twice in one pass, on a part of the cotangent each time. That makes no difference to a backward that is linear in
its cotangents. For any other, the second run gives what the sum has, without what the first has given: the two together are what eager has.
Everything else between the sessions is linear, so this holds for Functions behind one another as well.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge

from symbolics import torch_private as private
from symbolics.errors import RunError
from symbolics.node.names import qualified_name
from symbolics.text import shown

__all__ = ["backward_pass", "batch_of_pass", "stopped_at", "watch"]

Gradients = Sequence[torch.Tensor | None]

_WATCHED = "pythonop.sums"  # node.metadata
_MOST = 16  # passes that an exception has ended leave their sums: so many at most


class _Pass:
    """What has come to the calls in one pass of the engine.

    Attributes:
        differentiated: Whether what it computes may be differentiated again.
        place: Of which elements of torch.func.vmap's batches: each of them is a pass of its own.
        seen: (place, call) -> the sum of its cotangents so far, and what backward gives for that.
        asked, answer: The call whose backward runs for its sum, and what that gives.
        stopped: Calls of which nobody takes what their backward gives.
    """

    def __init__(self) -> None:
        self.differentiated = False
        self.place: tuple[int, ...] = ()
        self.seen: dict[tuple[tuple[int, ...], Any], tuple[Gradients, Gradients]] = {}
        self.asked: Any = None
        self.answer: Gradients = ()
        self.stopped: set[Any] = set()


class _Passes(threading.local):
    """Those of a thread: by the engine's number, and the one in which a loaded module runs."""

    def __init__(self) -> None:
        self.known: dict[int, _Pass] = {}
        self.current: _Pass | None = None


_passes = _Passes()


def _forget(known: dict[int, _Pass], task: int) -> None:
    known.pop(task, None)


@contextmanager
def backward_pass() -> Iterator[None]:
    """Around the run of a session in a backward of autograd: it belongs to the pass of the engine that is in progress."""
    before, known, task = _passes.current, _passes.known, private.graph_task()
    found = known.get(task)
    if found is None:
        found = _Pass()
        if task >= 0:
            known[task] = found
            for old in list(known)[:-_MOST]:
                del known[old]
            private.after_backward(functools.partial(_forget, known, task))
    found.differentiated = torch.is_grad_enabled() or private.transforms_active()
    _passes.current = found
    try:
        yield
    finally:
        _passes.current = before


@contextmanager
def batch_of_pass(element: int) -> Iterator[None]:
    """Around what torch.func.vmap asks for one element of a batch."""
    current = _passes.current
    if current is None:
        yield
        return
    before = current.place
    current.place = (*before, element)
    try:
        yield
    finally:
        current.place = before


@contextmanager
def stopped_at(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """Around a run of the engine in which what flows back to these outputs of calls ends there.

    Other outputs of the same calls may be no output of any node of the file: a module returns the singular values of a matrix, and their gradient
    reads the singular vectors. What flows back to these goes on.
    """
    ends: dict[Any, set[int]] = {}
    for edge in edges:
        ends.setdefault(edge.node, set()).add(edge.output_nr)
    current = _passes.current
    before = current.stopped if current is not None else set()
    stopped = set(before)
    hooks = [hook for call, numbers in ends.items() for hook in _ended(call, numbers, stopped)]
    if current is not None:
        current.stopped = stopped
    try:
        yield
    finally:
        if current is not None:
            current.stopped = before
        for hook in hooks:
            hook.remove()


def _ended(call: Any, numbers: set[int], stopped: set[Any]) -> list[Any]:
    """The hooks that end what flows back to these outputs of a call; where nothing else does, the call is stopped."""

    # The engine takes the gradients of targets before these hooks run.
    def enter(given: Gradients) -> Gradients | None:
        left = tuple(None if number in numbers else g for number, g in enumerate(given))
        if any(g is not None for g in left):
            return left
        stopped.add(call)  # its backward is not told of a None that autograd would make zeros of
        return None

    def leave(found: Gradients, given: Gradients) -> Gradients | None:
        return _nothing(found, given) if call in stopped else None

    return [call.register_prehook(enter), call.register_hook(leave)]


def watch(roots: Iterable[Any]) -> None:
    """From here on, see to the sums of all calls of Functions behind these tensors or gradient edges."""
    waiting, seen = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots if root is not None], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if private.function_of(node) is not None and _WATCHED not in (marks := cast("dict[str, Any]", node.metadata)):
            marks[_WATCHED] = True
            node.register_hook(functools.partial(_hook, weakref.ref(node)))
        waiting += [following for following, _ in node.next_functions]


def _hook(call: weakref.ref[Any], found: Gradients, given: Gradients) -> Gradients | None:
    """What the engine calls after each run of a backward; it may give other gradients in place of those found."""
    current, node = _passes.current, call()
    if current is None or node in current.stopped:
        return None
    if current.asked is not None:
        if current.asked is node:
            current.answer = _kept(found)
        return _nothing(found, given)
    place = current.place, node
    before = current.seen.get(place)
    if before is None:
        current.seen[place] = _kept(given), _kept(found)
        return None
    cotangents = _added(before[0], given)
    whole = _of_sum(current, node, cotangents)
    current.seen[place] = cotangents, whole
    if _close(whole, _added(before[1], found), current.differentiated):
        return None
    if current.differentiated or not _finite(before[1]):
        name = shown(qualified_name(private.function_of(node) or type(node)))
        raise RunError(
            f"the backward of the Function {name!r} ran twice for one call, and gives something else for the sum of what came in than the sum of what it "
            "gave: it is no linear function, or draws random numbers. A loaded module cannot give such a gradient in a way that it can be differentiated "
            "again.\n  way out: take the first gradient in the model's forward (torch.autograd.grad), before the export, so that one file has both; or, "
            "where this gradient is the last, without create_graph=True and torch.func"
        )
    # As a part of what was found: whoever built a graph finds it.
    rest = zip(found, _added(whole, before[1], -1), strict=True)
    return tuple(None if g is None else g if f is None else f + (g - f).detach() for f, g in rest)


def _nothing(found: Gradients, _: Gradients) -> Gradients:
    return tuple(None for _ in found)


def _kept(gradients: Gradients) -> Gradients:
    """Copies: a session may use the memory again."""
    return tuple(None if g is None else _dense(g).detach().clone() for g in gradients)


def _dense(g: torch.Tensor) -> torch.Tensor:
    return g if g.layout is torch.strided else g.to_dense()


def _added(one: Gradients, other: Gradients, sign: int = 1) -> Gradients:
    """The sums, or the differences, with zeros where only one is there."""
    found = []
    for a, b in zip(one, other, strict=True):
        b = None if b is None else _dense(b).detach() * sign
        found.append(b if a is None else a if b is None else a + b)
    return tuple(found)


def _of_sum(current: _Pass, node: Any, cotangents: Gradients) -> Gradients:
    """What a backward gives for these."""
    given = [(GradientEdge(node, i), g) for i, g in enumerate(cotangents) if g is not None]
    target = next(GradientEdge(*following) for following in node.next_functions if following[0] is not None)
    current.asked, current.answer = node, ()
    try:
        torch.autograd.grad([edge for edge, _ in given], [target], [g for _, g in given], retain_graph=True, allow_unused=True)
        return current.answer
    finally:
        current.asked, current.answer = None, ()


def _close(one: Gradients, other: Gradients, loosely: bool) -> bool:
    """Whether they differ by no more than what rounding does, in each element; or, loosely, as a whole."""
    for a, b in zip(one, other, strict=True):
        if a is None and b is None:
            continue
        a, b = (torch.zeros_like(like) if g is None else g for g, like in ((a, b), (b, a)))  # type: ignore[arg-type]
        size, eps = torch.maximum(a.abs(), b.abs()), torch.finfo(a.dtype).eps
        if loosely and a.numel():
            size, eps = size.max(), eps**0.75
        if not ((a - b).abs() <= 4 * eps * size).logical_or((a == b) | (torch.isnan(a) & torch.isnan(b))).all():
            return False
    return True


def _finite(gradients: Gradients) -> bool:
    return all(g is None or bool(torch.isfinite(g).all()) for g in gradients)
