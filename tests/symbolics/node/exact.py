"""Deep, type-exact equality, written apart from the library: what "without loss" means."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

__all__ = ["same"]


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and of equal parts, bit by bit; any nan equals any nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b) or (a != a and b != b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.dtype):
        return a == b and a.str == b.str
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        attributes = dataclasses.is_dataclass(a) and not all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
        return not attributes and len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (set, frozenset)):
        rest = list(b)
        for x in a:
            match = next((i for i, y in enumerate(rest) if same(x, y)), None)
            if match is None:
                return False
            del rest[match]
        return not rest
    if isinstance(a, (slice, range)):
        return all(same(getattr(a, part), getattr(b, part)) for part in ("start", "stop", "step"))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)
