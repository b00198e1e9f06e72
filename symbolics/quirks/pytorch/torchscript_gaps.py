"""Operators that torch.onnx.export(dynamo=False) has no translation of, and people use most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_float, in_place, instead, instead_in_torchscript

__all__ = ["GAPS", "QUIRK", "UNARY"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript has no atanh, asinh, acosh, cosh, sinh, exp2, frac, addcdiv, addbmm, addmv, diag, diag_embed, block_diag, trace, isin, "
    "isclose, nanmean, renorm, rms_norm, bilinear and threshold, no fill, no fill_ with True; neither exporter has diagonal_scatter; dynamo's addmv and addbmm add 0 times x where beta is 0",
)

Tensor = torch.Tensor


def _symbolic(op_type: str) -> Callable[[Any, Any], Any]:
    return lambda g, x: g.op(op_type, x).setType(x.type())


#: Those that ONNX has as they are, since opset 9.
UNARY: dict[str, Callable[[Any, Any], Any]] = {
    f"aten::{name.lower()}": _symbolic(name) for name in ("Atanh", "Asinh", "Acosh", "Cosh", "Sinh")
}


def _exp2(x: Tensor) -> Any:
    return torch.pow(2.0, x) if x.is_floating_point() else NotImplemented


def _frac(x: Tensor) -> Tensor:
    return x - torch.where(x < 0, torch.ceil(x), torch.floor(x))  # it has no trunc, either


def _addcdiv(x: Tensor, one: Tensor, two: Tensor, *, value: float = 1) -> Tensor:
    return x + value * one / two


def _sum_of(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else x + product if beta == 1 else beta * x + product  # times 0, x may be NaN


def _addbmm(x: Tensor, one: Tensor, two: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _sum_of(x, (one @ two).sum(0), beta, alpha)


def _addmv(x: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _sum_of(x, matrix @ vector, beta, alpha)


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if (dim1, dim2) != (-2, -1) or x.dtype is torch.bool:
        return NotImplemented
    rows = torch.nn.functional.pad(x, (0, offset) if offset >= 0 else (-offset, 0))  # what row i has, at column i + offset
    places = torch.arange(rows.shape[-1], device=x.device)
    return torch.where(places - places.unsqueeze(-1) == offset, rows.unsqueeze(-1), torch.zeros((), dtype=x.dtype, device=x.device))


def _diag(x: Tensor, diagonal: int = 0) -> Any:
    return _diag_embed(x, diagonal) if x.dim() == 1 else torch.diagonal(x, diagonal)


def _block_diag(*blocks: Any) -> Any:
    blocks = blocks if isinstance(blocks[0], Tensor) else blocks[0]
    if len({block.dtype for block in blocks}) != 1:
        return NotImplemented
    squares = [block.reshape(1, -1) if block.dim() < 2 else block for block in blocks]
    rows, left = [], 0
    for i, block in enumerate(squares):
        right = sum(other.shape[1] for other in squares[i + 1 :])
        rows.append(torch.nn.functional.pad(block, (left, right)))
        left = left + block.shape[1]
    return torch.cat(rows)


def _trace(x: Tensor) -> Tensor:
    return torch.diagonal(x).sum()


def _isin(elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if not (isinstance(elements, Tensor) and isinstance(among, Tensor)):
        return NotImplemented
    found = (elements.unsqueeze(-1) == among.reshape(-1)).any(-1)
    return ~found if invert else found


def _isclose(one: Tensor, two: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if not (one.is_floating_point() and two.is_floating_point()):
        return NotImplemented
    apart = (one - two).abs()
    close = (one == two) | ((apart <= atol + rtol * two.abs()) & (apart < torch.inf))
    return close | (one.isnan() & two.isnan()) if equal_nan else close


def _nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if dtype is not None:
        return NotImplemented
    there = ~x.isnan()
    kept = torch.where(there, x, torch.zeros_like(x))
    if dim is None and not keepdim:
        return kept.sum() / there.to(x.dtype).sum()
    dims = tuple(range(x.dim())) if dim is None else dim
    return kept.sum(dims, keepdim) / there.to(x.dtype).sum(dims, keepdim)


@in_float
def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    others = [axis for axis in range(x.dim()) if axis != dim % x.dim()]
    norms = torch.linalg.vector_norm(x, p, others, keepdim=True)
    return torch.where(norms > maxnorm, x * (maxnorm / (norms + 1e-7)), x)  # 1e-7, as in torch's kernel


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    wide = x.float() if x.dtype in HALVES else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    normed = (wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def _bilinear(one: Tensor, two: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = (torch.matmul(one.unsqueeze(-2).unsqueeze(-2), weight).squeeze(-2) * two.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias


def _threshold(x: Tensor, threshold: float, value: float, inplace: bool = False) -> Any:
    return NotImplemented if inplace else torch.where(x <= threshold, torch.full((), value, dtype=x.dtype, device=x.device), x)


def _fill(x: Tensor, value: Any) -> Tensor:
    return torch.where(
        torch.ones_like(x, dtype=torch.bool), torch.as_tensor(value, device=x.device).to(x.dtype), x
    )  # it keeps x, which has a gradient of zeros


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    places = torch.arange(src.shape[-1], device=x.device)
    first = x.movedim((dim1, dim2), (0, 1)).index_put((places + max(-offset, 0), places + max(offset, 0)), src.movedim(-1, 0))
    return first.movedim((0, 1), (dim1, dim2))


def _fill_in_place(x: Tensor, value: Any) -> Any:
    return x.fill_(int(value)) if isinstance(value, bool) else NotImplemented


_FORMULAS: dict[Callable[..., Any], tuple[Any, ...]] = {
    _exp2: (torch.exp2, torch.Tensor.exp2, torch.special.exp2),
    _frac: (torch.frac, torch.Tensor.frac),
    _addcdiv: (torch.addcdiv, torch.Tensor.addcdiv),
    _addbmm: (torch.addbmm, torch.Tensor.addbmm),
    _addmv: (torch.addmv, torch.Tensor.addmv),
    _diag: (torch.diag, torch.Tensor.diag),
    _diag_embed: (torch.diag_embed, torch.Tensor.diag_embed),
    _block_diag: (torch.block_diag, private.inner_function("block_diag")),
    _trace: (torch.trace, torch.Tensor.trace),
    _isin: (torch.isin,),
    _isclose: (torch.isclose, torch.Tensor.isclose),
    _nanmean: (torch.nanmean, torch.Tensor.nanmean),
    _fill: (torch.fill,),
    _fill_in_place: (torch.Tensor.fill_,),
    _diagonal_scatter: (torch.diagonal_scatter, torch.Tensor.diagonal_scatter),
    _renorm: (torch.renorm, torch.Tensor.renorm),
    _rms_norm: (torch.rms_norm,),
    _bilinear: (torch.bilinear, torch.nn.functional.bilinear),
    _threshold: (torch.threshold, private.inner_function("threshold"), torch.nn.functional.threshold),
}
_BOTH = (_addbmm, _addmv, _diagonal_scatter)  # dynamo's translation of the first two takes 0 times NaN where beta is 0
GAPS: dict[Any, Rewrite] = {
    function: (instead if formula in _BOTH else instead_in_torchscript)(formula)
    for formula, functions in _FORMULAS.items()
    for function in functions
} | {torch.Tensor.renorm_: in_place(instead_in_torchscript(_renorm), torch.renorm)}
