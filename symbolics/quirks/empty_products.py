"""Products of matrices over nothing."""

from __future__ import annotations

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import in_place, instead

__all__ = ["EMPTY_PRODUCTS", "QUIRK"]

QUIRK = Quirk(upstream="onnxruntime", seen="1.31.1", wrong="Gemm over matrices without columns drops beta")


def _addmm(x: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """beta x; the product is a sum of nothing."""
    if mat1.shape[1] != 0 or beta == 1:
        return NotImplemented
    return x * beta + torch.mm(mat1, mat2)


_INSTEAD = instead(_addmm)
EMPTY_PRODUCTS = {torch.addmm: _INSTEAD, torch.Tensor.addmm: _INSTEAD, torch.Tensor.addmm_: in_place(_INSTEAD, torch.addmm)}
