"""The types of torch in the table of portable arguments. Importing this module adds them."""

from __future__ import annotations

import types
from typing import Any

import torch

from symbolics.errors import FormatError, RunError
from symbolics.node.arguments import Codec, add_codec, unresolved
from symbolics.node.containers import SEQUENCES, Partial, Slot, slots

__all__ = ["PartialSize", "by_name"]


def by_name(kind: type, name: Any) -> Any:
    """``torch.<name>`` where it is a constant of type ``kind`` (dtype, layout, memory_format).

    Raises:
        ValueError: There is no such constant.
    """
    value = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(value, kind):
        raise ValueError(f"torch has no {kind.__name__} {str(name)[:40]!r}")
    return value


def _constant(kind: type) -> Codec:
    return Codec(
        f"${kind.__name__}",
        lambda value: isinstance(value, kind),
        lambda value, _: str(value).removeprefix("torch."),
        lambda payload, *_: by_name(kind, payload),
    )


def _read_device(payload: Any, *_: Any) -> torch.device:
    if not isinstance(payload, str):  # torch.device(0) means cuda:0
        raise TypeError("a device is written as text")
    try:
        device = torch.device(payload)
    except RuntimeError as error:
        raise ValueError(f"{payload[:40]!r} is no device") from error
    if str(device) != payload:  # "cpu:99999" is cpu:-97 to torch
        raise ValueError(f"{payload[:40]!r} is no device")
    return device


for _kind in (torch.dtype, torch.layout, torch.memory_format):
    add_codec(_constant(_kind))
add_codec(Codec("$device", lambda value: isinstance(value, torch.device), lambda value, _: str(value), _read_device))


class PartialSize(Partial):
    """A torch.Size with slots in it."""

    def build(self, items: list[Any]) -> Any:
        """A torch.Size once every item is an int."""
        return PartialSize(items) if slots(tuple(items)) else torch.Size(items)


_INT64 = range(-(1 << 63), 1 << 63)


def _read_size(payload: Any, decode_child: Any, _: Any) -> Any:
    if not isinstance(payload, list):
        raise TypeError("a size is written as a list")
    items = [decode_child(item) for item in payload]
    if not all(isinstance(item, Slot) or (type(item) is int and item in _INT64) for item in items):
        raise TypeError("a size holds ints of 64 bits")
    return PartialSize().build(items)


add_codec(Codec("$torchsize", lambda value: type(value) in (torch.Size, PartialSize), lambda value, e: [e(n) for n in value], _read_size))
SEQUENCES.add(torch.Size)


def _is_builtin(value: Any) -> bool:
    """torch.tanh and its like, which are no attribute of the module that they name."""
    return isinstance(value, types.BuiltinFunctionType) and vars(torch).get(value.__name__) is value


def _read_builtin(payload: Any, _: Any, resolver: Any) -> Any:
    if not isinstance(payload, str) or not payload.startswith("torch:"):
        raise ValueError("a builtin function is written as torch:name")
    return resolver("callable", payload)


add_codec(Codec("$builtin", _is_builtin, lambda value, _: f"torch:{value.__name__}", _read_builtin))


def _is_world(value: Any) -> bool:
    """The default process group, which every process of a job has under the same name; other groups are registered."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and value is torch.distributed.group.WORLD


def _read_world(payload: Any, _: Any, resolver: Any) -> Any:
    if payload != "WORLD":
        raise FormatError(f"the process group {str(payload)[:40]!r} is unknown")
    if resolver is unresolved:
        return payload
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RunError("a call takes the default process group: call torch.distributed.init_process_group() before the file is opened")
    return torch.distributed.group.WORLD


add_codec(Codec("$processgroup", _is_world, lambda value, _: "WORLD", _read_world))
