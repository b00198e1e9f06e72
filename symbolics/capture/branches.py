"""Branches on sizes that are open: ``if x.shape[0] > 5``, which both exporters decide by the example's size, without a word.

torch.export makes a condition of the whole graph of such a branch, and torch.onnx.export(dynamo=True) drops it; TorchScript takes the example's way.
It also keeps the example's ``int(x.shape[0])`` and ``range(x.shape[0])``, and as many parts as the example has (``x.split(2)``, ``for row in x``),
where torch.export gives up the open axis. Which of them are of open axes, `exporter.forward.open_axes` sees in the translated graph.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.binding import is_traced_size
from symbolics.capture.checks import only_raises
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.trace import Number
from symbolics.users import warn

__all__ = ["branches_noticed", "notice_branch", "notice_number", "notice_parts"]

_NUMBERS = {
    "__int__": "int()",
    "__index__": "len(), range() or another use of a size as an integer",
    "__float__": "float()",
    "item": ".item()",
    "tolist": ".tolist()",
}
_PARTS = {"split": ".split()", "split_with_sizes": ".split_with_sizes()", "unbind": ".unbind(), or a loop over a tensor,"}


@contextlib.contextmanager
def branches_noticed() -> Iterator[None]:
    """While torch.export traces a model, say which of its branches a size decides."""

    def asked(frame: types.FrameType | None, condition: str) -> None:
        if frame is not None and frame.f_globals.get("__name__") == "torch":  # SymInt.__bool__, of `if x.shape[0] % 2`
            frame = frame.f_back
        _say(frame, f" ({condition})")

    with private.truths_of_sizes_watched(asked):
        yield


def notice_branch(truth: torch.Tensor, dynamic: set[int]) -> None:
    """Say in a trace of TorchScript that who called us asks for the truth of a tensor that is computed of open sizes.

    Args:
        truth: The tensor.
        dynamic: The example's sizes of the open axes.
    """
    if private.sizes_behind(truth) & dynamic:
        _say(_asking(), "")


def notice_number(recorder: Recorder, name: str, size: torch.Tensor) -> None:
    """In a trace of TorchScript, remember that a size becomes a number of Python."""
    if name in _NUMBERS and private.is_tracing() and is_traced_size(size) and (frame := _asking()) is not None and not only_raises(frame):
        recorder.capture.trace.numbers.append(Number(size, _NUMBERS[name], _place(recorder)))


def notice_parts(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Any) -> None:
    """In a trace of TorchScript, remember where a tensor was taken into as many parts as an axis of it has."""
    tensor = args[0] if args else None
    if name not in _PARTS or not private.is_tracing() or not isinstance(tensor, torch.Tensor) or not tensor.dim():
        return
    given = args[1:] if name == "unbind" else args[2:]
    axis = kwargs.get("dim", given[0] if given else 0)
    if type(axis) is not int or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args[1:], kwargs))):
        return  # parts of computed sizes are computed in the file, too
    with private.unheard():
        size = torch.as_tensor(tensor.shape[axis])
    recorder.capture.trace.numbers.append(Number(size, _PARTS[name], _place(recorder), len(parts)))


def _place(recorder: Recorder) -> str:
    module, source = recorder.capture.sites.here()
    return f"in module {module or '<root>'} at {source}"


def _asking() -> types.FrameType | None:
    """The user's code that calls us; None where torch's does."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("symbolics."):
        frame = frame.f_back
    return None if frame is None or frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "exporter") else frame


def _say(frame: types.FrameType | None, condition: str) -> None:
    name = "torch" if frame is None else frame.f_globals.get("__name__", "")
    recorder = active_recorder()
    if recorder is None or frame is None or name.split(".")[0] in ("torch", "symbolics", "exporter") or only_raises(frame):
        return
    module, source = recorder.capture.sites.here()
    if source in recorder.capture.branches:
        return
    recorder.capture.branches.add(source)
    warn(
        f"a branch in module {module or '<root>'} at {source} depends on the size of an open axis{condition}: the file goes the example's way at every "
        "size: give the axis a fixed size, or choose with torch.cond or torch.where."
    )
