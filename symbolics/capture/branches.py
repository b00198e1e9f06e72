"""Branches on sizes that are open, ``if x.shape[0] > 5``, and numbers that are made of them, which both exporters decide by the example's size, without a word.

torch.export makes a condition of the whole graph of such a branch, and torch.onnx.export(dynamo=True) drops it; TorchScript takes the example's way.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.checks import chunks_of, may_lack_chunks, only_raises
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.trace.sizes import asking_frame
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["branches_noticed", "note_refusal", "notice_branch", "notice_parts", "warn_of_caught"]


@contextlib.contextmanager
def branches_noticed() -> Iterator[None]:
    """While torch.export traces a model, say which of its branches a size decides, and where a number is made of one."""

    def asked(frame: types.FrameType | None, condition: str, answer: bool | int | float) -> None:
        # SymInt.__bool__, of `if x.shape[0] % 2`, and SymFloat.__int__ ask in their turn.
        while frame is not None and frame.f_globals.get("__name__") == "torch":
            frame = frame.f_back
        _say(frame, f" ({condition})", None if isinstance(answer, bool) else answer)

    with (
        private.answers_of_sizes_watched(asked),
        private.refusals_watched(None, functools.partial(note_refusal, "a number read out of a tensor")),
    ):
        yield


def note_refusal(what: str, error: Exception) -> None:
    """torch.export has no values, and has said so to code that asked for one: where that catches the error, nobody else hears of it.

    Args:
        what: What asked.
        error: What it was told.
    """
    recorder = active_recorder()
    if recorder is not None and recorder.listening() and not isinstance(error, ExportError):
        module, source = recorder.capture.sites.here()
        recorder.capture.refused.setdefault(source, (what, module, type(error).__name__))


def warn_of_caught(recorder: Recorder) -> None:
    """Warn, where forward has returned, of the refusals in it, and of calls that raised: it has caught them."""
    for source, (what, module, error) in recorder.capture.refused.items():
        if (key := f"{source}: {error}") not in recorder.capture.branches:
            recorder.capture.branches.add(key)
            warn(
                f"{what} in module {module or '<root>'} at {source or 'a line unknown'} asks for a value that torch.export has not, and the code around it catches "
                f"the error ({error}): the file has what it does then, where eager mode has the value: take the line out of the `try`, or name the module in opaque=."
            )
    recorder.capture.refused.clear()
    for name, failure, (module, source) in recorder.capture.caught.errors if recorder.capture.dynamic else ():
        warn(
            f"{name}() in module {module or '<root>'} at {source or 'a line unknown'} raises {type(failure).__name__} in the example, and the code around it catches that: the file has "
            "what it does then at every size: give the open axes fixed sizes, or choose with torch.cond or torch.where."
        )
    recorder.capture.caught.errors.clear()


def notice_branch(truth: torch.Tensor, dynamic: Collection[int]) -> None:
    """Say in a trace of TorchScript that who called us asks for the truth of a tensor that is computed of open sizes.

    Args:
        truth: The tensor.
        dynamic: The example's sizes of the open axes.
    """
    if private.sizes_behind(truth).intersection(dynamic):
        _say(asking_frame(), "")


def notice_parts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Say of a call in torch.export's capture that it takes an open axis apart into as many parts as the example has, or leaves it as it is not 1 there.

    Args:
        name: The function.
        args, kwargs: Its arguments.
        result: What it returned.
    """
    if name not in ("split", "squeeze", "chunk") or not args or not isinstance(args[0], torch.Tensor) or not args[0].dim():
        return
    given = args[1:] if name == "squeeze" else args[2:]
    axes = kwargs.get("dim", given[0] if given else () if name == "squeeze" else 0)
    axes = [axes] if isinstance(axes, int) else axes if isinstance(axes, (tuple, list)) else ()
    opened = [axis for axis in axes if isinstance(args[0].shape[axis], torch.SymInt)]
    if not opened:
        return
    if name == "squeeze":
        _tell(
            f"squeeze({opened[0]})",
            "is of an open axis: the file keeps the axis at every size, where PyTorch drops it at size 1: leave the squeeze out, or name another axis.",
        )
    elif name == "chunk":
        parts: Any = args[1] if len(args) > 1 else kwargs.get("chunks")
        if may_lack_chunks(parts) and not private.is_multiple(args[0].shape[opened[0]], parts):
            _tell(f"chunk({parts})", chunks_of(parts, "an open axis"))
    elif type(args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))) is int:
        _tell(
            "split()",
            f"takes a tensor apart along an open axis: the file has {len(result)} parts at every size, as the example: write it with operations on the whole "
            "axis (reshape, unfold, cumsum), or give the axis a fixed size.",
        )


def _say(frame: types.FrameType | None, condition: str, number: float | None = None) -> None:
    name = "torch" if frame is None else frame.f_globals.get("__name__")  # None: torch made the code, to check what it has assumed
    if frame is None or not name or name.split(".")[0] in ("torch", "symbolics", "exporter") or only_raises(frame):
        return
    if number is None:
        _tell(
            "a branch",
            f"depends on the size of an open axis{condition}: the file goes the example's way at every size: give the axis a fixed size, or choose with "
            "torch.cond or torch.where.",
        )
    else:
        _tell(
            "int(), float() or an index",
            f"makes a number of the size of an open axis{condition}: the file has the example's {number} at every size: give the axis a fixed size, compute "
            "with the size itself (//, math.floor, torch.sym_float), or name the module of a loop in opaque=.",
        )


def _tell(what: str, does: str) -> None:
    """Warn once of each line of the model, which stands between the two parts of the sentence."""
    recorder = active_recorder()
    if recorder is None:
        return
    module, source = recorder.capture.sites.here()
    if source not in recorder.capture.branches:
        recorder.capture.branches.add(source)
        warn(f"{what} in module {module or '<root>'} at {source} {does}")
