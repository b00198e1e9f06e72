"""sort(stable=True), argsort(stable=True) and, on TorchScript, msort, which neither exporter translates."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, instead_in_torchscript

__all__ = ["QUIRK", "STABLE_SORTS"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="neither exporter has sort(stable=True) or argsort(stable=True), though ONNX's TopK puts the lower index first among equal numbers; "
    "TorchScript has no msort",
)

Tensor = torch.Tensor


def _sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    return torch.sort(x, dim, descending) if stable else NotImplemented


def _argsort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    return torch.argsort(x, dim, descending) if stable else NotImplemented


def _msort(x: Tensor) -> Tensor:
    return torch.sort(x, 0)[0]


STABLE_SORTS: dict[Any, Rewrite] = {
    torch.sort: instead(_sort),
    torch.Tensor.sort: instead(_sort),
    torch.argsort: instead(_argsort),
    torch.Tensor.argsort: instead(_argsort),
    torch.msort: instead_in_torchscript(_msort),
    torch.Tensor.msort: instead_in_torchscript(_msort),
}
