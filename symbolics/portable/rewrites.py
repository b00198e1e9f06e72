"""What a Function calls, as a capture of a model sees it: wrong translations replaced, checks that only raise passed."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch.overrides import TorchFunctionMode

from symbolics.capture.checks import passed
from symbolics.capture.composites import body_of
from symbolics.capture.opaque_op import Record
from symbolics.capture.raised import Raised
from symbolics.portable.kernels import Untraceable
from symbolics.quirks import REWRITES, SPELLINGS, spelled

__all__ = ["Rewrites"]

_TEXTS = ("__repr__", "__format__", "__str__")


class Rewrites(TorchFunctionMode):
    """Acts on what forward and backward call while it is open."""

    def __init__(self, record: Record, raised: Raised) -> None:
        super().__init__()
        self.record, self.raised = record, raised

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        asker = sys._getframe(1)
        if getattr(func, "__name__", "") in _TEXTS and not _of_torch(asker):
            self.raised.note(Untraceable("it makes a text of a tensor (str, repr, print, format), which has the values"))
        with self.raised.around(func, args):
            return self._answered(func, args, kwargs or {}, asker)

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asker: types.FrameType) -> Any:
        if getattr(func, "__name__", "") == "__bool__":
            verdict = passed(asker, self.record.module, self.record.source)
            if verdict is not None:
                return verdict
        rewrite = REWRITES.get(func)
        if rewrite is not None:
            return rewrite(func, *spelled(SPELLINGS, func, args, kwargs))
        body = body_of(func)
        if body is None:
            return func(*args, **kwargs)
        with self:  # a composite written in Python: what it calls inside is replaced, too
            return body(*args, **kwargs)


def _of_torch(asker: types.FrameType | None) -> bool:
    """Whether torch's own code asks, behind the method of the tensor and the way to the mode."""
    while asker is not None and asker.f_globals.get("__name__") in ("torch.overrides", "torch._tensor"):
        asker = asker.f_back
    return asker is None or asker.f_globals.get("__name__", "").startswith("torch.")
