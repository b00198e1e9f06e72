"""LSTM and GRU of open length: torch.onnx lends them another kernel while it captures, and takes it away before it decomposes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "kernels_looked_up_anew"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13.0",
    wrong="torch.onnx.export(dynamo=True) registers an LSTM and a GRU as loops where axes are open, and leaves what the dispatcher has cached of them: "
    "the second export in a process has the length of the example, and a torch.export.export behind an export a loop that has no gradient. "
    "Behind the capture the loops are gone: the shapes of all that follows an LSTM or GRU have the length of the example",
)

_OPERATORS = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)


@contextlib.contextmanager
def kernels_looked_up_anew(model: torch.nn.Module) -> Iterator[None]:
    """Let the dispatcher look up the kernels of both operators anew, in the block and behind it; in the block, open lengths stay open. Takes any model."""
    with contextlib.ExitStack() as stack:
        for operator in _OPERATORS:
            stack.enter_context(private.composite_kernel(operator, _Shaped))
        yield


class _Shaped:
    """A kernel that gives the shapes of the results without a step of the loop where sizes are open, and is torch's own elsewhere."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def __call__(
        self,
        input: torch.Tensor,
        hx: torch.Tensor | Sequence[torch.Tensor],
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if private.is_recorded() or not any(isinstance(size, torch.SymInt) for size in input.shape):
            rest = (params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
            return self._kernel(input, hx, *rest)
        states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
        out = input.new_empty((*input.shape[:2], states[0].shape[2] * (2 if bidirectional else 1)))
        return (out, *map(torch.empty_like, states))
