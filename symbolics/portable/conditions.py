"""Where code of a Function met a condition on a size."""

from __future__ import annotations

import os
from types import FrameType

import torch

from symbolics.users import is_users

__all__ = ["place_of_condition"]

_METHODS = ("forward", "backward", "setup_context")


def place_of_condition(frame: FrameType) -> str:
    """The method, the user's line and the operator that he called there, as far as the frames say them: ``; forward asks for it at heads.py:12, in aten::topk``."""
    inner: FrameType | None = frame
    operator = line = method = ""
    while inner is not None and not method:
        code = inner.f_code
        if is_users(code.co_filename):
            line = line or f"{os.path.basename(code.co_filename)}:{inner.f_lineno}"
            method = code.co_name if code.co_name in _METHODS else ""
        elif not line and isinstance(called := inner.f_locals.get("func"), torch._ops.OpOverload):
            operator = called.name()
        inner = inner.f_back
    if not line:
        return ""
    return f"; {method or 'it'} asks for it at {line}{f', in {operator}' if operator else ''}"
