"""JSON of a file as typed values: one strict reader for metadata and for the ``call`` attribute."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from symbolics.errors import FormatError
from symbolics.text import clean, shown

__all__ = ["SAFE_INT", "parse", "read_record"]

#: The integers that every JSON reader keeps, up to this and its negative.
SAFE_INT = 1 << 53

_hints = functools.cache(get_type_hints)
_WORDS = {dict: "a JSON object", list: "a list", tuple: "a list", str: "a string", int: "an integer", bool: "true or false"}


def parse(text: str, place: str) -> Any:
    """JSON of a file: no numbers that a reader could take for others, no key of an object twice.

    Args:
        text: The JSON.
        place: Where it stands, for the message.

    Raises:
        FormatError: It is no such JSON, or nests too deeply.
    """

    def refuse(token: str) -> Any:
        raise FormatError(f"{place}: the number {shown(token[:40])!r} is outside what a file may hold")

    def parse_float(token: str) -> float:
        value = float(token)
        return value if math.isfinite(value) else refuse(token)

    def parse_int(token: str) -> int:
        return int(token) if len(token) <= 20 and abs(int(token)) <= SAFE_INT else refuse(token)

    def parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise FormatError.damaged(place, "an object of it has a key twice")
        return out

    try:
        return json.loads(text, parse_constant=refuse, parse_float=parse_float, parse_int=parse_int, object_pairs_hook=parse_object)
    except RecursionError as error:
        raise FormatError.damaged(place, "it is not JSON that can be read, it nests deeper than a parser goes") from error
    except ValueError as error:
        raise FormatError.damaged(place, f"it is not JSON: {clean(str(error))}") from error


def read_record(data: Any, kind: Any, place: str) -> Any:
    """Parsed JSON as the type ``kind``; nothing is converted, so 1 is neither True nor 1.0.

    Args:
        data: What a JSON parser returned.
        kind: A dataclass (its fields are the keys of an object, all of them and no others), dict[str, X], list[X],
            tuple[X, ...], X | None, Literal, a plain type, or Any.
        place: Where the data stands, for the message.

    Raises:
        FormatError: The data is something else; the message says where in it, and what was expected. Where all that is wrong is a key
            that this release does not know, it says that a newer pythonop is needed.
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
    if fields is not None and isinstance(data, dict) and (newer := sorted(set(data) - set(fields))) and set(data) > set(fields):
        raise FormatError(
            f"{place}: this release does not know its key {shown(newer[0])!r}: install a newer pythonop, or the file is damaged"
        )
    if kind is Any or type(data) is kind or (origin is Literal and data in parts):
        return data
    keys = f"a JSON object with the keys {', '.join(fields)}" if fields else ""
    raise FormatError.damaged(place, f"it is {shown(_text(data))}, not {keys or _WORDS.get(origin or kind) or f'one of {parts}'}")


def _text(data: Any) -> str:
    try:
        return repr(data)
    except RecursionError:  # the parser goes a little deeper
        return f"{type(data).__name__} of many levels"
