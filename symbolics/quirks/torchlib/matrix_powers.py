"""Matrices to the power of 0."""

from __future__ import annotations

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead

__all__ = ["MATRIX_POWERS", "QUIRK"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib", seen="0.7.2", wrong="matrix_power(A, 0) of a batch is one unit matrix; TorchScript has none"
)


def _power(A: torch.Tensor, n: int) -> torch.Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A).clone() if n == 0 else NotImplemented


MATRIX_POWERS = dict.fromkeys((torch.linalg.matrix_power, torch.matrix_power, torch.Tensor.matrix_power), instead(_power))
