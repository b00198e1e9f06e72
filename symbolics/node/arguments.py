"""Portable, lossless encoding of Python arguments as JSON, and back.

Every value becomes plain JSON, or an object with one key that starts with ``$`` and names its type
(docs/format.md has the table). Types of torch are in `symbolics.node.torch_arguments`, which adds them to the same
table: a reader without torch can still show what a file says.

Decoding is for untrusted text: sizes are limited, and a name becomes a Python object only through the caller's
resolver.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import math
import re
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from symbolics.errors import ExportError, Faq, FormatError, PythonopError
from symbolics.node.changed_classes import check_count, member_of, other_fields
from symbolics.node.classes import find, flag_of, is_filled, look, name_to_call, own_name, tuple_fields, value_fields
from symbolics.node.containers import ModulePlace, Partial, Slot, build, fields_of, is_dataclass, is_namedtuple, slots
from symbolics.node.limits import MAX_BYTES, MAX_DEPTH, MAX_EQUAL_HASHES, MAX_INT_BITS, MAX_ITEMS
from symbolics.node.names import qualified_name
from symbolics.node.records import SAFE_INT, parse
from symbolics.text import clean, said

__all__ = [
    "Codec", "Described", "Resolver", "Unresolved", "add_codec", "decode", "encode", "has_codec", "is_importable", "loads", "unresolved",
]  # fmt: skip


@dataclass(frozen=True)
class Unresolved:
    """What a reader without a resolver shows in place of a named Python object."""

    text: str

    def __repr__(self) -> str:
        return f"<{self.text}>"


class Described(Partial):
    """A dataclass or named tuple of a file whose class nobody resolved: its name and its items.

    Attributes:
        name: ``module:qualname`` of its class.
        fields: The names of its items, None for a named tuple.
    """

    name: str
    fields: tuple[str, ...] | None

    def __new__(cls, items: Any, name: str = "", fields: tuple[str, ...] | None = None) -> Described:
        """Args: the items, the name of the class, the names of the items."""
        out = super().__new__(cls, items)
        out.name, out.fields = name, fields
        return out

    def build(self, items: list[Any]) -> Any:
        """What stands in for it: a dict of its fields, or a tuple."""
        return tuple(items) if self.fields is None else dict(zip(self.fields, items, strict=True))

    def __repr__(self) -> str:
        names = [f"{field}=" for field in self.fields] if self.fields is not None else [""] * len(self)
        return f"{self.name}({', '.join(f'{name}{item!r}' for name, item in zip(names, self, strict=True))})"


#: ``resolver(kind, name)`` returns the object that a file names; kind is "enum", "dataclass", "namedtuple",
#: "callable" or "object". It raises TrustError for what the caller did not allow.
Resolver = Callable[[str, str], Any]


def unresolved(kind: str, name: str) -> Any:
    """The resolver that imports nothing: names stay text."""
    return Unresolved(f"{kind} {name}")


def is_importable(obj: Any) -> bool:
    """Whether the module and qualified name of ``obj`` lead back to it, by the way that a reader goes."""
    module, qualname = own_name(obj)
    try:
        found = find(vars(sys.modules[module or ""]), qualname or "")
    except (KeyError, TypeError):
        return False
    return found is obj or (type(obj) is type(found) is types.MethodType and bool(found == obj))  # each look makes a new bound method


# ---------------------------------------------------------------------------------------------- the table of types


@dataclass(frozen=True)
class Codec:
    """How the values of one type are written and read.

    Attributes:
        tag: The ``$name`` of the type.
        matches: Whether a value is of this type, exactly.
        write: value, encoder of children -> JSON payload.
        read: JSON payload, decoder of children, resolver -> value. It may raise any Exception for a malformed payload.
    """

    tag: str
    matches: Callable[[Any], bool]
    write: Callable[[Any, Callable[[Any], Any]], Any]
    read: Callable[[Any, Callable[[Any], Any], Resolver], Any]


_CODECS: list[Codec] = []
_BY_TAG: dict[str, Codec] = {}


def add_codec(codec: Codec) -> None:
    """Add a type to the table; the same tag twice keeps the later one."""
    if codec.tag in _BY_TAG:
        _CODECS.remove(_BY_TAG[codec.tag])
    _CODECS.append(codec)
    _BY_TAG[codec.tag] = codec


def has_codec(value: Any) -> bool:
    """Whether `encode` can write the value itself (its children are another question)."""
    return _is_plain(value) or type(value) is list or any(codec.matches(value) for codec in _CODECS)


def _exactly(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _typed(payload: Any, kind: type) -> Any:
    if type(payload) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(payload).__name__}")
    return payload


def _pair(payload: Any) -> tuple[Any, Any]:
    first, second = _typed(payload, list)
    return first, second


def _read_int(payload: Any, *_: Any) -> int:
    text = _typed(payload, str)
    if len(text) > MAX_INT_BITS // 4 + 3:
        raise ValueError(f"an int of more than {MAX_INT_BITS} bits")
    if not re.fullmatch("-?0x[0-9a-fA-F]+", text):  # int() takes spaces, underscores and the digits of every script
        raise ValueError("an int is written as 0x and hexadecimal digits")
    return int(text, 16)


def _read_float(payload: Any, *_: Any) -> float:
    if _typed(payload, str) not in ("nan", "inf", "-inf"):
        raise ValueError("only nan, inf and -inf are written so")
    return float(payload)  # a new nan each time: two nans are two keys of a dict


def _write_float(value: float, _: Any) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _read_items(payload: Any, decode_child: Callable[[Any], Any], _: Resolver) -> list[Any]:
    return [decode_child(item) for item in _typed(payload, list)]


def _read_entries(payload: Any, decode_child: Callable[[Any], Any], _: Resolver) -> list[tuple[Any, Any]]:
    return [(decode_child(key), decode_child(value)) for key, value in map(_pair, _typed(payload, list))]


def _read_hashed(kind: Callable[[Any], Any], read: Callable[..., list[Any]], keys: Callable[[Any], Iterable[Any]]) -> Callable[..., Any]:
    """The reader of a dict or set: no key stands twice, and they are not made to collide."""

    def read_hashed(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> Any:
        items = read(payload, decode_child, resolver)
        _check_hashes(keys(items))
        out = kind(items)
        if len(out) != len(items):
            raise ValueError("it has a key twice")
        return out

    return read_hashed


def _check_hashes(keys: Iterable[Any]) -> None:
    """Raises ValueError for keys of one hash, each of which is compared with all others: 60,000 of them take minutes."""
    counts = Counter(map(hash, keys))
    if counts and max(counts.values()) > MAX_EQUAL_HASHES:
        raise ValueError(f"more than {MAX_EQUAL_HASHES} of its keys have the same hash")


def _write_entries(value: dict[Any, Any], encode_child: Callable[[Any], Any]) -> list[list[Any]]:
    _check_hashes(value)
    return [[encode_child(k), encode_child(v)] for k, v in value.items()]


def _write_set(value: Any, encode_child: Callable[[Any], Any]) -> list[Any]:
    # Sorted by their text: hash order changes from process to process, files must not.
    _check_hashes(value)
    return sorted((encode_child(item) for item in value), key=lambda item: json.dumps(item))


def _write_enum(value: enum.Enum, encode_child: Callable[[Any], Any]) -> list[Any]:
    cls = type(value)
    if look(cls, "_member_map_").get(value.name) is value:
        return [qualified_name(cls), value.name]
    # A combination of flags has no name of its own (or one like "A|B"): its number stands for it.
    if flag_of(cls, value.value) is not value:
        raise TypeError("it is no member of its class")
    return [qualified_name(cls), encode_child(value.value)]


def _read_enum(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> Any:
    name, member = _pair(payload)
    member = decode_child(member)
    cls = resolver("enum", _typed(name, str))
    if type(cls) is Unresolved:
        return Unresolved(f"{name}.{member}")
    if type(member) is str:
        return member_of(cls, name, member)
    return flag_of(cls, _typed(member, int))


def _write_dataclass(value: Any, encode_child: Callable[[Any], Any]) -> list[Any]:
    build(type(value), {}, {})  # TypeError for what a reader could not build
    fields = fields_of(value)
    extra = sorted({*fields, *getattr(value, "__dict__", ())} - {*(value_fields(type(value)) or ())})
    if extra:
        raise ExportError(
            f"an object of type {qualified_name(type(value))} carries {', '.join(extra)} outside its dataclass fields: make them fields, or register the object"
        )
    return [qualified_name(type(value)), {key: encode_child(item) for key, item in fields.items()}]


def _read_dataclass(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver, mapping: bool = False) -> Any:
    name, fields = _pair(payload)
    values = {key: decode_child(value) for key, value in _typed(fields, dict).items()}
    cls = resolver("dataclass", _typed(name, str))
    if type(cls) is Unresolved:
        return Described(values.values(), name, tuple(values))
    # A dataclass that is a dict has no entry for a field that is None.
    fields = {field: values.get(field) for field in value_fields(cls) or ()}
    if issubclass(cls, dict) is not mapping or not values.keys() <= fields.keys() or not (mapping or len(values) == len(fields)):
        raise other_fields(name, {**fields, **values} if mapping else values, fields)
    return build(cls, fields, values)


def _read_namedtuple(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> Any:
    name, items = _pair(payload)
    values = _read_items(items, decode_child, resolver)
    cls = resolver("namedtuple", _typed(name, str))
    if type(cls) is Unresolved:
        return Described(values, name)
    check_count(name, values, tuple_fields(cls) or ())
    return tuple.__new__(cls, values)


def _read_slice(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> slice:
    start, stop, step = _read_items(payload, decode_child, resolver)
    return slice(start, stop, step)


def _read_range(payload: Any, decode_child: Callable[[Any], Any], resolver: Resolver) -> range:
    start, stop, step = (_typed(item, int) for item in _read_items(payload, decode_child, resolver))
    return range(start, stop, step)


def _read_ellipsis(payload: Any, *_: Any) -> Any:
    if payload is not True:
        raise ValueError("it is written as true")
    return ...


def _read_bytes(payload: Any, *_: Any) -> bytes:
    return base64.b64decode(_typed(payload, str), validate=True)


def _read_index(payload: Any, *_: Any) -> int:
    if _typed(payload, int) < 0:
        raise ValueError("the number of a tensor is 0 or more: the file is damaged")
    return payload


def _numpy_dtype(name: Any) -> np.dtype:
    # A pattern first: numpy reads a whole language of dtypes.
    if not re.fullmatch(r"[<>|][biufc][0-9]{1,2}", _typed(name, str)):
        raise TypeError(f"numpy dtype {name[:40]!r} is not a number type")
    return np.dtype(name)


def _write_array(value: Any, _: Any) -> list[Any]:
    array = np.asarray(value)
    _numpy_dtype(array.dtype.str)
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _read_array(payload: Any, *_: Any) -> np.ndarray:
    dtype, shape, data = _typed(payload, list)
    array = np.frombuffer(_read_bytes(data), dtype=_numpy_dtype(dtype))
    dims = [_typed(n, int) for n in _typed(shape, list)]
    if any(n < 0 for n in dims):  # reshape would work one of them out
        raise ValueError("a dimension is 0 or more")
    return array.reshape(dims).copy()


def _read_scalar(payload: Any, *_: Any) -> Any:
    array = _read_array(payload)
    if array.shape != ():
        raise ValueError("a scalar has no dimensions")
    return array[()]


def _read_named(kind: str) -> Callable[[Any, Any, Resolver], Any]:
    return lambda payload, _, resolver: resolver(kind, _typed(payload, str))


def _is_callable(value: Any) -> bool:
    return callable(value) and hasattr(value, "__qualname__") and is_importable(value)


def _has_pair(value: Any) -> bool:
    """Whether a str holds two surrogates that JSON would join to one character."""
    return type(value) is str and _PAIR.search(value) is not None


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def _write_str(value: str, _: Any) -> str:
    return base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()


def _read_str(payload: Any, *_: Any) -> str:
    return _read_bytes(payload).decode("utf-8", "surrogatepass")


def _first(entries: list[tuple[Any, Any]]) -> Iterable[Any]:
    return (key for key, _ in entries)


_TABLE: list[tuple[str, Any, Any, Any]] = [
    # tag, matches, write, read
    ("$tensor", lambda v: isinstance(v, Slot) and v.kind == "tensor", lambda v, _: v.index, lambda p, *_: Slot(_read_index(p))),
    ("$size", lambda v: isinstance(v, Slot) and v.kind == "size", lambda v, _: v.index, lambda p, *_: Slot(_read_index(p), "size")),
    ("$int", _exactly(int), lambda v, _: hex(v), _read_int),
    ("$float", _exactly(float), _write_float, _read_float),
    ("$complex", _exactly(complex), lambda v, e: [e(v.real), e(v.imag)], lambda p, d, _: complex(*(_typed(d(x), float) for x in _pair(p)))),
    ("$str", _has_pair, _write_str, _read_str),
    ("$bytes", _exactly(bytes), lambda v, _: base64.b64encode(v).decode(), _read_bytes),
    ("$tuple", _exactly(tuple), lambda v, e: [e(x) for x in v], lambda p, d, r: tuple(_read_items(p, d, r))),
    ("$dict", _exactly(dict), _write_entries, _read_hashed(dict, _read_entries, _first)),
    ("$ordereddict", _exactly(OrderedDict), _write_entries, _read_hashed(OrderedDict, _read_entries, _first)),
    ("$set", _exactly(set), _write_set, _read_hashed(set, _read_items, iter)),
    ("$frozenset", _exactly(frozenset), _write_set, _read_hashed(frozenset, _read_items, iter)),
    ("$slice", _exactly(slice), lambda v, e: [e(v.start), e(v.stop), e(v.step)], _read_slice),
    ("$range", _exactly(range), lambda v, e: [e(v.start), e(v.stop), e(v.step)], _read_range),
    ("$ellipsis", lambda v: v is Ellipsis, lambda v, _: True, _read_ellipsis),
    ("$numpy", lambda v: isinstance(v, np.generic), _write_array, _read_scalar),
    ("$ndarray", lambda v: type(v) is np.ndarray, _write_array, _read_array),
    ("$numpydtype", lambda v: isinstance(v, np.dtype), lambda v, _: _numpy_dtype(v.str).str, lambda p, *_: _numpy_dtype(p)),
    ("$enum", lambda v: isinstance(v, enum.Enum), _write_enum, _read_enum),
    ("$namedtuple", is_namedtuple, lambda v, e: [qualified_name(type(v)), [e(x) for x in v]], _read_namedtuple),
    ("$mapping", lambda v: isinstance(v, dict) and is_dataclass(v), _write_dataclass, functools.partial(_read_dataclass, mapping=True)),
    ("$dataclass", is_dataclass, _write_dataclass, _read_dataclass),
    ("$callable", _is_callable, lambda v, _: name_to_call(v), _read_named("callable")),
    ("$module", _exactly(ModulePlace), lambda v, _: v.index, lambda p, *_: ModulePlace(_read_index(p))),
    ("$object", lambda v: False, lambda v, _: None, _read_named("object")),  # written by encode(names=...)
]
for _row in _TABLE:
    add_codec(Codec(*_row))

# Not in the table: what JSON itself can say.


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return (
        value is None
        or kind is bool
        or (kind is str and not _has_pair(value))
        or (kind is int and abs(value) <= SAFE_INT)
        or (kind is float and math.isfinite(value))
    )


# ----------------------------------------------------------------------------------------------------- the recursion


class _Budget:
    """Counts what one call may hold."""

    def __init__(self, error: type[Exception]) -> None:
        self.items = 0
        self.slots = 0
        self.error = error

    def spend(self, depth: int) -> None:
        self.items += 1
        if self.items > MAX_ITEMS:
            raise self.error(f"a call holds more than {MAX_ITEMS} values: pass them as one tensor")
        if depth > MAX_DEPTH:
            raise self.error(f"a call nests deeper than {MAX_DEPTH} levels")


def encode(value: Any, names: Callable[[Any], str | None] = lambda _: None) -> Any:
    """JSON for one value.

    Args:
        value: The argument; its tensors are already `Slot`s.
        names: The name under which an object is registered, or None.

    Raises:
        ExportError: The value has no portable form; the message names its type and the remedy.
    """
    budget = _Budget(ExportError)

    def visit(item: Any, depth: int) -> Any:
        budget.spend(depth)
        name = None if _is_plain(item) else names(item)
        if name is not None and not (is_filled(item) and name == qualified_name(item)):
            return {"$object": name}
        if _is_plain(item):
            return item
        if type(item) is list:
            return [visit(x, depth + 1) for x in item]
        if type(item) is int and item.bit_length() > MAX_INT_BITS:
            raise ExportError(f"an int of {item.bit_length()} bits is more than the {MAX_INT_BITS} that a file may hold")
        for codec in _CODECS:
            if codec.matches(item):
                try:
                    return {codec.tag: codec.write(item, lambda x: visit(x, depth + 1))}
                except (TypeError, ValueError, AttributeError, OverflowError) as error:
                    raise ExportError(
                        f"an object of type {qualified_name(type(item))} cannot be written as {codec.tag}: {clean(str(error))}"
                    ) from error
        raise ExportError(
            f"an object of type {qualified_name(type(item))} has no portable form: give it a name with "
            "exporter.register(obj, name) here and in the process that runs the file, or name the Function in inline=",
            faq=Faq.NO_PORTABLE_FORM,
        )

    return visit(value, 0)


def decode(data: Any, resolver: Resolver = unresolved) -> Any:
    """The value of one piece of JSON (as `loads` returns it).

    Raises:
        FormatError: The data is not what `encode` writes, or passes a limit.
        TrustError: From the resolver.
    """
    budget = _Budget(FormatError)

    def visit(item: Any, depth: int) -> Any:
        budget.spend(depth)
        if item is None or isinstance(item, (bool, str, int, float)):
            return item
        if isinstance(item, list):
            return [visit(x, depth + 1) for x in item]
        if not isinstance(item, dict) or len(item) != 1:
            raise FormatError.damaged("a call", "it holds an object that is not of the form {$type: value}")
        ((tag, payload),) = item.items()
        codec = _BY_TAG.get(tag)
        if codec is None:
            raise FormatError(
                f"a call holds a value of the unknown type {tag[:40]!r}: it needs a newer pythonop, or `import symbolics.node.torch_arguments`"
            )
        budget.slots += tag in ("$tensor", "$size")
        try:
            return codec.read(payload, lambda x: visit(x, depth + 1), resolver)
        except PythonopError:
            raise
        except Exception as error:  # a key's own __hash__ may raise anything
            raise FormatError(f"a {tag} value in a call is malformed: {clean(said(error))}") from error

    value = visit(data, 0)
    if budget.slots != len(slots(value)):
        raise FormatError.damaged("a call", "a tensor stands where none can be (a set, a slice, a key of a dict)")
    return value


def loads(text: str) -> Any:
    """Parse untrusted JSON within the limits.

    Raises:
        FormatError: It is no text, too long, nested too deeply, or no JSON.
    """
    if not isinstance(text, str):
        raise FormatError.damaged("a call", "it is not of type STRING")
    if len(text) > MAX_BYTES:
        raise FormatError(f"a call of {len(text)} bytes is longer than the {MAX_BYTES} that a file may hold")

    return parse(text, "a call")
