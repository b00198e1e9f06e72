"""What a deep copy of a model still has of the original: Python copies neither weak references nor what functions close over."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch

from exporter.train_mode.reads import attributes_of

__all__ = ["cast_attributes", "relink"]

_STATE = ("_parameters", "_buffers", "_modules")  # a deep copy has its own
_DEPTH = 4


def relink(model: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Let what the modules of a deep copy hold lead to the copy: attributes and hooks that are functions over a module, or that refer to it weakly.

    A method that a library puts in the place of ``forward`` is such: without this, the copy runs the original's parameters.

    Args:
        model: The original, which is left as it is.
        copied: Its deep copy.
    """
    twins: dict[int, Any] = {}
    for one, two in zip(model.modules(), copied.modules(), strict=True):
        if one is not two:
            twins[id(one)] = two
            pairs = [(vars(one).get(key, {}), vars(two).get(key, {})) for key in _STATE[:2]]
            twins |= {id(value): new[name] for old, new in pairs for name, value in old.items() if value is not None and name in new}
    for module in copied.modules():
        if id(module) not in twins:  # not an original that both have
            for name, value in list(vars(module).items()):
                if name not in _STATE and (led := _led(value, twins)) is not value:
                    vars(module)[name] = led


def _led(value: Any, twins: dict[int, Any], depth: int = 0) -> Any:
    """What leads to the copy as a value leads to the original: the value itself where it does not. Lists and dictionaries, which are copied, are changed."""
    if depth > _DEPTH:
        return value
    if isinstance(value, (list, dict)):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            if (led := _led(item, twins, depth + 1)) is not item:
                value[key] = led
        return value
    if type(value) is tuple:
        items = tuple(_led(item, twins, depth + 1) for item in value)
        return value if all(map(_is, items, value)) else items
    return _of_code(value, twins, depth)


def _of_code(value: Any, twins: dict[int, Any], depth: int) -> Any:
    if type(value) is weakref.ref:
        return weakref.ref(twins[id(value())]) if id(value()) in twins else value
    if type(value) is functools.partial:
        parts = (value.func, *value.args, *value.keywords.values())
        func, *given = (_closed(part, twins, depth + 1) for part in parts)
        if all(map(_is, (func, *given), parts)):
            return value
        count = len(value.args)
        return functools.partial(func, *given[:count], **dict(zip(value.keywords, given[count:], strict=True)))
    if isinstance(value, types.FunctionType):
        return _function(value, twins, depth)
    return value


def _function(value: types.FunctionType, twins: dict[int, Any], depth: int) -> types.FunctionType:
    """A function that closes over the copy; the same cells otherwise, which may be other functions', too."""
    cells = list(value.__closure__ or ())
    for index, cell in enumerate(cells):
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if (led := _closed(content, twins, depth + 1)) is not content:
            cells[index] = types.CellType(led)
    if all(map(_is, cells, value.__closure__ or ())):
        return value
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    made.__kwdefaults__, made.__qualname__, made.__module__ = value.__kwdefaults__, value.__qualname__, value.__module__
    made.__dict__.update(value.__dict__)
    return made


def _closed(value: Any, twins: dict[int, Any], depth: int) -> Any:
    """The same for what a function closes over, which is the original's: nothing of it is changed."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, twins[id(value.__self__)]) if id(value.__self__) in twins else value
    return value if depth > _DEPTH else _of_code(value, twins, depth)


def _is(one: Any, two: Any) -> bool:
    return one is two


def cast_attributes(model: torch.nn.Module, copied: torch.nn.Module, kind: torch.dtype) -> None:
    """Give another float type to the tensors that a copy has as plain attributes: ``to()`` knows parameters and buffers alone.

    Args:
        model: The original: what both have stays as it is.
        copied: Its copy, whose parameters have that type.
        kind: The type.
    """
    both = {id(value) for _, value in attributes_of(model)}
    for _, value in attributes_of(copied):
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype != kind
            and value.is_leaf
            and id(value) not in both
        ):
            value.data = value.data.to(kind)
