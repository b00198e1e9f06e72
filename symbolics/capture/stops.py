"""Where PyTorch stops gradients, and the mark that a graph gets there.

ONNX has no operator for x.detach() or torch.no_grad(). Where floats that need a gradient go into a call and floats that need none come
out, the results are wrapped in ``pythonop::stop_gradient``. Frozen parameters need no mark: nothing that depends on them alone needs a
gradient.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

import symbolics.capture.opaque_op  # noqa: F401  (it defines the operator)
from symbolics import torch_private as private
from symbolics.capture.aliases import is_whole
from symbolics.capture.recorder import active_recorder
from symbolics.users import is_users

__all__ = ["SHAPE_ONLY", "marked", "sources", "stops"]

#: Their results do not depend on the values of their arguments: nothing flows that could be stopped.
SHAPE_ONLY = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided",
}  # fmt: skip

_GETTER_OF_DATA = torch.Tensor.data
_STOPPING = (private.set_grad_enabled, torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.detach_)


def stops(func: Any) -> bool:
    """Whether a function is there to stop gradients."""
    return any(func is stopping for stopping in _STOPPING) or getattr(func, "__self__", None) is _GETTER_OF_DATA


def marked(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What a call returned, with a mark on each float at which gradients stopped.

    Args:
        func, name: The function, and its name.
        args, kwargs: Its arguments.
        result: What it returned.
    """
    if name in SHAPE_ONLY or _needs_no_mark(result):
        return result
    if private.transforms_active():  # what torch.func wraps does not say that it needs a gradient
        stopped = stops(func) or not torch.is_grad_enabled()
        return pytree.tree_map_only(torch.Tensor, lambda t: _mark(t, []), result) if stopped else result
    if torch.is_grad_enabled() and private.is_higher_order(func):  # torch.cond, scan: a capture runs their bodies without autograd
        if sources(args, kwargs):
            pytree.tree_map_only(torch.Tensor, _as_differentiable, result)
        return result
    found = sources(args, kwargs) or _cut(func, args)
    return pytree.tree_map_only(torch.Tensor, lambda t: _mark(t, found), result) if found else result


def sources(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments through which gradients flow."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _cut(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the model cuts off though nothing flows there: gradients that were taken without create_graph=True, and what it makes of them.

    The mark says that this is meant (`exporter.gradient_graph.cut`).
    """
    recorder = active_recorder()
    if recorder is None or not recorder.capture.taken.cut or not (stops(func) or not torch.is_grad_enabled()) or _of_functional():
        return []
    found = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return found if stops(func) else [leaf for leaf in found if any(leaf is cut for cut in recorder.capture.taken.cut)]


def _of_functional() -> bool:
    """Whether torch.autograd.functional asks, which detaches whatever it gives without create_graph=True: that says no more than the missing word."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "torch.autograd.functional":
            return True
        frame = frame.f_back
    return False


def _needs_no_mark(result: Any) -> bool:
    """Whether this is plain to see; most calls of a forward end here."""
    if isinstance(result, torch.Tensor):
        return result.requires_grad or not result.is_floating_point()
    return isinstance(result, torch.Size) or not isinstance(result, (tuple, list, dict))


def _as_differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Let what follows see that a gradient flows here."""
    return tensor.requires_grad_() if tensor.is_floating_point() and tensor.is_leaf else tensor


def _mark(tensor: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    mark = torch.ops.pythonop.stop_gradient(tensor)
    shared = [source for source in found if private.shares_memory(tensor, source)]
    if shared:
        recorder = active_recorder()
        whole = next((source for source in shared if is_whole(tensor, source)), None)
        mark._pythonop_alias = whole is None or recorder is None
        if recorder is not None:
            recorder.capture.aliases.pairs += [
                (mark, source, "detach() or .data", "detach a copy (x.detach().clone())") for source in shared
            ]
            recorder.capture.aliases.looks += [] if whole is None else [(mark, whole)]
    return mark
