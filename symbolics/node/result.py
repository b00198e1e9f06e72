"""The structure of a model's result: what stands around the tensors that are the outputs of its graph.

JSON, one object with one key for each place: ``{"tensor": i}``, output i of the graph; ``{"value": v}``, a constant in
the encoding of `call`; ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, place], ...]}``; and for a class,
``{"namedtuple": [name, [...]]}``, ``{"dataclass": [name, [[field, place], ...]]}``, ``{"mapping": [name, [[key, place], ...]]}``
(a dataclass that is a dict, such as a ModelOutput).

A name is data here as anywhere in a file: it becomes a class only through the reader's resolver.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from symbolics.errors import ExportError, FormatError, TrustError
from symbolics.node.arguments import Resolver, decode, encode, loads
from symbolics.node.limits import MAX_DEPTH, MAX_ITEMS
from symbolics.node.names import qualified_name

__all__ = ["count_tensors", "rebuild", "write_structure"]


class _Unknown(Exception):
    """A container of a type that has no place in a file."""


def write_structure(result: Any, is_tensor: Callable[[Any], bool]) -> str | None:
    """JSON of what a model returned; None where it holds an object that a file cannot say (a cache, for instance).

    Args:
        result: What forward returned. Its tensors are numbered as the exporters flatten them.
        is_tensor: Which leaves are outputs of the graph.
    """
    count = 0

    def entries(pairs: Any) -> list[Any]:
        return [[encode(key), visit(value)] for key, value in pairs]

    def visit(value: Any) -> dict[str, Any]:
        nonlocal count
        kind = type(value)
        if is_tensor(value):
            count += 1
            return {"tensor": count - 1}
        if kind in (tuple, list):
            return {kind.__name__: [visit(item) for item in value]}
        if kind in (dict, OrderedDict):
            return {"dict": entries(value.items())}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": [qualified_name(kind), [visit(item) for item in value]]}
        if dataclasses.is_dataclass(value) and isinstance(value, dict):
            return {"mapping": [qualified_name(kind), entries(value.items())]}
        if dataclasses.is_dataclass(value):
            return {"dataclass": [qualified_name(kind), [[f.name, visit(getattr(value, f.name))] for f in dataclasses.fields(value)]]}
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise _Unknown(qualified_name(kind))
        return {"value": encode(value)}

    try:
        return json.dumps(visit(result), separators=(",", ":"))
    except (_Unknown, ExportError):
        return None


def count_tensors(text: str) -> int:
    """How many tensors a structure holds.

    Raises:
        FormatError: The text is no structure.
    """
    seen: list[int] = []
    rebuild(text, seen.append, None)
    return len(seen)


def rebuild(
    text: str, tensor: Callable[[int], Any] | Sequence[Any], resolver: Resolver | None, missing: Callable[[str], None] = lambda _: None
) -> Any:
    """A model's result around its tensors.

    Args:
        text: What `write_structure` returned.
        tensor: The tensor of a number, or all of them.
        resolver: As `symbolics.node.arguments.decode` takes it. None resolves nothing.
        missing: Called with what the resolver said about a class that it refuses; a tuple or dict then stands for it.

    Raises:
        FormatError: The text is no structure.
    """
    budget = MAX_ITEMS
    take = tensor if callable(tensor) else tensor.__getitem__

    def resolved(kind: str, name: str) -> Any:
        if resolver is None:
            return None
        try:
            return resolver(kind, name)
        except TrustError as error:
            missing(str(error))
            return None

    def visit(place: Any, depth: int) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0 or depth > MAX_DEPTH or not isinstance(place, dict) or len(place) != 1:
            raise FormatError("the structure of the model's result is malformed: the file is damaged")
        ((kind, payload),) = place.items()
        if kind == "tensor" and type(payload) is int and payload >= 0:
            return take(payload)
        if kind == "value":
            return decode(payload)
        if kind == "tuple":
            return tuple(visit(item, depth + 1) for item in payload)
        if kind == "list":
            return [visit(item, depth + 1) for item in payload]
        if kind == "dict":
            return {decode(key): visit(value, depth + 1) for key, value in payload}
        if kind == "namedtuple":
            name, items = payload
            values = tuple(visit(item, depth + 1) for item in items)
            cls = resolved("namedtuple", name)
            return values if cls is None or len(cls._fields) != len(values) else tuple.__new__(cls, values)
        if kind in ("mapping", "dataclass"):
            name, items = payload
            fields = {decode(key): visit(value, depth + 1) for key, value in items}
            cls = resolved("dataclass", name)
            if cls is None:
                return fields
            if kind == "mapping":  # a ModelOutput keeps its entries twice, as items and as attributes: its constructor knows
                return cls(**fields)
            out = object.__new__(cls)
            for key, value in fields.items():
                object.__setattr__(out, key, value)
            return out
        raise FormatError(f"the structure of the model's result holds a {kind!r}: it needs a newer pythonop")

    try:
        return visit(loads(text), 0)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise FormatError("the structure of the model's result is malformed: the file is damaged") from error
