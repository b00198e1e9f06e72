"""erfc with the digits of what is nearly nothing."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.pytorch.logarithms import erfc_exponent
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_float, in_place, instead, stopped

__all__ = ["ERROR_FUNCTIONS", "QUIRK"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib, torch",
    seen="0.7.2, 2.13",
    wrong="erfc(x) is 1 - erf(x), which in float32 is 0 where eager mode has 1e-8 and less; TorchScript has no erfc",
)


@in_float
def _erfc(x: torch.Tensor) -> torch.Tensor:
    """The value by a fit, the slopes those of 1 - erf(x)."""
    if x.dtype is not torch.float32:
        return NotImplemented
    size = stopped(x).abs()
    t = 2 / (2 + size)
    near = torch.floor(torch.clamp(size, max=16.0) * 16) / 16  # its square is exact, so that the power has the digits of x
    right = t * torch.exp(erfc_exponent(t)) * torch.exp(-(size - near) * (size + near)) * torch.exp(-near * near)
    sloped = 1 - torch.erf(x)
    return torch.where(x < 0, 2 - right, right) + (sloped - stopped(sloped))


ERROR_FUNCTIONS: dict[Any, Rewrite] = {
    **dict.fromkeys((torch.erfc, torch.Tensor.erfc, torch.special.erfc), instead(_erfc)),
    torch.Tensor.erfc_: in_place(instead(_erfc), torch.erfc),
}
