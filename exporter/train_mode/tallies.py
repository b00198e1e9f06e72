"""Numbers that tell whether anything but their own next value depends on them: what only counts is no state.

`self.calls += 1` reads a number, and no result changes by it. For a run, a `Tally` takes the number's place. What is computed of it with other plain
numbers is a Tally, too; any other use (a comparison, a product with a tensor, a place in a list, text) is a read, and gives the plain number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

__all__ = ["NUMBERS", "Tally"]

NUMBERS = (bool, int, float, complex)

_COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_READ = (
    "bool", "int", "float", "complex", "index", "eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format", "round", "trunc", "floor", "ceil",
    "divmod", "rdivmod", "lshift", "rshift", "and", "or", "xor", "rlshift", "rrshift", "rand", "ror", "rxor", "invert", "reduce_ex",
)  # fmt: skip


class Tally:
    """A number in whose place it stands, and the names of those that it was computed of.

    It is no int, so that C code cannot take its value unseen: that fails, or asks for `__index__`.

    Args:
        value: The number.
        names: Of which numbers of the model it was computed.
        read: Is told the names where the value matters.
        alive: Gets a reference to each.
    """

    def __init__(self, value: Any, names: frozenset[str], read: Callable[[Iterable[str]], Any], alive: list[ref[Tally]]) -> None:
        self._value, self._names, self._read, self._alive = value, names, read, alive
        alive.append(ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(self.calls, int) is as true as it was
        return type(self._value)

    def plain(self) -> Any:
        """The number; no read."""
        return self._value

    def asked(self) -> Any:
        """The number, for whom it matters."""
        self._read(self._names)
        return self._value

    def handed_on(self, name: str) -> None:
        """Note that a number of the model has this value now: a read of all others."""
        self._read(self._names - {name})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asked(), name)

    def __neg__(self) -> Tally:
        return self._made(-self._value)

    def __pos__(self) -> Tally:
        return self

    def __abs__(self) -> Tally:
        return self._made(abs(self._value))

    def _made(self, value: Any, names: frozenset[str] = frozenset()) -> Tally:
        return Tally(value, self._names | names, self._read, self._alive)


def _computed(name: str, swapped: bool) -> Callable[[Tally, Any], Any]:
    compute = getattr(operator, name)

    def call(self: Tally, other: Any) -> Any:
        is_tally = type(other) is Tally
        if not is_tally and type(other) not in NUMBERS:
            return compute(other, self.asked()) if swapped else compute(self.asked(), other)
        plain = other._value if is_tally else other
        return self._made(
            compute(plain, self._value) if swapped else compute(self._value, plain), other._names if is_tally else frozenset()
        )

    return call


def _asked(name: str) -> Callable[..., Any]:
    def call(self: Tally, *others: Any) -> Any:
        value = self.asked()
        plain = [other.asked() if type(other) is Tally else other for other in others]
        if name == "__bool__":
            return bool(value)
        return getattr(value, name)(*plain)

    return call


for _name in _COMPUTED:
    setattr(Tally, f"__{_name}__", _computed(_name, swapped=False))
    setattr(Tally, f"__r{_name}__", _computed(_name, swapped=True))
for _name in _READ:
    setattr(Tally, f"__{_name}__", _asked(f"__{_name}__"))
