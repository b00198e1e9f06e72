"""LSTM and GRU of open length: torch.onnx lends them another kernel while it exports, and the dispatcher remembers the one that it had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "kernels_looked_up_anew"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13.0",
    wrong="torch.onnx.export(dynamo=True) registers an LSTM and a GRU as loops where axes are open, and leaves what the dispatcher has cached of them: "
    "the second export in a process has the length of the example, and a torch.export.export behind an export a loop that has no gradient",
)

_OPERATORS = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)


@contextlib.contextmanager
def kernels_looked_up_anew(model: torch.nn.Module) -> Iterator[None]:
    """Let the dispatcher look up the kernels of both operators anew, in the block and behind it. Takes any model."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for operator in _OPERATORS:
        private.forget_kernels(operator)
