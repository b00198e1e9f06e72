"""tile as torch.onnx.export(dynamo=False) writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead_in_torchscript

__all__ = ["QUIRK", "REPEATS"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript's tile is an If of both cases, more repeats or more dimensions, and declares the rank of its input for that of its result",
)


def _tile(x: torch.Tensor, dims: Sequence[Any] = ()) -> torch.Tensor:
    return x.repeat(*[1] * (x.dim() - len(dims)), *dims) if dims or x.dim() else NotImplemented


REPEATS: dict[Any, Rewrite] = {function: instead_in_torchscript(_tile) for function in (torch.tile, torch.Tensor.tile)}
