"""``x.data``, the attribute of old."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk

__all__ = ["DATA_GETTER", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="the getter of x.data is traced by neither exporter: its result is a constant of the graph, or torch.export fails",
)


def _data(func: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What x.data is, by a call that is traced."""
    return args[0].detach()


DATA_GETTER = {torch.Tensor.data.__get__: _data}  # type: ignore[attr-defined]
