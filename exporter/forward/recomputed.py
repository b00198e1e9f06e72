"""State that forward changes inside a checkpoint: eager's backward runs that part again, and changes it once more."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator

import torch
import torch.utils.checkpoint

from symbolics.capture.side_effects import same_values
from symbolics.users import warn

__all__ = ["changed_in_checkpoints", "warn_of_recomputed"]

_CHECKPOINTS = torch.utils.checkpoint.__file__


@contextlib.contextmanager
def changed_in_checkpoints(model: torch.nn.Module) -> Iterator[list[str]]:
    """While the block runs, the names of buffers that modules change in their own forward inside torch.utils.checkpoint."""
    found: list[str] = []
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def before(path: str, module: torch.nn.Module, args: object) -> None:
        if _in_a_checkpoint():
            kept[path] = {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}

    def after(path: str, module: torch.nn.Module, args: object, result: object) -> None:
        for name, old in kept.pop(path, {}).items():  # no version tells: batch_norm leaves that of its statistics as it was
            new, full = module._buffers.get(name), f"{path}.{name}".removeprefix(".")
            if new is not None and full not in found and not same_values(old, new):
                found.append(full)

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if module._buffers and not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(functools.partial(before, path)).remove)
                stack.callback(module.register_forward_hook(functools.partial(after, path)).remove)
        yield found


def _in_a_checkpoint() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINTS:
        frame = frame.f_back
    return frame is not None


def warn_of_recomputed(names: list[str]) -> None:
    """Say which state a file moves once a step where eager moves it twice."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(
            f"forward changes {', '.join(map(repr, names[:3]))}{more} inside torch.utils.checkpoint: eager's backward runs that part again and changes them a "
            "second time at each step, the file changes them once, as the model does without the checkpoint. To compare the two, take the checkpoint away."
        )
