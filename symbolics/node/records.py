"""JSON of a file as typed values: one strict reader for metadata and for the ``call`` attribute."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from symbolics.errors import FormatError
from symbolics.node.text import shown

__all__ = ["read_record"]

_hints = functools.cache(get_type_hints)
_WORDS = {dict: "a JSON object", list: "a list", tuple: "a list", str: "a string", int: "an integer", bool: "true or false"}


def read_record(data: Any, kind: Any, place: str) -> Any:
    """Parsed JSON as the type ``kind``; nothing is converted, so 1 is neither True nor 1.0.

    Args:
        data: What a JSON parser returned.
        kind: A dataclass (its fields are the keys of an object, all of them and no others), dict[str, X], list[X],
            tuple[X, ...], X | None, Literal, a plain type, or Any.
        place: Where the data stands, for the message.

    Raises:
        FormatError: The data is something else; the message says where in it, and what was expected.
    """
    origin, parts = get_origin(kind), get_args(kind)
    fields = _hints(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None
    if fields is not None and isinstance(data, dict) and set(data) == set(fields):
        return kind(**{name: read_record(data[name], part, f"{place}, {name}") for name, part in fields.items()})
    if origin is dict and isinstance(data, dict):
        return {key: read_record(value, parts[1], f"{place}, {shown(key)}") for key, value in data.items()}
    if origin in (list, tuple) and isinstance(data, list):
        return origin(read_record(value, parts[0], f"{place}, item {i}") for i, value in enumerate(data))
    if origin is types.UnionType:
        return None if data is None else read_record(data, parts[0], place)
    if kind is Any or type(data) is kind or (origin is Literal and data in parts):
        return data
    keys = f"a JSON object with the keys {', '.join(fields)}" if fields else ""
    raise FormatError.damaged(place, f"it is {shown(repr(data))}, not {keys or _WORDS.get(origin or kind) or f'one of {parts}'}")
