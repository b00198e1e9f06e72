"""What a model's forward changes in place, in a capture: a graph has values alone, so that a change is a new value under the tensor's name."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from symbolics import torch_private as private
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.trace import Trace
from symbolics.errors import ExportError
from symbolics.quirks import REWRITES, Rewrite

__all__ = ["SAME_VALUES", "change", "check_unread", "hide_change", "is_computed", "overwrite", "refuse", "rewritten", "write_out"]

#: In-place operations that leave the values as they are.
SAME_VALUES = {
    "requires_grad_", "detach_", "share_memory_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "rename_",
}  # fmt: skip


def change(func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that changes its target; in a trace, of which nothing that shares its memory is left behind."""
    trace, call = _traced(), functools.partial(rewritten, func, REWRITES.get(func))
    if trace is None and name == "copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        # torch.export puts the value itself in the place of a buffer that it is copied into, whatever its shape and type.
        args = (target, args[1].to(target.dtype).expand(target.shape), *args[2:])
    if trace is None or name in SAME_VALUES or not isinstance(target, torch.Tensor):
        return call(*args, **kwargs)
    try:
        return trace.change(name, target, args, kwargs, call)
    except ExportError as error:
        refuse(name, error)


def overwrite(target: torch.Tensor, value: torch.Tensor, name: str = "a change in place") -> torch.Tensor:
    """``target.copy_(value)``; in a trace, what shares the target's memory is told."""
    if (trace := _traced()) is None:
        return target.copy_(value)
    try:
        return trace.overwrite(target, value)
    except ExportError as error:
        refuse(name, error)


def _traced() -> Trace | None:
    """The trace that a call is made in, None under torch.export; one of its own where nobody listens, as in an operator with a translation."""
    if not private.is_tracing():
        return None
    recorder = active_recorder()
    return Trace() if recorder is None or recorder.capture.trace is None else recorder.capture.trace


def rewritten(func: Any, rewrite: Rewrite | None, /, *args: Any, **kwargs: Any) -> Any:
    """The call, or what stands for it in a file."""
    try:
        return func(*args, **kwargs) if rewrite is None else rewrite(func, args, kwargs)
    except ExportError as error:
        refuse(getattr(func, "__name__", ""), error)
    except RuntimeError as error:
        if "Cannot insert a Tensor that requires grad as a constant" not in str(error):
            raise
        refuse(
            getattr(func, "__name__", ""),
            "it reads a tensor that an earlier call computed (kept in a global variable, a list or an attribute), with gradients, or a parameter that is not "
            "the model's: keep x.detach(), pass it as an argument, or make the module that has it a part of the model",
        )


def is_computed(tensor: Any) -> bool:
    """Whether gradients flow to a tensor, or through it to what it was computed from."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_floating_point()


def hide_change(target: torch.Tensor, before: torch.Tensor) -> None:
    """Let a tensor that was changed in place under no_grad have the gradients that it had before: autograd has not seen the change."""
    stop = torch.ops.pythonop.stop_gradient
    nothing = torch.where(before.isfinite(), before - stop(before), torch.zeros_like(before))
    overwrite(target, stop(target.clone()) + nothing)
    if (recorder := active_recorder()) is not None:
        recorder.capture.hidden.append(target)


def check_unread(recorder: Recorder, name: str, x: torch.Tensor, made: bool = True) -> None:
    """Refuse a change of x by way of ``x.data`` where a backward may have kept what x held: eager's backward then reads what was written since.

    Args:
        recorder: Who records the capture.
        name: The call.
        x: The tensor.
        made: Whether the backward of what computed x counts; ``x.data = value`` leaves it the old memory.

    Raises:
        ExportError: A call has read x before, or its maker's backward reads it.
    """
    leaf = x.is_leaf or any(x is given for given in recorder.capture.taken.given)  # of others autograd has kept the old memory
    kept = private.storage_ref(x) in recorder.capture.aliases.kept and (made or leaf)
    if kept or (made and private.is_saved_by_its_maker(x)):
        recorder.refuse(
            name,
            "it changes a tensor through x.detach() or x.data after autograd may have kept it for a backward, which in eager mode reads the new values, "
            "and in a file the old ones: change a copy (x.detach().clone()), or change it before anything reads it",
        )


def write_out(out: Any, result: Any) -> bool:
    """Write a result into what ``out=`` gave; False where that is not of its shape."""
    pairs = list(zip(out, result, strict=True)) if isinstance(out, tuple) else [(out, result)]
    with private.paused_capture():
        if any(into.shape != value.shape for into, value in pairs):
            return False
    trace = _traced()
    for into, value in pairs:
        if trace is not None:
            trace.write_out(into, value)
        else:
            with torch.no_grad():
                into.copy_(value)
    return True


def refuse(name: str, why: str | ExportError) -> NoReturn:
    """Refuse a call of the model: by the capture, which knows where it stands, where there is one."""
    recorder = active_recorder()
    if recorder is None:
        raise ExportError(f"{name}: {why}")
    recorder.refuse(name, why)
