"""Branches on sizes that are open, ``if x.shape[0] > 5``, and numbers that are made of them, which both exporters decide by the example's size, without a word.

torch.export makes a condition of the whole graph of such a branch, and torch.onnx.export(dynamo=True) drops it; TorchScript takes the example's way.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterator

import torch

from symbolics import torch_private as private
from symbolics.capture.checks import only_raises
from symbolics.capture.recorder import active_recorder
from symbolics.capture.trace.sizes import asking_frame
from symbolics.users import warn

__all__ = ["branches_noticed", "notice_branch"]


@contextlib.contextmanager
def branches_noticed() -> Iterator[None]:
    """While torch.export traces a model, say which of its branches a size decides, and where a number is made of one."""

    def asked(frame: types.FrameType | None, condition: str, answer: bool | int | float) -> None:
        # SymInt.__bool__, of `if x.shape[0] % 2`, and SymFloat.__int__ ask in their turn.
        while frame is not None and frame.f_globals.get("__name__") == "torch":
            frame = frame.f_back
        _say(frame, f" ({condition})", None if isinstance(answer, bool) else answer)

    with private.answers_of_sizes_watched(asked):
        yield


def notice_branch(truth: torch.Tensor, dynamic: Collection[int]) -> None:
    """Say in a trace of TorchScript that who called us asks for the truth of a tensor that is computed of open sizes.

    Args:
        truth: The tensor.
        dynamic: The example's sizes of the open axes.
    """
    if private.sizes_behind(truth).intersection(dynamic):
        _say(asking_frame(), "")


def _say(frame: types.FrameType | None, condition: str, number: float | None = None) -> None:
    name = "torch" if frame is None else frame.f_globals.get("__name__")  # None: torch made the code, to check what it has assumed
    recorder = active_recorder()
    if recorder is None or frame is None or not name or name.split(".")[0] in ("torch", "symbolics", "exporter") or only_raises(frame):
        return
    module, source = recorder.capture.sites.here()
    if source in recorder.capture.branches:
        return
    recorder.capture.branches.add(source)
    place = f"in module {module or '<root>'} at {source}"
    if number is None:
        warn(
            f"a branch {place} depends on the size of an open axis{condition}: the file goes the example's way at every size: give the axis a fixed size, or "
            "choose with torch.cond or torch.where."
        )
    else:
        warn(
            f"int(), float() or an index {place} makes a number of the size of an open axis{condition}: the file has the example's {number} at every size: give "
            "the axis a fixed size, compute with the size itself (//, math.floor, torch.sym_float), or name the module of a loop in opaque=."
        )
