"""The initializers of two models, side by side: which belong together, and how far apart their values are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.files.inspect import tensor_text
from symbolics.node.metadata import read_state

__all__ = ["WeightChange", "compare_tensors", "pair_weights"]

_CHUNK = 1 << 20  # elements that are compared at a time: float64 copies of all of a large weight would be too much


@dataclass
class WeightChange:
    """A weight that both files have, and whose values, type or shape differ.

    Attributes:
        name: In the first file.
        type_a, type_b: ``float32[2, 3]`` in each.
        max_abs: The largest absolute difference of two elements, inf where one alone is no finite number; None: they have no numbers, or not one shape.
        max_rel: The largest difference in units of the first file's element; inf where that is zero.
        equal: How many elements have the same bits.
        elements: Of how many.
    """

    name: str
    type_a: str
    type_b: str
    max_abs: float | None = None
    max_rel: float | None = None
    equal: int | None = None
    elements: int | None = None


def pair_weights(a: ir.Model, b: ir.Model) -> dict[ir.Value, ir.Value]:
    """Which initializer of the main graph of ``b`` is which of ``a``: by state_dict key, then by name, then by content."""
    left, right = a.graph.initializers, b.graph.initializers
    pairs: dict[ir.Value, ir.Value] = {}
    taken = set[ir.Value]()

    def pair(one: ir.Value | None, other: ir.Value | None) -> None:
        if one is not None and other is not None and one not in pairs and other not in taken:
            pairs[one] = other
            taken.add(other)

    keys = read_state(b.metadata_props) or {}
    for key, entry in (read_state(a.metadata_props) or {}).items():
        if key in keys:
            pair(left.get(entry.initializer), right.get(keys[key].initializer))
    for name in left:
        pair(left[name], right.get(name))
    rest: dict[Any, list[ir.Value]] = {}
    for value in right.values():
        if value not in taken:
            rest.setdefault(_content(value), []).append(value)
    for value in left.values() if rest else ():
        if value not in pairs and (same := rest.get(_content(value))):
            pair(value, same.pop(0))
    return pairs


def _content(value: ir.Value) -> Any:
    """Equal for two initializers of one type, one shape and the same bits."""
    tensor = value.const_value
    if tensor is None:
        return id(value)
    return tensor.dtype, tuple(tensor.shape.numpy()), hashlib.sha256(_bytes(tensor)).digest()


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    if tensor.dtype is ir.DataType.STRING:
        return b"".join(len(text).to_bytes(8, "little") + text for text in map(_text, tensor.numpy().reshape(-1)))
    return tensor.tobytes()


def _text(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode("utf-8", "surrogatepass")


def compare_tensors(name: str, a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> WeightChange | None:
    """How two tensors differ, None where they are of one type and one shape and have the same bits."""
    found = WeightChange(name, tensor_text(a), tensor_text(b))
    if a is None or b is None or found.type_a.partition("[")[2] != found.type_b.partition("[")[2]:
        return None if a is b else found
    left, right = a.numpy().reshape(-1), b.numpy().reshape(-1)
    found.elements = int(left.size)
    numbers = ir.DataType.STRING not in (a.dtype, b.dtype)
    found.max_abs = found.max_rel = 0.0 if numbers else None
    found.equal = 0
    for x, y in _chunks(left, right):
        found.equal += _same_bits(x, y)
        if numbers:
            absolute, relative = _distances(x, y)
            found.max_abs, found.max_rel = max(found.max_abs or 0.0, absolute), max(found.max_rel or 0.0, relative)
    return None if found.equal == found.elements and found.type_a == found.type_b else found


def _chunks(left: np.ndarray, right: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, left.size, _CHUNK):
        yield left[start : start + _CHUNK], right[start : start + _CHUNK]


def _same_bits(x: np.ndarray, y: np.ndarray) -> int:
    if x.dtype != y.dtype:
        return 0
    if x.dtype.kind in "OSU":
        return sum(map(_equal_texts, x, y))
    width = x.dtype.itemsize
    bits = [np.ascontiguousarray(each).view(np.uint8).reshape(-1, width) for each in (x, y)]
    return int((bits[0] == bits[1]).all(axis=1).sum())


def _equal_texts(x: Any, y: Any) -> bool:
    return _text(x) == _text(y)


def _distances(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference; NaN beside NaN, and an infinity beside the same, are no difference."""
    kind = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    left, right = x.astype(kind), y.astype(kind)
    with np.errstate(all="ignore"):
        distance = np.abs(left - right)
        distance[(left == right) | (np.isnan(left) & np.isnan(right))] = 0
        distance[np.isnan(distance)] = np.inf
        relative = distance / np.abs(left)
        relative[distance == 0] = 0
        relative[np.isnan(relative)] = np.inf
    return float(distance.max(initial=0.0)), float(relative.max(initial=0.0))
