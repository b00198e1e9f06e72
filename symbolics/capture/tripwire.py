"""A hook opens only on a torch whose calls of Function.apply can be caught: two calls of a Function of our own show it."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from symbolics.capture.interception import TESTED
from symbolics.capture.listener import Listener
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["prove_capture", "uncaught"]


class _Noting(Listener):
    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen, how = args
        seen.append(how)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: list[str], how: str) -> None:
        """Nothing: this runs where the call was not caught."""


_early = _Probe.apply
_LATE, _EARLY = "MyFn.apply(x)", "f = MyFn.apply; f(x)"

_NEWEST = tuple(map(int, TESTED[-1].split(".")))
_UNTESTED = f"{_NEWEST[0]}.{_NEWEST[1] + 1}"


def prove_capture() -> None:
    """Call a Function of our own, late and early bound, and see that both calls are caught.

    Raises:
        ExportError: One was not: this torch calls Functions in a way that we do not know, and a file would hold none of them.
    """
    _warn_of_newer_torch()
    seen: list[str] = []
    with _Noting():
        _Probe.apply(seen, _LATE)  # type: ignore[no-untyped-call]
        _early(seen, _EARLY)  # type: ignore[no-untyped-call]
    missed = [how for how in (_LATE, _EARLY) if how not in seen]
    if missed:
        raise uncaught(f"a call written as {' or as '.join(missed)} goes past the hook")


@functools.cache
def _warn_of_newer_torch() -> None:
    """Say once that nobody has tried this torch."""
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > _NEWEST:
        warn(
            f"torch {torch.__version__} is newer than what pythonop was tested with (torch {TESTED[0]} to {TESTED[-1]}): Functions are caught, what else "
            f"it moved nobody has looked at. Compare with exporter.verify, or install 'torch<{_UNTESTED}'."
        )


def uncaught(what: str) -> ExportError:
    """The error for a torch on which calls of Functions cannot be caught."""
    return ExportError(
        f"autograd Functions cannot be caught on torch {torch.__version__}: {what}.\n"
        f"  looked for: torch.autograd.Function.apply as torch {TESTED[0]} to {TESTED[-1]} have it (symbolics/capture/interception.py)\n"
        "  a file made now would hold no PythonOp, and the derivatives of the forwards in place of the Functions' own backward\n"
        f"  way out: pip install 'torch>={TESTED[0]},<{_UNTESTED}', or a newer pythonop; if something else replaces Function.apply, take that away"
    )
