"""Containers of tensors: which slots they hold, their leaves, copies with other leaves. The order is torch.utils._pytree's."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from symbolics.errors import ExportError
from symbolics.node.limits import MAX_DEPTH

__all__ = [
    "SEQUENCES",
    "Partial",
    "Slot",
    "build",
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


class Partial(tuple[Any, ...]):
    """A tuple-like container that cannot be built before its slots are filled."""

    def build(self, items: list[Any]) -> Any:
        """The real container."""
        raise NotImplementedError


def is_dataclass(value: Any) -> bool:
    """Whether a value is opened as a dataclass. It may be a dict as well, as transformers' ModelOutput is."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, list, tuple, Slot))


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass holds: its fields, or its entries where it is a dict as well."""
    return dict(value) if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def build(cls: type, attributes: dict[str, Any], entries: dict[str, Any]) -> Any:
    """A dataclass with these attributes, and these entries where it is a dict as well, without its constructor.

    That could compute anything, and its result need not be what was recorded.

    Raises:
        TypeError: The class has a base that cannot be made so: int, Exception, ...
    """
    base: Any = OrderedDict if issubclass(cls, OrderedDict) else dict if issubclass(cls, dict) else object
    out = base.__new__(cls)
    for key, value in attributes.items():
        object.__setattr__(out, key, value)
    for key, value in entries.items() if base is not object else ():
        base.__setitem__(out, key, value)
    return out


def is_namedtuple(value: Any) -> bool:
    """Whether a value is a named tuple, of a class made for that alone."""
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and hasattr(type(value), "_fields")


#: What is opened like a tuple; `symbolics.node.torch_arguments` adds torch.Size, which pytree opens as well.
SEQUENCES: set[type] = {list, tuple}


def _children(value: Any) -> Iterator[Any] | None:
    """The parts of a container in the order of torch.utils._pytree; None for a leaf."""
    if type(value) in (dict, OrderedDict):
        return iter(value.values())
    if type(value) in SEQUENCES or isinstance(value, Partial) or is_namedtuple(value):
        return iter(value)
    if is_dataclass(value):
        return iter(fields_of(value).values())
    return None


def slots(value: Any) -> list[Slot]:
    """The slots inside a value, in order.

    Raises:
        ExportError: It nests deeper than a file may.
    """
    return list(_slots(value, 0))


def _slots(value: Any, depth: int) -> Iterator[Slot]:
    if isinstance(value, Slot):
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
    if isinstance(value, Slot) or not slots(value):
        return [value]
    return [leaf for child in (_children(value) or ()) for leaf in expand_leaves(child)]


def expand_leaves(value: Any) -> list[Any]:
    """All leaves of a container."""
    children = _children(value)
    return [value] if children is None else [leaf for child in children for leaf in expand_leaves(child)]


def fill(value: Any, leaf: Callable[[Any], Any], _depth: int = 0) -> Any:
    """A copy of the value with ``leaf`` applied to every leaf; containers keep their types.

    Raises:
        ExportError: It nests deeper than a file may.
    """
    kind = type(value)
    _check_depth(_depth)

    def part(item: Any) -> Any:
        return fill(item, leaf, _depth + 1)

    if kind in (list, tuple):
        return kind(part(x) for x in value)
    if kind in (dict, OrderedDict):
        return kind((k, part(v)) for k, v in value.items())
    if isinstance(value, Partial):
        return value.build([part(x) for x in value])
    if is_namedtuple(value):
        return tuple.__new__(kind, [part(x) for x in value])
    if is_dataclass(value):
        fields = fields_of(value)
        parts = {key: part(item) for key, item in fields.items()}
        same = all(parts[key] is item for key, item in fields.items())
        return value if same else build(kind, {**getattr(value, "__dict__", {}), **parts}, parts)  # a slotted class has no __dict__
    return leaf(value)
