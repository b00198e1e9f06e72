"""Hypothesis strategies of everything that an argument may be."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from symbolics.node.containers import Slot


class Color(enum.Enum):
    RED = 1
    GREEN = (1, 2)
    ALIAS = 1


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2
    HIGH = 1 << 70


class IntBits(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    size: Any
    name: Any = "x"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a dict: its entries are its fields that are not None, as in transformers."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Outer:
    class Inner(NamedTuple):
        x: Any


def helper():
    """A function that can be imported."""


LOCAL = {c.__qualname__: c for c in (Color, Number, Word, Bits, IntBits, Config, Frozen, Output, Pair, Outer.Inner, helper)}


def resolver(kind: str, name: str) -> Any:
    """Resolves the names of this module and a few builtins."""
    module, _, qualname = name.partition(":")
    if module == __name__:
        return LOCAL[qualname]
    return {"builtins:len": len, "math:sqrt": __import__("math").sqrt}[name]


ints = st.one_of(
    st.integers(), st.integers(-(2**200), 2**200), st.sampled_from([0, 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 2**64, 2**8191])
)
floats = st.one_of(
    st.floats(),
    st.sampled_from(
        [0.1, 1e-300, 5e-324, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1.0, 3.4028235e38, 3.41e38]
    ),
)
texts = st.one_of(
    st.text(),
    st.text(st.characters(codec=None, categories=["Cs", "Ll"])),
    st.sampled_from(["", "\ud800", "\ud83d\ude00", "😀", "$int", "\x00", "\u2028"]),
)
numpy_dtypes = st.sampled_from([np.dtype(d) for d in ("?", "i1", "<i4", ">i4", "<i8", "u2", "<f2", "<f4", ">f8", "<c8", ">c16")])
arrays = st.tuples(numpy_dtypes, st.lists(st.integers(0, 3), max_size=3), st.binary(min_size=27 * 16, max_size=27 * 16)).map(
    lambda t: np.frombuffer(t[2], t[0])[: int(np.prod(t[1], dtype=int))].reshape(t[1]).copy()
)
numpy_scalars = st.tuples(numpy_dtypes, st.binary(min_size=16, max_size=16)).map(lambda t: np.frombuffer(t[1], t[0])[0])
small = st.integers(-(2**70), 2**70)
torch_values = st.one_of(
    st.sampled_from([torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    st.sampled_from([torch.channels_last, torch.contiguous_format, torch.preserve_format, torch.strided, torch.sparse_coo]),
    st.lists(st.integers(0, 2**62), max_size=4).map(torch.Size),
)
named = st.sampled_from(
    [
        *Color,
        Number.ONE,
        Word.A,
        *Bits,
        Bits(0),
        Bits.A | Bits.B,
        Bits.HIGH | Bits.A,
        IntBits.A | IntBits.B,
        IntBits(0),
        helper,
        len,
        __import__("math").sqrt,
    ]
)
ranges = st.builds(range, small, small, small.filter(bool))

leaves = st.one_of(
    st.none(), st.booleans(), ints, floats, texts, st.binary(), st.complex_numbers(), torch_values, named, ranges, arrays, numpy_scalars, numpy_dtypes, st.just(...)
)  # fmt: skip
hashable = st.one_of(st.none(), st.booleans(), ints, floats, texts, st.binary(), named, st.tuples(ints, texts), torch_values)


def _containers(children: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=3).map(OrderedDict),
        st.builds(Pair, children, children),
        st.builds(Outer.Inner, children),
    )


def _more(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _containers(children, hashable),
        st.builds(Config, children, children),
        st.builds(Frozen, children),
        st.builds(Output, children, children),
        st.builds(slice, children, children, children),
        st.frozensets(hashable, max_size=3),
        st.sets(hashable, max_size=3),
    )


#: Any argument without tensors.
values = st.recursive(leaves, _more, max_leaves=12)

#: Arguments with places for tensors (Slot(-1)) and sizes (Slot(-2)); `numbered` gives them their numbers.
holes = st.recursive(
    st.one_of(values, st.just(Slot(-1)), st.just(Slot(-2))),
    lambda c: st.one_of(_containers(c, hashable), st.builds(Config, c, c), st.builds(Frozen, c), st.builds(Output, c, c)),
    max_leaves=8,
)
