"""The open sizes of a call that is traced: which symbols its fake tensors have, and how messages name these."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch

from symbolics import torch_private as private
from symbolics.capture.binding import TracedSize
from symbolics.portable.kernels import Untraceable

__all__ = ["Sizes", "are_related"]

#: An example of a size is a prime times the first of these with which no size that is computed from it is 0 or 1.
_FACTORS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 120, 128, 240, 256, 512, 840, 1024)


def are_related(dims: Sequence[Sequence[Any]]) -> bool:
    """Whether one of the sizes is computed from others: n // 4, n + m."""
    return any(not isinstance(dim, int) and not dim.is_Symbol for each in dims for dim in each)


class Sizes:
    """Sizes of fake tensors. A trace takes each for 2 or more, and one that is 0 or 1 in the example for a number.

    One that is computed from others is first a symbol of its own: what a trace finds without a condition on it is so whatever it is computed from.
    Only where that fails (code adds x of n rows, cut in half, to y of n // 2), is it the expression: conditions on those are harder to tell.

    Attributes:
        small: Those that may be 0 or 1 all the same, in torch's symbols: arguments that are sizes of none of the tensors (how much to pad).
    """

    def __init__(self, env: Any, dims: Sequence[Sequence[Any]], kinds: Sequence[str], related: bool = False) -> None:
        self.small = set[Any]()
        self._env, self._dims, self._kinds = env, dims, kinds
        self._of_tensors = {dim for each, kind in zip(dims, kinds, strict=True) if kind != "size" for dim in each}
        self._made: dict[Any, torch.SymInt] = {}
        self._examples = _examples(self._of_tensors) if related else None

    def of(self, dim: Any) -> int | torch.SymInt:
        """A size, with the symbol that equal expressions have. As an object it is one of its own: by these a tracer knows which axis code has read."""
        if isinstance(dim, int):
            return dim
        return private.same_size(self._symbol(dim))

    def examples(self) -> list[list[int]]:
        """The sizes of each input, with its example in the place of each symbol."""
        return [[dim if isinstance(dim, int) else self._symbol(dim).node.hint for dim in each] for each in self._dims]

    def _symbol(self, dim: Any) -> torch.SymInt:
        if dim not in self._made:
            self._made[dim] = self._make(dim)
        return self._made[dim]

    def _make(self, dim: Any) -> torch.SymInt:
        small = dim not in self._of_tensors and (isinstance(dim, TracedSize) or not dim.is_Symbol)
        if self._examples is not None and not dim.is_Symbol:
            expression = dim.xreplace({symbol: self._symbol(symbol).node.expr for symbol in dim.free_symbols})
            example = int(dim.xreplace({symbol: sympy.Integer(self._example(symbol)) for symbol in dim.free_symbols}))
            made = private.computed_size(self._env, expression, example)
        else:
            lowest = 2 if not small else 0 if private.never_negative(dim) else None
            made = private.symbolic_size(self._env, self._example(dim), f"size{len(self._made)}", lowest)
        if small:
            self.small.add(made.node.expr)
        return made

    def _example(self, dim: Any) -> int:
        """A number that no other size has."""
        known = {} if self._examples is None else self._examples
        return known[dim] if dim in known else sympy.prime(4 + len(self._made))

    def said(self, text: str) -> str:
        """A text with the user's names of sizes, or where they are, in the place of torch's symbols."""
        names = {str(made.node.expr): self._name(dim) for dim, made in self._made.items() if made.node.expr.is_Symbol}
        return re.sub(r"\b[a-z]\d+\b", lambda found: names.get(found[0], found[0]), text)

    def places(self, condition: str) -> str:
        """The axes that a condition is about; where it names none, the condition itself."""
        words = set(re.findall(r"\w+", condition))
        met = [dim for dim, made in self._made.items() if words & {str(symbol) for symbol in made.node.expr.free_symbols}]
        found = [where for dim in met for where in self._where(dim)]
        return ", ".join(found[:3]) or self.said(condition)

    def _name(self, dim: Any) -> str:
        """What the user calls a size; one that he has given no name by where it is."""
        unnamed = any(re.fullmatch(r"[a-z]\d+", symbol.name) for symbol in dim.free_symbols)
        return next(iter(self._where(dim)), str(dim)) if unnamed else str(dim)

    def _where(self, dim: Any) -> list[str]:
        """The axes with a size, the first ones first."""
        found = []
        for index, (dims, kind) in enumerate(zip(self._dims, self._kinds, strict=True)):
            found += [
                f"the size that is input {index}" if kind == "size" else f"axis {axis} of tensor input {index}"
                for axis, one in enumerate(dims)
                if one == dim
            ]
        return found


def _examples(dims: Collection[Any]) -> dict[Any, int]:
    """A number for each symbol, with which the sizes are different ones from 2 on.

    Raises:
        Untraceable: There are none.
    """
    computed = [dim for dim in dims if not isinstance(dim, int)]
    symbols = sorted({symbol for dim in computed for symbol in dim.free_symbols}, key=str)
    best: dict[Any, int] | None = None
    for factors in itertools.islice(itertools.product(_FACTORS, repeat=len(symbols)), 2000):
        numbers = {symbol: sympy.prime(4 + i) * factor for i, (symbol, factor) in enumerate(zip(symbols, factors, strict=True))}
        sizes = [int(dim.xreplace({symbol: sympy.Integer(number) for symbol, number in numbers.items()})) for dim in computed]
        if min(sizes) > 1 and len(set(sizes)) == len(sizes):
            return numbers
        best = numbers if best is None and min(sizes) > 1 else best
    if best is None:
        raise Untraceable(f"of the sizes of its inputs ({', '.join(map(str, computed[:4]))}) one is 0 or 1 at all sizes that were tried")
    return best
