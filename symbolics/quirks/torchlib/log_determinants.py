"""The logarithm of a determinant, as a number that a float has also where the determinant is none."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.pytorch.lengths import is_open, number_of
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, stopped

__all__ = ["LOG_DETERMINANTS", "QUIRK"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib, torch",
    seen="0.7.2, 2.13",
    wrong="logdet is the logarithm of Det, which leaves float32: -inf, inf or few digits of a large matrix, or of a small one of small numbers",
)

_MOST = 8  # rows; beyond that the determinant of numbers up to 1 may be none, too
_MOST_IN_DOUBLE = 4  # onnxruntime has no Det of float64, and formulas stand for it up to here


def _log_det(x: torch.Tensor) -> torch.Tensor:
    """Rows and columns divided by their largest elements, whose logarithms are added: no gradient flows through these, for any divisor will do."""
    if not x.is_floating_point() or x.dim() < 2:
        return NotImplemented
    batched = private.is_tracing() and x.dim() > 2  # where the size of a batch may be that of the matrices in the example alone
    sizes = [number_of(size) for size in x.shape[-2:] if batched or not is_open(size)]  # of a square matrix, one says the other
    if not sizes or sizes[0] > (_MOST_IN_DOUBLE if x.dtype is torch.float64 else _MOST):
        raise _untranslated(sizes)
    if sizes[0] == 0:
        return NotImplemented
    total: Any = 0.0
    for axis in (-1, -2):
        largest = stopped(x.abs().amax(axis, keepdim=True))
        largest = torch.where(largest > 0, largest, torch.ones_like(largest))
        x = x / largest
        total = total + torch.log(largest).sum((-2, -1))
    return total + torch.log(torch.linalg.det(x))


def _untranslated(sizes: list[int]) -> ExportError:
    which = f"of {sizes[0]} rows" if sizes else "of matrices of an open size"
    error = ExportError(
        f"logdet {which} has no translation to ONNX: its determinant leaves the range of floats\n"
        '  way out: opaque=["aten::logdet"], or opaque="missing" for all such operators, keeps it as one PythonOp, which runs PyTorch wherever the file runs'
    )
    error.operators = ("aten::logdet",)
    return error


LOG_DETERMINANTS: dict[Any, Rewrite] = dict.fromkeys((torch.logdet, torch.Tensor.logdet), instead(_log_det))
