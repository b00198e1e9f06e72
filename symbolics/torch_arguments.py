"""The types of torch in the table of portable arguments. Importing this module adds them."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.arguments import SEQUENCES, Codec, Partial, Slot, add_codec, slots

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
        return torch.device(payload)
    except RuntimeError as error:
        raise ValueError(f"{str(payload)[:40]!r} is no device") from error


for _kind in (torch.dtype, torch.layout, torch.memory_format):
    add_codec(_constant(_kind))
add_codec(Codec("$device", lambda value: isinstance(value, torch.device), lambda value, _: str(value), _read_device))


class PartialSize(Partial):
    """A torch.Size with slots in it."""

    def build(self, items: list[Any]) -> Any:
        """A torch.Size once every item is an int."""
        return PartialSize(items) if slots(tuple(items)) else torch.Size(items)


def _read_size(payload: Any, decode_child: Any, _: Any) -> Any:
    if not isinstance(payload, list):
        raise TypeError("a size is written as a list")
    items = [decode_child(item) for item in payload]
    if not all(type(item) is int or isinstance(item, Slot) for item in items):
        raise TypeError("a size holds ints")
    return PartialSize().build(items)


add_codec(Codec("$torchsize", lambda value: type(value) in (torch.Size, PartialSize), lambda value, e: [e(n) for n in value], _read_size))
SEQUENCES.add(torch.Size)
