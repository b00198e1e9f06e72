"""Code behind torch.compile, run as it is written."""

from __future__ import annotations

import contextlib
import sys

import torch

__all__ = ["uncompiled"]


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Compile nothing while it is open: that would cost more than an export, and what does not compile under a tracer would be known as such ever after.

    torch.cond, while_loop and scan are compiled in eager mode, too.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
