"""Containers of tensors: which slots they hold, their leaves, copies with other leaves. The order is torch.utils._pytree's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from symbolics.errors import ExportError
from symbolics.node.classes import attributes_of, place_of, tuple_fields, value_fields, value_in
from symbolics.node.limits import MAX_DEPTH

__all__ = [
    "SEQUENCES",
    "ModulePlace",
    "Partial",
    "Slot",
    "build",
    "containers_in",
    "expand",
    "expand_leaves",
    "fields_of",
    "fill",
    "is_dataclass",
    "is_namedtuple",
    "slots",
]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in an argument or a result.

    Attributes:
        index: Which tensor input (or tensor output) of the node.
        kind: ``"tensor"``, or ``"size"``: an int64 scalar that ``forward`` receives as an int.
    """

    index: int
    kind: Literal["tensor", "size"] = "tensor"


class ModulePlace:
    """The place of a module among the arguments of a function that is one node.

    Attributes:
        index: Which of the modules of the call.
    """

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        """Args: which of the modules."""
        self.index = index

    def __repr__(self) -> str:
        return f"module {self.index}"


class Partial(tuple[Any, ...]):
    """A tuple-like container that cannot be built before its slots are filled."""

    def build(self, items: list[Any]) -> Any:
        """The real container."""
        raise NotImplementedError


def is_dataclass(value: Any) -> bool:
    """Whether a value is opened as a dataclass. It may be a dict as well, as transformers' ModelOutput is."""
    kind = type(value)
    return value_fields(kind) is not None and not issubclass(kind, (list, tuple, Slot))


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass holds: its fields, or its entries where it is a dict as well. No code of its class runs.

    Raises:
        AttributeError: A field was never set.
        TypeError: The class computes a field (a property, another descriptor), or has a ``__dict__`` of its own making.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return dict(_mapping_of(kind).items(value))
    held = attributes_of(value)
    out = {}
    for name in value_fields(kind) or ():
        slot = place_of(kind, name)
        if slot is not None:
            out[name] = slot.__get__(value)
        elif held is not None and name in held:
            out[name] = held[name]
        else:  # a field with init=False leaves its default in the class
            out[name] = value_in(kind, name)
    return out


def _mapping_of(cls: type) -> Any:
    """The dict of Python's own that a class is made of; object where it is none."""
    return OrderedDict if issubclass(cls, OrderedDict) else dict if issubclass(cls, dict) else object


def build(cls: type, attributes: dict[str, Any], entries: dict[str, Any]) -> Any:
    """A dataclass with these attributes, and these entries where it is a dict as well, without running code of its class.

    A constructor or a property could compute anything, and the result need not be what was recorded.

    Raises:
        TypeError: The class has a base that cannot be made so (int, Exception, ...), or computes one of its fields.
    """
    base = _mapping_of(cls)
    out = base.__new__(cls)
    held = attributes_of(out)
    places = {name: place_of(cls, name) for name in value_fields(cls) or ()}
    if held is None and None in places.values():
        raise TypeError("its fields have no place: the class has slots for some of them, and no __dict__")
    for key, value in attributes.items():
        slot = places.get(key)
        if slot is not None:
            slot.__set__(out, value)
        elif held is not None and type(key) is str:
            held[key] = value
    for key, value in entries.items() if base is not object else ():
        base.__setitem__(out, key, value)
    return out


def is_namedtuple(value: Any) -> bool:
    """Whether a value is a named tuple, of a class made for that alone."""
    return tuple_fields(type(value)) is not None


#: What is opened like a tuple; `symbolics.node.torch_arguments` adds torch.Size, which pytree opens as well.
SEQUENCES: set[type] = {list, tuple}


def _children(value: Any) -> Iterator[Any] | None:
    """The parts of a container in the order of torch.utils._pytree; None for a leaf."""
    kind = type(value)
    if kind is Slot:
        return None
    if kind is dict or kind is OrderedDict:
        return iter(value.values())
    if any(kind is sequence for sequence in SEQUENCES):  # not `in`: that asks a metaclass for its hash
        return iter(value)
    if issubclass(kind, Partial) or is_namedtuple(value):
        return tuple.__iter__(value)
    fields = _opened(value)
    return None if fields is None else iter(fields.values())


def _opened(value: Any) -> dict[str, Any] | None:
    """What a dataclass holds; None for a leaf, and one whose fields cannot be told is a leaf: `encode` says why."""
    try:
        return fields_of(value) if is_dataclass(value) else None
    except (AttributeError, TypeError):
        return None


def slots(value: Any) -> list[Slot]:
    """The slots inside a value, in order.

    Raises:
        ExportError: It nests deeper than a file may.
    """
    return list(_slots(value, 0))


def _slots(value: Any, depth: int) -> Iterator[Slot]:
    if type(value) is Slot:
        yield value
    for child in _children(value) or ():
        _check_depth(depth)
        yield from _slots(child, depth + 1)


def _check_depth(depth: int) -> None:
    # Some more than encode and decode allow: what holds the arguments is a container, too.
    if depth > MAX_DEPTH + 4:
        raise ExportError(f"an argument nests deeper than {MAX_DEPTH} levels")


def expand(value: Any) -> list[Any]:
    """The flat arguments that one argument stands for.

    A container with a slot inside is expanded to its leaves; anything else is one argument.
    """
    if type(value) is Slot or not slots(value):
        return [value]
    return [leaf for child in (_children(value) or ()) for leaf in expand_leaves(child)]


def expand_leaves(value: Any) -> list[Any]:
    """All leaves of a container."""
    children = _children(value)
    return [value] if children is None else [leaf for child in children for leaf in expand_leaves(child)]


def containers_in(value: Any) -> Iterator[Any]:
    """Every container inside a value, itself first where it is one."""
    children = _children(value)
    if children is not None:
        yield value
        for child in children:
            yield from containers_in(child)


def fill(value: Any, leaf: Callable[[Any], Any], _depth: int = 0) -> Any:
    """A copy of the value with ``leaf`` applied to every leaf; containers keep their types.

    Raises:
        ExportError: It nests deeper than a file may.
    """
    kind = type(value)
    _check_depth(_depth)

    def part(item: Any) -> Any:
        return fill(item, leaf, _depth + 1)

    if kind is Slot:  # a dataclass itself, and by far the most common leaf
        return leaf(value)
    if kind is list or kind is tuple:
        return kind(part(x) for x in value)
    if kind is dict or kind is OrderedDict:
        return kind((k, part(v)) for k, v in value.items())
    if issubclass(kind, Partial):
        return value.build([part(x) for x in value])
    if is_namedtuple(value):
        return tuple.__new__(kind, [part(x) for x in tuple.__iter__(value)])
    if (fields := _opened(value)) is not None:
        parts = {key: part(item) for key, item in fields.items()}
        same = all(parts[key] is item for key, item in fields.items())
        return value if same else build(kind, {**(attributes_of(value) or {}), **parts}, parts)
    return leaf(value)
