"""softplus(threshold=...) for torch.onnx.export(dynamo=False)."""

from __future__ import annotations

import torch
from torch.nn import functional

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead_in_torchscript

__all__ = ["QUIRK", "SOFTPLUS"]

QUIRK = Quirk(upstream="torch", seen="2.13", wrong="TorchScript's softplus drops the threshold above which it is the identity")


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """At the threshold of 20 the two differ by less than float32 can say."""
    if threshold == 20 and x.dtype is not torch.float64:
        return NotImplemented
    return torch.where(x * beta > threshold, x, functional.softplus(x, beta, 20))


SOFTPLUS = {functional.softplus: instead_in_torchscript(_softplus)}
