"""The calls of an eager run: made as they are, and noted."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.capture.callsite import Call, Callsites
from symbolics.capture.interception import original_apply
from symbolics.capture.listener import Listener
from symbolics.node.containers import expand_leaves

__all__ = ["Survey"]


class Survey(Listener):
    """Notes where each call of apply was made, while it is open.

    Attributes:
        made: The autograd node of each tensor that a call returned, and the call.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.made: list[tuple[Any, Call]] = []
        self._sites = Callsites(model)

    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        with self.deaf():
            result = original_apply(cls, args, kwargs)
        call = self._sites.call()
        self.made += [(t.grad_fn, call) for t in expand_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        return result
