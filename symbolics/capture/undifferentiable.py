"""Where an input that needs a gradient may not go: an export takes every float input as one, for a gradient graph may be asked for it later.

PyTorch has no gradient for some arguments: class weights, ``pos_weight``, running statistics. A call that raises for such an argument is made again
with the gradient stopped there, as the user's own call has it. And flags are for leaves (`symbolics.capture.flags`): what is made of the user's own
input is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.flags import Flags
from symbolics.text import causes

__all__ = ["StopWhereNone", "called", "is_refusal", "lacks_backward"]

_REFUSAL = "is not differentiable with respect to argument"
_NO_LEAF = "you can only change requires_grad flags of leaf variables"
_NO_BACKWARD = "You must implement either the backward or vjp method"


def is_refusal(error: BaseException | None) -> bool:
    """Whether an error is one of an input that needs a gradient, or comes of one."""
    return any(text in str(each) for each in causes(error, contexts=True) for text in (_REFUSAL, _NO_LEAF))


def lacks_backward(error: BaseException) -> bool:
    """Whether an error says that a Function has no backward."""
    return isinstance(error, NotImplementedError) and _NO_BACKWARD in str(error)


def called(
    call: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mark: Callable[[torch.Tensor], torch.Tensor],
    *,
    captured: bool = True,
) -> Any:
    """``call(*args, **kwargs)``; where it raises for an argument without a gradient, with gradients stopped at the last arguments.

    PyTorch names the argument by the kernel's name for it, which is not the caller's. What has no gradient comes last: the fewest of the last
    tensors that let the call pass are stopped, never the first.

    Args:
        call, name, args, kwargs: The function, its name and its arguments.
        mark: Makes of a detached tensor the one that is passed.
        captured: Whether an exporter sees the calls. Then one that may raise is tried out of its sight first, on copies of what it may write into:
            it leaves half a node in a trace, which crashes, and in torch.export's graph a call that is kept for what it writes.
    """
    while True:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        open_ = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        try:
            if captured and any(not isinstance(leaves[i], torch.nn.Parameter) for i in open_[1:]) and _is_suspect(name):
                with private.paused_capture():
                    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                    copied_args, copied_kwargs = pytree.tree_unflatten(copies, spec)
                    call(*copied_args, **copied_kwargs)
            with private.trace_kept():
                return call(*args, **kwargs)
        except RuntimeError as error:
            if _REFUSAL not in str(error) or not open_ or open_[-1] == 0:
                raise
            leaves[open_[-1]] = mark(leaves[open_[-1]].detach())
            args, kwargs = pytree.tree_unflatten(leaves, spec)


def _is_suspect(name: str) -> bool:
    """Whether a function may have such arguments, by its name."""
    return any(word in name for word in ("loss", "norm", "entropy"))


class StopWhereNone(TorchFunctionMode):
    """Makes the calls of an eager run so."""

    def __init__(self) -> None:
        super().__init__()
        self._flags = Flags(torch.Tensor.clone)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if (done := self._flags.change(func, args, kwargs or {})) is not None:
            return done[0]
        read = self._flags.read(func, args, kwargs or {})
        return read.result(called(func, getattr(func, "__name__", ""), read.args, read.kwargs, torch.Tensor.clone, captured=False))
