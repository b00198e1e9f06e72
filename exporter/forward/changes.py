"""What one forward leaves changed in a model: buffers, parameters, and attributes of its modules that the next call reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from exporter.train_mode.buffers import UNSEEN
from symbolics.capture.side_effects import same_values

__all__ = ["Changes"]

_CONSTANT = (
    "in place, and the next call reads it: a tensor that is no buffer, which exporters take for a constant.\n"
    "  way out: register it with register_buffer() in __init__, and the file carries its changes"
)
_NEW = (
    "at every call, a buffer that the first call makes: what is not there at the export is no input of its graph.\n"
    "  way out: register it in __init__, in its shape, or call the model once before the export"
)
_TRAINED = (
    "in place, a parameter that is trained: its gradient is that of the new value, which no graph of the forward can say.\n"
    "  way out: change a copy (w = self.weight.clamp(...)), or the parameter outside of forward, after the optimizer's step; where the first call alone\n"
    "  sets it, call the model once before the export"
)
_NUMBERS = (bool, int, float, complex)
_DEPTH = 4  # of containers in containers
_OWN = frozenset(torch.nn.Module().__dict__)  # what every module has: parameters and buffers, hooks, the mode


class Changes:
    """What forwards of a model change, by comparison with how it was.

    Args:
        model: The model, before its forward.

    Attributes:
        refused: The names of what no file can be right about, not even once -> why, and the way out.
        shared: Two names of one buffer that was found changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.refused: dict[str, str] = {}
        self.shared: tuple[str, ...] = ()
        self._buffers = {name: (buffer, _copy(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)}
        self._parameters = {
            name: (parameter, _copy(parameter))
            for name, parameter in model.named_parameters()
            if parameter.layout is torch.strided and not parameter.is_meta
        }
        self._attributes = self._now_attributes() if model.training else {}

    def found(self, again: Callable[[], Any]) -> dict[str, str]:
        """The names of what is changed -> why a graph may not show it.

        An attribute counts where a second call, on equal buffers, leaves another value than the first: what is only noted for a
        reader, or computed once and kept, is the same after both. So does a buffer that is new, or got another shape or type.

        Args:
            again: Makes the second call; it is made where there is something to tell apart.
        """
        buffers = self._now()
        before = {name: value for name, (_, value) in self._buffers.items()}
        found = {name: UNSEEN for name, value in buffers.items() if name in before and _moved(value, before[name])}
        names = {name: [other for other, (tensor, _) in self._buffers.items() if tensor is self._buffers[name][0]] for name in found}
        self.shared = next((tuple(same) for same in names.values() if len(same) > 1), ())
        for name, (parameter, value) in self._parameters.items():
            if _moved(parameter, value):
                found[name] = "it is a parameter, which changes by its gradient alone"
                if parameter.requires_grad:
                    self.refused[name] = _TRAINED
        found |= dict.fromkeys(self._parted(), "two modules share it, and forward puts another tensor in its place under one of its names")
        remade = {name: value for name, value in buffers.items() if name not in before or not _alike(value, before[name])}
        attributes = self._now_attributes() if self._model.training else {}
        moved = {
            name: value
            for name, (_, value) in attributes.items()
            if name not in self._attributes or not _equal(value, self._attributes[name][1])
        }
        if not (remade or moved):
            return found
        try:
            self._put_back(but=remade)
            again()
        except Exception:  # the next call cannot go on with it: then there is none that could train wrongly
            return found
        later, last = self._now(), self._now_attributes()
        for name, value in remade.items():
            if name in later and not _equal(later[name], value):
                found[name] = "its shape or type changes, and a graph's are fixed"
                if name not in before:
                    self.refused[name] = _NEW
        for name, value in moved.items():
            if name in last and not _equal(last[name][1], value):
                found[name] = "it is an attribute of a module, not a buffer"
                if isinstance(value, torch.Tensor) and attributes[name][0] is self._attributes.get(name, (None,))[0]:
                    self.refused[name] = _CONSTANT
        return found

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: _copy(buffer) for name, buffer in self._model.named_buffers(remove_duplicate=False)}

    def _now_attributes(self) -> dict[str, tuple[Any, Any]]:
        """Name -> the object, and its value now."""
        return {name: (value, _copy(value) if isinstance(value, torch.Tensor) else value) for name, value in _attributes(self._model)}

    def _parted(self) -> Iterator[str]:
        """The buffers that were one tensor under several names, and are not now."""
        now, first = dict(self._model.named_buffers(remove_duplicate=False)), dict[int, str]()
        for name, (before, _) in self._buffers.items():
            other = first.setdefault(id(before), name)
            if now.get(name) is not now.get(other):
                yield from (other, name)

    def _put_back(self, but: dict[str, torch.Tensor]) -> None:
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            for name, (tensor, before) in (*self._buffers.items(), *self._parameters.items()):
                if name not in but and not torch.nn.parameter.is_lazy(tensor):
                    path, _, last = name.rpartition(".")
                    if name in self._buffers:
                        modules[path]._buffers[last] = tensor
                    if tensor.shape != before.shape:  # through .data, which nobody hears of
                        tensor.data = before.clone()
                    elif tensor is not before and not same_values(tensor, before):
                        tensor.copy_(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if torch.nn.parameter.is_lazy(tensor) else tensor.detach().clone()


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors that the modules have as plain attributes, in lists and dictionaries, too."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OWN:
                yield from _leaves(f"{path}.{name}".removeprefix("."), value)


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
        yield name, value
    elif isinstance(value, (list, tuple, deque)) and depth < _DEPTH:
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item, depth + 1)
    elif isinstance(value, dict) and depth < _DEPTH:
        for key, item in value.items():
            if isinstance(key, (str, int)):
                yield from _leaves(f"{name}[{key!r}]", item, depth + 1)


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one could be written into the other as it is."""
    if torch.nn.parameter.is_lazy(one) or torch.nn.parameter.is_lazy(two):
        return one is two
    return one.shape == two.shape and one.dtype is two.dtype and one.layout is two.layout


def _moved(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one has other values than the other, which it could have been written into."""
    return one is not two and _alike(one, two) and not same_values(one, two)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one is two or (_alike(one, two) and same_values(one, two))
    return type(one) is type(two) and bool(one == two)
