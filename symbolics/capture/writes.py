"""What a model's forward changes in place, in a capture: a graph has values alone, so that a change is a new value under the tensor's name."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from symbolics import torch_private as private
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.views import without_new_dimensions
from symbolics.errors import ExportError
from symbolics.quirks import REWRITES, Rewrite

__all__ = ["SAME_VALUES", "change", "check_unread", "hide_change", "is_computed", "overwrite", "refuse", "rewritten", "write_out"]

#: In-place operations that leave the values as they are.
SAME_VALUES = {
    "requires_grad_", "detach_", "share_memory_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "rename_",
}  # fmt: skip


def change(func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that changes its target; in a trace, of which no buffer that shares its memory is left behind."""
    if name == "copy_" and not private.is_tracing() and len(args) > 1 and isinstance(args[1], torch.Tensor):
        # torch.export puts the value itself in the place of a buffer that it is copied into, whatever its shape and type.
        args = (target, args[1].to(target.dtype).expand(target.shape), *args[2:])
    if not (private.is_tracing() and isinstance(target, torch.Tensor)):
        return rewritten(func, REWRITES.get(func), *args, **kwargs)
    recorder = active_recorder()
    buffers = None if recorder is None else recorder.capture.trace.buffers
    if buffers is None or not buffers.has(target):
        shared = recorder is not None and recorder.capture.trace.views.shared(target)
        if name == "copy_" and (shared or not target._is_view()):
            return overwrite(target, args[1], name)
        if name == "__setitem__" and (index := without_new_dimensions(args[1])) is not None:
            value = args[2].expand(target[args[1]].shape).reshape(target[index].shape) if isinstance(args[2], torch.Tensor) else args[2]
            args = (target, index, value)
        if name in SAME_VALUES or not shared:
            return rewritten(func, REWRITES.get(func), *args, **kwargs)
        value = target.clone()
        rewritten(func, REWRITES.get(func), value, *args[1:], **kwargs)
        return overwrite(target, value, name)
    written, result = buffers.write(name, target, args[1:], kwargs), target
    if written is None:
        written, result = target, rewritten(func, REWRITES.get(func), *args, **kwargs)
    if not buffers.follow(written):
        refuse(name, "it writes into a view of a buffer that is not contiguous, or in another type: write into the buffer itself")
    return result


def overwrite(target: torch.Tensor, value: torch.Tensor, name: str = "a change in place") -> torch.Tensor:
    """``target.copy_(value)``; in a trace, what shares the target's memory is told."""
    if not private.is_tracing():
        return target.copy_(value)
    private.overwrite_traced(target, value)
    if (recorder := active_recorder()) is not None:
        trace = recorder.capture.trace
        try:
            trace.views.follow(target, trace.dynamic)
        except ExportError as error:
            recorder.refuse(name, error)
    return target


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
    recorder = active_recorder()
    buffers = None if recorder is None else recorder.capture.trace.buffers
    for into, value in pairs:
        if private.is_tracing():
            overwrite(into, value)
            if buffers is not None:
                buffers.follow(into)
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
