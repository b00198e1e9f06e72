"""copy.deepcopy of a tensor, in a forward."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, stopped

__all__ = ["COPIES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="copy.deepcopy copies the memory of a tensor: TorchScript keeps the example's numbers without a word, torch.export fails",
)


def _deepcopy(x: torch.Tensor, memo: Any) -> torch.Tensor:
    """The numbers of x; its gradient stays with x."""
    return stopped(x.clone())


COPIES: dict[Any, Rewrite] = {torch.Tensor.__deepcopy__: instead(_deepcopy)}
