"""Helpers of public packages that leave torch (NumPy, decimal), in torch: a tracer cannot follow the originals.

Those of a user need no table: a function of the same meaning in torch, put in the helper's place while the model is exported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["helpers_in_torch"]


def _batch_frexp(inputs: torch.Tensor, max_bit: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    """I-BERT's scales as whole numbers: x = m / 2 ** e with m of ``max_bit`` bits, halves rounded away from zero."""
    mantissa, exponent = torch.frexp(inputs)
    shifted = mantissa.double() * 2**max_bit
    size, whole = shifted.abs(), shifted.abs().floor()
    whole = torch.where(size - whole >= 0.5, whole + 1, whole)  # size + 0.5 would round once more
    return torch.where(shifted < 0, -whole, whole).long(), float(max_bit) - exponent.double()


def _scales() -> tuple[Any, ...]:
    edges = torch.tensor([0.0, 1 + 2.0**-31, 1 + 3 * 2.0**-31, 1 - 2.0**-53, 2.0**-1070], dtype=torch.float64)  # halves among them
    return (torch.cat([torch.logspace(-9, 9, 40, dtype=torch.float64), edges, -edges]),)


#: The module that calls a helper -> its name there, the same in torch, and arguments to compare both with.
_HELPERS: dict[str, tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "transformers.models.ibert.quant_modules": ("batch_frexp", _batch_frexp, _scales),
}


@contextlib.contextmanager
def helpers_in_torch() -> Iterator[None]:
    """While it is open, the helpers above are those in torch, where they give the same bits as what is installed."""
    replaced = []
    for module_name, (name, in_torch, arguments) in _HELPERS.items():
        module = sys.modules.get(module_name)
        original = getattr(module, name, None)
        if original is not None and _same(original, in_torch, arguments):
            replaced.append((module, name, original))
            setattr(module, name, in_torch)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


@functools.cache
def _same(original: Callable[..., Any], in_torch: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> bool:
    """Whether a helper of the installed package is still the one that was written in torch."""
    try:
        expected, found = original(*arguments()), in_torch(*arguments())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    except Exception:  # whatever it has become
        return False
    return True
