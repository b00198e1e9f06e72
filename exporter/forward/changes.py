"""What one forward leaves changed in a model: its buffers, and attributes of its modules that the next call reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from symbolics.capture.side_effects import same_values

__all__ = ["Changes"]

UNSEEN = "its new value is computed where the exporter cannot look"
_NUMBERS = (bool, int, float, complex)


class Changes:
    """What forwards of a model change, by comparison with how it was.

    Args:
        model: The model, before its forward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers = {name: (buffer, _copy(buffer)) for name, buffer in model.named_buffers()}
        self._attributes = dict(_attributes(model)) if model.training else {}

    def found(self, again: Callable[[], Any]) -> dict[str, str]:
        """The names of what is changed -> why a graph may not show it.

        An attribute counts where a second call, on equal buffers, leaves another value than the first: what is only noted for a
        reader, or computed once and kept, is the same after both. So does a buffer that got another shape or type.

        Args:
            again: Makes the second call; it is made where there is something to tell apart.
        """
        buffers = self._now()
        same = {
            name: UNSEEN
            for name, value in buffers.items()
            if _alike(value, self._buffers[name][1]) and not same_values(value, self._buffers[name][1])
        }
        reshaped = {name: value for name, value in buffers.items() if not _alike(value, self._buffers[name][1])}
        attributes = dict(_attributes(self._model)) if self._model.training else {}
        moved = {name: value for name, value in attributes.items() if not _equal(value, self._attributes.get(name))}
        if not (reshaped or moved):
            return same
        self._put_back(but=reshaped)
        try:
            again()
        except Exception:  # the next call cannot go on with it: then there is none that could train wrongly
            return same
        later, attributes = self._now(), dict(_attributes(self._model))
        for name, value in reshaped.items():
            if name in later and not _equal(later[name], value):
                same[name] = "its shape or type changes, and a graph's are fixed"
        for name, value in moved.items():
            if not _equal(attributes.get(name), value):
                same[name] = "it is an attribute of a module, not a buffer"
        return same

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: _copy(buffer) for name, buffer in self._model.named_buffers() if name in self._buffers}

    def _put_back(self, but: dict[str, torch.Tensor]) -> None:
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            for name, (buffer, before) in self._buffers.items():
                if name not in but and not torch.nn.parameter.is_lazy(buffer):
                    path, _, last = name.rpartition(".")
                    modules[path]._buffers[last] = buffer
                    buffer.copy_(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if torch.nn.parameter.is_lazy(tensor) else tensor.detach().clone()


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors that the modules have as plain attributes; tensors as copies."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".removeprefix("."), _copy(value)
            elif type(value) in _NUMBERS:
                yield f"{path}.{name}".removeprefix("."), value


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one could be written into the other as it is."""
    if torch.nn.parameter.is_lazy(one) or torch.nn.parameter.is_lazy(two):
        return one is two
    return one.shape == two.shape and one.dtype is two.dtype and one.layout is two.layout


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one is two or (_alike(one, two) and same_values(one, two))
    return type(one) is type(two) and bool(one == two)
