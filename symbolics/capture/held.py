"""Parameters and buffers that are held elsewhere too: in a dict, a list, an object, a closure.

torch.export puts tensors of its own in the place of a module's parameters and buffers, and takes the same tensor, held elsewhere, for a
constant: no gradient reaches it. Here it is known again, wherever it comes from, when something is done with it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Held"]


class Held:
    """The state of a model: as it was before a capture, and as the capture has it.

    Args:
        model: The model before a capture, None for none.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        modules = () if model is None else model.modules()
        self._places = [(own, name, tensor) for m in modules for own in (m._parameters, m._buffers) for name, tensor in own.items()]
        self._now: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """The model's forward begins, with what the capture put in the place of its state."""
        self._now = {
            id(tensor): now
            for own, name, tensor in self._places
            if tensor is not None and (now := own.get(name)) is not None and now is not tensor
        }

    def known(self, value: Any) -> Any:
        """A value with the capture's tensors in the places of the model's own; containers of torch functions are looked into."""
        if isinstance(value, torch.Tensor):
            return self._now.get(id(value), value)
        if type(value) in (list, tuple):
            found = [self.known(item) for item in value]
            return type(value)(found) if any(one is not two for one, two in zip(found, value, strict=True)) else value
        if type(value) is dict:
            mine = {key: self.known(item) for key, item in value.items()}
            return mine if any(mine[key] is not item for key, item in value.items()) else value
        return value

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, by `known`."""
        return (self.known(args), self.known(kwargs)) if self._now else (args, kwargs)
