"""State that forward changes inside a checkpoint: eager's backward runs that part again, and changes it once more."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator

import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx

from symbolics.capture.side_effects import same_values
from symbolics.users import warn

__all__ = ["changed_in_checkpoints", "warn_of_recomputed"]

_CHECKPOINTS = torch.utils.checkpoint.__file__
_CHECKPOINT = "torch.utils.checkpoint"


@contextlib.contextmanager
def changed_in_checkpoints(model: torch.nn.Module) -> Iterator[dict[str, str]]:
    """While the block runs, the names of buffers and parameters that modules change in their own forward inside torch.utils.checkpoint, or inside the forward of a Function.

    Yields:
        The name -> what it is inside of.
    """
    found: dict[str, str] = {}
    kept: dict[str, dict[str, torch.Tensor]] = {}

    # Dynamo compiles the hooks of the modules in a branch of torch.cond with them, and gives up at what it cannot trace.
    def before(path: str, module: torch.nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and _inside_of():
            kept[path] = {name: tensor.detach().clone() for name, tensor in _state(module).items()}

    def after(path: str, module: torch.nn.Module, args: object, result: object) -> None:
        if torch.compiler.is_compiling():
            return
        for name, old in kept.pop(path, {}).items():  # no version tells: batch_norm leaves that of its statistics as it was
            new, full = _state(module).get(name), f"{path}.{name}".removeprefix(".")
            if new is not None and full not in found and not same_values(old, new):
                found[full] = _inside_of()

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if _state(module) and not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(functools.partial(before, path)).remove)
                stack.callback(module.register_forward_hook(functools.partial(after, path)).remove)
        yield found


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers and parameters that a module holds itself."""
    return {name: tensor for name, tensor in {**module._buffers, **module._parameters}.items() if tensor is not None}


def _inside_of() -> str:
    """What runs a module and may run it again in its backward; "" for nothing."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINTS:
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            ctx = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(ctx, FunctionCtx):
                return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname.removesuffix('.forward')}"
        frame = frame.f_back
    return "" if frame is None else _CHECKPOINT


def warn_of_recomputed(names: dict[str, str]) -> None:
    """Say which state a file moves once a step where eager moves it twice."""
    for place in dict.fromkeys(names.values()):
        there = [name for name, inside in names.items() if inside == place]
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        again = (
            "eager's backward runs that part again and changes"
            if place == _CHECKPOINT
            else "where its backward runs that part again, eager changes"
        )
        warn(
            f"forward changes {', '.join(map(repr, there[:3]))}{more} inside {place}: {again} them a second time at each step, the file changes them once, as the "
            f"model does without {'the checkpoint' if place == _CHECKPOINT else 'it'}. To compare the two, take {'the checkpoint' if place == _CHECKPOINT else 'it'} away."
        )
