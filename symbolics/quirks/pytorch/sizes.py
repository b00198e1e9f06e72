"""Functions of sizes, which are tensors in a TorchScript trace."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead_in_torchscript

__all__ = ["QUIRK", "SIZES"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="sym_max, sym_min and sym_ite refuse the sizes of a TorchScript trace; sym_float and sym_sqrt make the example's number of them",
)


def _tensors(*values: Any) -> list[torch.Tensor] | None:
    """The values as tensors, where one is a tensor; otherwise torch's own function serves."""
    return [torch.as_tensor(value) for value in values] if any(isinstance(value, torch.Tensor) for value in values) else None


def _largest(a: Any, b: Any) -> Any:
    return NotImplemented if (both := _tensors(a, b)) is None else torch.maximum(*both)


def _least(a: Any, b: Any) -> Any:
    return NotImplemented if (both := _tensors(a, b)) is None else torch.minimum(*both)


def _either(b: Any, t: Any, f: Any) -> Any:
    return NotImplemented if (all_ := _tensors(b, t, f)) is None else torch.where(*all_)


def _float(a: Any) -> Any:
    return NotImplemented if _tensors(a) is None else a.to(torch.get_default_dtype())


def _root(a: Any) -> Any:
    return NotImplemented if _tensors(a) is None else torch.sqrt(a.to(torch.get_default_dtype()))


SIZES: dict[Any, Rewrite] = {
    function: instead_in_torchscript(formula)
    for function, formula in (
        (torch.sym_max, _largest),
        (torch.sym_min, _least),
        (torch.sym_ite, _either),
        (torch.sym_float, _float),
        (torch.sym_sqrt, _root),
    )
}
