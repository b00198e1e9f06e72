"""Which Functions a list of classes, names and globs means (inline=, allow=)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from symbolics.node.names import qualified_name

__all__ = ["Patterns"]


class Patterns:
    """Classes, qualified names and globs over ``module:qualname``.

    ``mypkg.ops:*`` matches every Function of that module, ``mypkg.*`` every one below the package, ``Fn`` or ``*:Fn``
    the class of that name anywhere.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        items = (items,) if isinstance(items, (str, type)) else items
        self.classes: set[type] = set()
        self.globs: list[str] = []
        for item in items:
            if isinstance(item, type):
                self.classes.add(item)
            elif isinstance(item, str):
                self.globs.append(item)
            else:
                raise TypeError(f"a pattern is a class or a string, not {type(item).__name__}: {item!r}")

    def matches(self, cls: type) -> bool:
        """Whether a class is meant."""
        name = qualified_name(cls)
        dotted = name.replace(":", ".")
        plain = cls.__qualname__.rsplit(".", 1)[-1]
        return cls in self.classes or any(fnmatch.fnmatchcase(n, glob) for glob in self.globs for n in (name, dotted, plain))
