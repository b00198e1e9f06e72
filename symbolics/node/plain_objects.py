"""Objects of plain data that a module holds, as a configuration: an instance of a class of Python, made of what its ``__dict__`` says.

Neither its constructor nor any other code of its class runs when a file is read; what the class allows is asked of the class alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from symbolics.errors import ExportError
from symbolics.node.arguments import Codec, Resolver, add_codec
from symbolics.node.classes import attributes_of, is_method, tuple_fields, value_fields, why_not_plain
from symbolics.node.containers import fill
from symbolics.node.limits import MAX_DEPTH
from symbolics.node.names import qualified_name

__all__ = ["ModuleResolver", "PlainObject", "as_plain", "carries_more", "hidden_by", "holders_in", "made"]


class PlainObject:
    """An object in the place of which its class and its attributes stand.

    Attributes:
        cls: Its class.
        attributes: What it holds, such objects among it.
    """

    __slots__ = ("attributes", "cls")

    def __init__(self, cls: Any, attributes: dict[str, Any]) -> None:
        """Args: the class; the attributes."""
        self.cls, self.attributes = cls, attributes


def made(value: Any) -> Any:
    """A value, as a file says it, with its own lists, dicts, sets and arrays, and the objects that stand in it."""

    def leaf(one: Any) -> Any:
        if type(one) is set or type(one) is np.ndarray:
            return one.copy()
        if type(one) is not PlainObject:
            return one
        out = object.__new__(one.cls)
        held = attributes_of(out)
        assert held is not None
        held.update({key: made(inner) for key, inner in one.attributes.items()})
        return out

    return fill(value, leaf)


def hidden_by(cls: type, name: str) -> bool:
    """Whether an attribute of that name would be called in the place of a method, or is one of Python's own."""
    return is_method(cls, name) or (name.startswith("__") and name.endswith("__"))


def as_plain(value: Any, known: Callable[[Any], bool], depth: int = 0) -> Any:
    """A value with a `PlainObject` in the place of each object of plain data in its lists, tuples and dicts.

    Args:
        value: The value.
        known: Whether a value can be written as it is.
        depth: How deep it stands.

    Raises:
        ExportError: It nests deeper than a file may; it may hold itself.
    """
    if depth > MAX_DEPTH:
        raise ExportError(f"it nests deeper than {MAX_DEPTH} levels: does it hold itself?")
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(as_plain(item, known, depth + 1) for item in value)
    if kind is dict or kind is OrderedDict:
        return kind((key, as_plain(item, known, depth + 1)) for key, item in value.items())
    held = None if known(value) or why_not_plain(kind) else attributes_of(value)
    return value if held is None else PlainObject(kind, {key: as_plain(item, known, depth + 1) for key, item in held.items()})


def carries_more(value: Any) -> bool:
    """Whether a dataclass holds more than its fields, as a configuration of transformers does."""
    fields = value_fields(type(value))
    return fields is not None and not (attributes_of(value) or {}).keys() <= set(fields)


def holders_in(value: Any, known: Callable[[Any], bool]) -> Iterator[tuple[Any, bool]]:
    """What a call may change in a value in place, and whether that is the ``__dict__`` of an object.

    Lists, dicts, sets and arrays, dataclasses and the objects that `as_plain` would write, in one another.
    """
    waiting, met = [value], set[int]()
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if id(one) in met:
            continue
        met.add(id(one))
        if kind is dict or kind is OrderedDict:
            yield one, False
            waiting += one.values()
        elif kind is list or kind is set:
            yield one, False
            waiting += one
        elif kind is np.ndarray:
            yield one, False
        elif kind is tuple or tuple_fields(kind) is not None:
            waiting += tuple.__iter__(one)
        elif value_fields(kind) is None and (known(one) or why_not_plain(kind)):
            continue
        elif (held := attributes_of(one)) is not None:
            yield held, True
            waiting += held.values()


class ModuleResolver:
    """The resolver of what a module holds: there alone may such an object stand."""

    def __init__(self, resolve: Resolver, plain: Callable[[str], Any]) -> None:
        """Args: what resolves all other names; what gives the class of a `PlainObject`."""
        self._resolve, self.plain = resolve, plain

    def __call__(self, kind: str, name: str) -> Any:
        """See `symbolics.node.arguments.Resolver`."""
        return self._resolve(kind, name)


def _read(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> PlainObject:
    if not isinstance(resolver, ModuleResolver):
        raise TypeError("it stands in no module")
    name, held = payload
    if type(name) is not str or type(held) is not dict:
        raise TypeError("it is a name and a dict")
    attributes = {key: decode_child(value) for key, value in held.items()}
    cls = resolver.plain(name)
    if hiding := [key for key in attributes if hidden_by(cls, key)]:
        raise ValueError(f"its attribute {hiding[0][:40]} stands in the place of a method of its class")
    return PlainObject(cls, attributes)


def _write(value: PlainObject, encode_child: Callable[[Any], Any]) -> list[Any]:
    return [qualified_name(value.cls), {key: encode_child(item) for key, item in value.attributes.items()}]


add_codec(Codec("$plain", lambda value: type(value) is PlainObject, _write, _read))
