"""A model that draws random numbers in its forward, or keeps state: why nothing can be compared, who draws, and the way out."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import PythonopError
from symbolics.text import clean
from symbolics.users import is_users

__all__ = ["nothing_to_compare"]

_DROPPING = (
    torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout, torch.nn.RReLU,
)  # fmt: skip


def nothing_to_compare(model: torch.nn.Module, step: Callable[[], Any], kept: Sequence[str], reason: str) -> PythonopError:
    """What to raise where two runs of a model with one input differ.

    Args:
        model: It is asked for its dropouts.
        step: Runs it once, to hear who draws.
        kept: The state that its Functions keep between calls.
        reason: Why the masks of Dropout do not help.
    """
    drawn, dropouts = _drawn(step), _dropouts(model)
    drops = bool(dropouts) or any(dropout for _, _, dropout in drawn)
    # What no line of the user's calls is a layer's: where there are layers that drop out, theirs.
    others = list(dict.fromkeys(f"{name}{place}" for name, place, dropout in drawn if not dropout and (place or not dropouts)))
    causes = [
        *([f"its forward draws random numbers ({_first(others)})"] if others else []),
        *([f"it drops out{f' ({_first(dropouts)})' if dropouts else ''}"] if drops else []),
        *([f"it keeps state between calls ({_first(kept)})"] if kept else []),
    ] or ["it keeps state between calls, or draws random numbers without torch"]
    ways = [
        *(["random numbers: draw outside of the model and pass the numbers in"] if others or not (drops or kept) else []),
        *(
            [
                "dropout: verify the same model with dropout 0 (`for m in model.modules(): if hasattr(m, 'p'): m.p = 0.0`, or the dropout arguments of its config), "
                "which leaves all else in training mode, or in eval()"
            ]
            if drops
            else []
        ),
        *(["state: pass it to the model as a tensor and return the new one"] if kept or not (others or drops) else []),
    ]
    return PythonopError(
        f"two runs of the model with one input differ: {', and '.join(causes)}. Eager and onnxruntime draw different numbers, and keep states of their own, "
        f"so that nothing can be compared ({reason})" + "".join(f"\n  {way}" for way in ways)
    )


def _first(names: Sequence[str], count: int = 5) -> str:
    return f"{', '.join(names[:count])}{f' and {len(names) - count} more' if len(names) > count else ''}"


def _drawn(step: Callable[[], Any]) -> list[tuple[str, str, bool]]:
    """Who draws in a step of a model, in order: the operator, the user's line, and whether it is a dropout, as far as these say."""
    found: list[tuple[str, str, bool]] = []

    def hear(operator: Any, args: Any, kwargs: Any) -> None:
        if private.is_random(operator):
            place = _place()
            dropout = operator is torch.ops.aten.bernoulli_.float and "bernoulli" not in place  # on the CPU all dropouts end there
            found.append((str(operator).removesuffix(".default"), place, dropout))

    with suppress(Exception), private.operators_heard(hear):
        step()
    return found


def _place() -> str:
    """The innermost line of the user's own code below this module: that of his forward."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame.f_back is not None and frame.f_code.co_filename != __file__:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if is_users(name):
            text = clean(linecache.getline(name, line, frame.f_globals).strip())
            return f" at {clean(os.path.basename(name))}:{line}, in {clean(frame.f_code.co_name)}{f': {text}' if text else ''}"
        frame = frame.f_back
    return ""


def _dropouts(model: torch.nn.Module) -> list[str]:
    """The modules that are known to drop out."""
    return [
        f"{type(module).__name__} {name!r}"
        for name, module in model.named_modules()
        if isinstance(module, _DROPPING) and module.training and getattr(module, "p", True)
    ]
