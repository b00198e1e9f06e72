"""What the model returned, in the metadata of its file: its containers and constants around the outputs of its graph.

It is written like ``outputs`` of a call, with a ``$tensor`` for each output of the graph.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from symbolics.errors import ExportError, FormatError, PythonopError, TrustError
from symbolics.node.arguments import Resolver, decode, encode, loads, unresolved
from symbolics.node.containers import Slot, expand_leaves, fill, slots
from symbolics.node.limits import MAX_BYTES
from symbolics.node.names import OUTPUTS_KEY

__all__ = ["count_tensors", "rebuild", "without_first", "write_structure"]


def write_structure(result: Any, is_tensor: Callable[[Any], bool]) -> str | None:
    """JSON of what a model returned; None where it holds an object that a file cannot say (a cache, for instance).

    Args:
        result: What forward returned. Its tensors are numbered as the exporters flatten them.
        is_tensor: Which leaves are outputs of the graph.
    """
    numbers = itertools.count()
    try:
        text = json.dumps(encode(fill(result, lambda leaf: Slot(next(numbers)) if is_tensor(leaf) else leaf)), separators=(",", ":"))
    except (ExportError, TypeError, AttributeError):
        return None
    return text if len(text) <= MAX_BYTES else None


def count_tensors(text: str) -> int:
    """How many tensors a structure holds.

    Raises:
        FormatError: The text is no structure.
    """
    return len(slots(_read(text, unresolved)))


def without_first(text: str) -> str:
    """The structure of ``b`` for that of ``(a, b)``, where ``a`` is one tensor.

    Raises:
        FormatError: The text is no such pair.
    """

    def renumbered(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value - 1 if key == "$tensor" else renumbered(value) for key, value in data.items()}
        return [renumbered(item) for item in data] if isinstance(data, list) else data

    try:
        first, second = loads(text)["$tuple"]
        if first != {"$tensor": 0}:
            raise ValueError(text)
        return json.dumps(renumbered(second), separators=(",", ":"))
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise FormatError.damaged(f"metadata {OUTPUTS_KEY}", "it is no pair of a loss and a result") from error


def rebuild(text: str, tensors: Sequence[Any], resolver: Resolver, missing: Callable[[str], None] = lambda _: None) -> Any:
    """A model's result around its tensors.

    Args:
        text: What `write_structure` returned.
        tensors: The outputs of the graph.
        resolver: As `symbolics.node.arguments.decode` takes it.
        missing: Called with what the resolver said about a class that it refuses; a tuple or dict then stands for it.

    Raises:
        FormatError: The text is no structure, or one of more tensors.
    """

    def allowed(kind: str, name: str) -> Any:
        try:
            return resolver(kind, name)
        except TrustError as error:
            missing(str(error))
            return unresolved(kind, name)

    template = _template(text)
    result = _read(text, allowed) if template is None else template  # fill() makes new containers
    if any(slot.kind != "tensor" or not 0 <= slot.index < len(tensors) for slot in slots(result)):
        raise FormatError.damaged(f"metadata {OUTPUTS_KEY}", f"it names an output beyond the {len(tensors)} of the graph")
    return fill(result, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)


#: Leaves that every result may share.
_CONSTANTS = (Slot, type(None), bool, int, float, str)


@functools.lru_cache(maxsize=64)
def _template(text: str) -> Any:
    """What the text says, where that is tensors and constants in containers of Python's own: it is the same for everybody and for
    ever. None where it is not: a class may be allowed, or another one, the next time, and an array belongs to who gets it.
    """

    def refuse(kind: str, name: str) -> Any:
        raise TrustError(f"{kind} {name}")

    try:
        found = _read(text, refuse)
    except PythonopError:
        return None
    return found if all(type(leaf) in _CONSTANTS for leaf in expand_leaves(found)) else None


def _read(text: str, resolver: Resolver) -> Any:
    try:
        data = loads(text)
        old = isinstance(data, dict) and not any(key.startswith("$") for key in data)
        return decode(_from_places(data) if old else data, resolver)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError.damaged(f"metadata {OUTPUTS_KEY}", "it is no result of a model") from error
    except FormatError as error:
        raise FormatError(f"metadata {OUTPUTS_KEY}: {error}") from error


def _from_places(place: Any) -> Any:
    """The first form of this text, an object with one key per place, as it is written now."""
    ((kind, payload),) = place.items()
    if kind == "value":
        return payload
    if kind == "tensor":
        return {"$tensor": payload}
    if kind == "list":
        return [_from_places(item) for item in payload]
    if kind == "tuple":
        return {"$tuple": [_from_places(item) for item in payload]}
    if kind == "dict":
        return {"$dict": [[key, _from_places(item)] for key, item in payload]}
    if kind == "namedtuple":
        return {"$namedtuple": [payload[0], [_from_places(item) for item in payload[1]]]}
    if kind in ("dataclass", "mapping"):
        return {f"${kind}": [payload[0], {key: _from_places(item) for key, item in payload[1]}]}
    raise ValueError(kind)
