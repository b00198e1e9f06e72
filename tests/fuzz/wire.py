"""The bytes of a protobuf message as a tree that knows the fields of ONNX: any field of any message can become anything.

Python's messages refuse what a stranger's file may hold: bytes that are no UTF-8, enum values that do not exist, a field
of another wire type, lengths that lie. Here all of them can be written.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx

__all__ = ["mutate_bytes", "mutate_fields"]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

INTS = [0, 1, 2, 3, 7, 8, 14, 22, 64, 255, 256, 65536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1]
FLOATS = [0.0, -0.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan")]
STRINGS = [
    b"", b"..", b"../secret", b"/", b"/etc/passwd", b"a/../../secret", b"\0", b"x\0y", b"\xff\xfe\xc0\x80", b"\xed\xa0\x80", b"\x1b[31m", b"a\nb",
    "\u202e\u2028".encode(), b"com.microsoft", b"ai.onnx", b"pythonop", b"PythonOp", b"PythonOpGrad", b"StopGradient", b"tests.fuzz.forbidden:Identity",
    b"tests.fuzz.functions:Bomb", b"a" * 1_000_000, b"%s%n{0}{x}", b"[bold]x[/]", b"__proto__", b"forward", b".", b"a.b", b"-1",
]  # fmt: skip


@dataclass
class Field:
    """One field of a message: its number, its wire type and what it holds, a list of fields where that is a message.

    Attributes:
        field: Its descriptor in ONNX's schema, None for one that the schema does not know.
        value: An int of varints, bytes of everything else, a list of fields for a message.
        length: Lie about the length by so many bytes.
    """

    number: int
    wire: int
    value: Any
    field: Any = None
    length: int = 0


def parse(data: bytes, descriptor: Any) -> list[Field]:
    """The fields of a message; ValueError where it is none."""
    out, at = [], 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        field = descriptor.fields_by_number.get(number)
        value: Any
        if wire == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if wire == _LENGTH:
                size, at = _read_varint(data, at)
            elif wire in (_FIXED32, _FIXED64):
                size = 4 if wire == _FIXED32 else 8
            else:
                raise ValueError(f"wire type {wire}")
            if at + size > len(data):
                raise ValueError("cut off")
            value, at = data[at : at + size], at + size
            if wire == _LENGTH and field is not None and field.message_type is not None:
                value = parse(value, field.message_type)
        out.append(Field(number, wire, value, field))
    return out


def write(fields: list[Field]) -> bytes:
    """The inverse of `parse`, lies included."""
    out = bytearray()
    for field in fields:
        out += _varint(field.number << 3 | field.wire)
        if field.wire == _VARINT:
            out += field.value if isinstance(field.value, bytes) else _varint(field.value)
        else:
            value = write(field.value) if isinstance(field.value, list) else field.value
            if field.wire == _LENGTH:
                out += _varint(max(0, len(value) + field.length))
            out += value
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("no varint")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _walk(fields: list[Field], path: str = "") -> Iterator[tuple[list[Field], Field, str]]:
    for field in fields:
        name = f"{path}.{field.field.name if field.field is not None else field.number}"
        yield fields, field, name
        if isinstance(field.value, list):
            yield from _walk(field.value, name)


# ----------------------------------------------------------------------------------------------------------- mutations


def mutate_fields(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """One field of one message becomes something else.

    Returns:
        The new bytes, and what was done.
    """
    try:
        tree = parse(data, onnx.ModelProto.DESCRIPTOR)
    except ValueError:
        return mutate_bytes(data, rng)
    places = list(_walk(tree))
    if not places:
        return mutate_bytes(data, rng)
    kinds: dict[str, list[Any]] = {}
    for place in places:  # first a kind of field, then one of them: a large model is not all metadata
        kinds.setdefault(place[2], []).append(place)
    owner, field, path = rng.choice(kinds[rng.choice(sorted(kinds))])
    done = rng.choice(["value"] * 8 + ["delete", "duplicate", "swap", "move", "number", "wire", "length", "other", "add"])
    index = next(i for i, other in enumerate(owner) if other is field)
    if done == "delete":
        del owner[index]
    elif done == "duplicate":
        owner[index:index] = [field] * rng.choice([1, 1, 2, 1000])
    elif done == "swap":
        alike = [f for _, f, _ in places if f.field is not None and field.field is not None and _kind(f) == _kind(field)]
        other = rng.choice(alike or [field])
        if not any(f is other for _, f, _ in _walk([field])) and not any(f is field for _, f, _ in _walk([other])):
            field.value, other.value = other.value, field.value
    elif done == "move":
        target = rng.choice([f.value for _, f, _ in places if isinstance(f.value, list)] or [owner])
        if not any(f is target or f.value is target for _, f, _ in _walk([field])):
            target.insert(rng.randint(0, len(target)), field)
    elif done == "number":
        field.number = rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 20, 536870911])
    elif done == "wire":
        field.wire = rng.choice([0, 1, 2, 3, 4, 5, 6, 7])
        field.value = rng.choice(INTS) if field.wire == _VARINT else b"" if field.wire in (3, 4) else rng.randbytes(8)
    elif done == "length":
        field.length = rng.choice([-1, 1, 2, 1000, 2**31, 2**40])
    elif done == "other":
        donors = [f for _, f, p in places if p == path]
        owner[index] = rng.choice(donors)
    elif done == "add":
        _add(owner, field, rng)
    else:
        field.value = _other_value(field, places, rng)
    return write(tree), f"wire {done} {path}{f' := {str(field.value)[:80]}' if done == 'value' else ''}"


def _kind(field: Field) -> Any:
    return field.field.message_type.full_name if field.field.message_type is not None else (field.wire, field.field.type)


def _add(owner: list[Field], like: Field, rng: random.Random) -> None:
    """A field that the message may have and has not."""
    descriptor = like.field.containing_type if like.field is not None else onnx.ModelProto.DESCRIPTOR
    field = rng.choice(list(descriptor.fields))
    if field.message_type is not None:
        owner.append(Field(field.number, _LENGTH, [], field))
    elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        size = "<f" if field.type == field.TYPE_FLOAT else "<d"
        owner.append(Field(field.number, _FIXED32 if size == "<f" else _FIXED64, struct.pack(size, rng.choice(FLOATS)), field))
    elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        owner.append(Field(field.number, _LENGTH, rng.choice(STRINGS), field))
    else:
        owner.append(Field(field.number, _VARINT, rng.choice(INTS), field))


def _other_value(field: Field, places: list[Any], rng: random.Random) -> Any:
    if isinstance(field.value, list):  # a message: empty, reversed, or in itself
        return rng.choice([[], field.value[::-1], [*field.value, *field.value], [Field(field.number, _LENGTH, field.value, field.field)]])
    if field.wire == _VARINT:
        values = [f.value for _, f, _ in places if f.wire == _VARINT and isinstance(f.value, int)]
        return rng.choice(
            [rng.choice(INTS), rng.choice(INTS), rng.choice(values), field.value + rng.choice([-1, 1]), b"\xff" * 9 + b"\x7f"]
        )
    if field.wire in (_FIXED32, _FIXED64):
        return struct.pack("<f" if field.wire == _FIXED32 else "<d", rng.choice(FLOATS))
    if field.field is not None and field.field.type == field.field.TYPE_STRING:
        names = [f.value for _, f, _ in places if isinstance(f.value, bytes) and f.wire == _LENGTH and f.field is not None]
        return rng.choice([rng.choice(STRINGS), rng.choice(names), field.value + b"x"])
    if field.field is not None and field.field.is_repeated and field.field.type != field.field.TYPE_BYTES:  # packed numbers
        return rng.choice([b"", b"".join(_varint(rng.choice(INTS)) for _ in range(rng.randint(1, 9))), field.value[:-1], field.value * 3])
    return rng.choice(
        [b"", field.value[:-1], field.value + b"\0", field.value * 2, rng.choice(STRINGS), rng.randbytes(len(field.value) % 4096)]
    )


def mutate_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Bytes of the file flipped, cut, doubled, or put elsewhere, whatever they mean."""
    if not data:
        return rng.randbytes(8), "bytes of nothing"
    done = rng.choice(["flip", "flip", "cut", "splice", "double", "varint", "zeros"])
    at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
    if done == "flip":
        out = bytearray(data)
        for _ in range(rng.choice([1, 1, 4, 16])):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out), "bytes flipped"
    if done == "cut":
        return rng.choice([data[:at], data[:at] + data[end:], data[at:]]), f"bytes cut {at}:{end}"
    if done == "splice":
        part = data[at : min(end, at + 200)]
        to = rng.randint(0, len(data))
        return data[:to] + part + data[to:], f"bytes {at}:{at + len(part)} put at {to}"
    if done == "double":
        return data + data, "bytes doubled"
    if done == "varint":
        return data[:at] + rng.choice([b"\xff" * 10, b"\xff\xff\xff\xff\x0f", b"\x80" * 9 + b"\x01"]) + data[at:], f"bytes varint at {at}"
    return data[:at] + bytes(len(data[at : min(end, at + 16)])) + data[min(end, at + 16) :], f"bytes zeroed at {at}"
