"""Draws around a mean."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import stopped

__all__ = ["NORMAL_DRAWS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="torch.normal is written as mean + std * draw, through which a gradient flows; torch's is 0",
)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    return stopped(result) if result.requires_grad and kwargs.get("out") is None else result


NORMAL_DRAWS = {torch.normal: _normal}
