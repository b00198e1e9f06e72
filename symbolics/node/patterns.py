"""Which classes a list of classes and patterns means: the one language of ``inline=``, ``portable=``, ``opaque=``, ``functions=`` and ``allow=``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import NoneType
from typing import Any, Literal

from symbolics.errors import ArgumentError
from symbolics.node.names import is_operator, qualified_name

__all__ = ["Patterns", "listed", "pattern_of"]

#: What a list takes beside patterns, and what an entry of it may mean.
_KINDS = {
    "allow": "classes, functions",
    "opaque": "operators, modules, classes of them, functions",
    "functions": "modules, classes of them",
}
_MEANT = {"opaque": "operators, modules and functions", "functions": "modules"}


class Patterns:
    """Classes (for ``allow=`` functions, for ``opaque=`` and ``functions=`` also modules, for ``opaque=`` functions) and patterns over ``module:qualname``, with shell wildcards that also cross dots.

    - ``mypkg.ops:Fn``: the part before the colon is matched with the module, the part behind it with the qualified name,
      as in ``mypkg.ops:*`` and ``mypkg.*:Fast*``.
    - ``mypkg.ops``: everything in that module. ``mypkg.*``: everything in ``mypkg`` and in all modules below it.
    - ``mypkg.ops.Fn``: also what has this whole name, with a dot for the colon; without wildcards only.
    - ``Fn`` (no colon, no dot): for all but ``allow=`` also every class of that name. For ``allow=`` it is a module and nothing
      else, and the name of the package, before the first dot or colon, has no wildcard: a file must not choose the package that its code comes
      from, and ``mypkg*`` means ``mypkg_of_a_stranger`` as well.

    - ``mylib::op``: an operator of torch.library, all its overloads; ``mylib::op.overload``, ``mylib::*``. The namespace stands without
      wildcards, and nothing else means an operator. For ``allow=`` those of torch itself (``aten::``, ``prims::``) are written out, too.

    Attributes:
        items: The classes, functions and patterns of the list.
    """

    def __init__(self, items: Any = (), option: Literal["inline", "portable", "opaque", "functions", "allow"] = "inline") -> None:
        """Args:
            items: Classes, functions and patterns; one alone may stand without a list.
            option: Whose list it is.

        Raises:
            TypeError: An item is neither a class (for ``allow=`` or function, for ``opaque=`` and ``functions=`` or anything callable) nor a str.
            ArgumentError: A pattern lacks one of its parts; or in ``allow=`` the package's name has a wildcard, or torch's own operators are meant by one.
        """
        self.option, self.items = option, [pattern_of(item) for item in listed(items)]
        self._idle, self._met = list(self.items), dict[str, None]()
        for item in self.items:
            if not isinstance(item, str):
                function = callable(item) and (option in ("opaque", "functions") or (option == "allow" and hasattr(item, "__qualname__")))
                if not (isinstance(item, type) or function):
                    kinds = _KINDS.get(option, "Function classes")
                    raise TypeError(f"{option}= takes {kinds} and patterns like 'mypkg.ops:*', not {type(item).__name__}")
                continue
            module, colon, qualname = item.partition("::") if is_operator(item) else item.partition(":")
            if is_operator(item) and set("*?[") & set(module):
                raise ArgumentError(f"{option}={item!r}: the namespace of operators is written out, as in 'mylib::*'")
            if option == "allow" and is_operator(item) and module in ("aten", "prims") and set("*?[") & set(qualname):
                raise ArgumentError(f"allow={item!r}: torch's own operators are allowed one by one, as in 'aten::unique_consecutive'")
            if option == "allow" and not is_operator(item) and set("*?[") & set(re.split("[.:]", item, maxsplit=1)[0]):
                raise ArgumentError(
                    f"allow={item!r}: a wildcard in a package's name means other packages, too: write the package's name in full: 'mypkg.*' or 'mypkg:*'"
                )
            if not module or (colon and not qualname):
                start = "starts with a package name" if option == "allow" else "has a module"
                raise ArgumentError(f"{option}={item!r}: a pattern {start}, as in 'mypkg.*', 'mypkg.ops:*' or 'mypkg.ops:MyFunction'")

    def match_module(self, module: str) -> bool:
        """Whether a pattern means everything in a module, as ``mypkg.ops`` and ``mypkg.*`` do; nothing is imported."""
        return any(isinstance(item, str) and not is_operator(item) and self._means(item, f"{module}:") for item in self.items)

    def match_name(self, name: str) -> bool:
        """Whether a pattern means ``module:qualname``; nothing is imported."""
        return any(isinstance(item, str) and self._means(item, name) for item in self.items)

    def has(self, name: str) -> bool:
        """Whether an entry is ``module:qualname`` itself, written out with a colon or a dot."""
        return any(isinstance(item, str) and item in (name, name.replace(":", ".", 1)) for item in self.items)

    def matches(self, cls: Any, *others: Any) -> bool:
        """Whether a class is meant, or another object that stands for it (a module of that class); it counts as met."""
        name = qualified_name(cls)
        self._met[name] = None
        meant = [
            item
            for item in self.items
            if any(item is each for each in (cls, *others)) or (isinstance(item, str) and self._means(item, name))
        ]
        self._idle = [item for item in self._idle if item not in meant]
        return bool(meant)

    def meet(self, function: Any) -> None:
        """Count a function as met, by itself and by each name that leads to it."""
        names = [f"{function.__module__}{sign}{function.__qualname__}" for sign in ":."]
        self._met[names[0]] = None
        self._idle = [
            item
            for item in self._idle
            if item is not function
            and not (isinstance(item, str) and (item in names or item.replace(":", ".").endswith(f".{function.__name__}")))
        ]

    def meet_as(self, other: Patterns) -> None:
        """Count as met what another list, which has these entries too, has met."""
        self._met |= other._met
        self._idle = [item for item in self._idle if any(item is each for each in other._idle)]

    def _means(self, text: str, name: str) -> bool:
        if is_operator(name) or is_operator(text):
            namespace, _, own = text.partition("::")
            return name.startswith(f"{namespace}::") and any(
                fnmatchcase(spelling, own) for spelling in (name[len(namespace) + 2 :], name[len(namespace) + 2 :].rpartition(".")[0])
            )
        module, _, qualname = name.partition(":")
        own, colon, rest = text.partition(":")
        inside = fnmatchcase(module, own) or (own.endswith(".*") and fnmatchcase(module, own[:-2]))
        if colon:
            return inside and fnmatchcase(qualname, rest)
        anywhere = self.option != "allow" and "." not in text and fnmatchcase(qualname.rpartition(".")[2], text)
        return inside or anywhere or text == f"{module}.{qualname}"

    def check_met(self) -> None:
        """See that each class and pattern meant one of the classes that `matches` was asked about.

        Raises:
            ArgumentError: One of them meant none; the message names near ones.
        """
        for item in self._idle:
            text = item if isinstance(item, str) else qualified_name(item if hasattr(item, "__qualname__") else type(item))
            spellings = {spelling: name for name in self._met for spelling in (name, *name.split(":"), name.rpartition(".")[2])}
            near = dict.fromkeys(spellings[spelling] for spelling in difflib.get_close_matches(text, spellings))
            names = ", ".join(list(near or self._met)[:5])
            raise ArgumentError(
                f"{self.option}={text!r} means none of the {_MEANT.get(self.option, 'Functions')} that the export met: "
                + (f"did you mean {names}?" if near else f"it met {names}" if names else "it met none at all, leave it out")
            )


def listed(items: Any) -> list[Any]:
    """The entries that an option was given: one alone may stand without a list, and None is no entry."""
    alone = isinstance(items, str) or callable(items) or not isinstance(items, (Iterable, NoneType))
    return [items] if alone else list(items or ())


def pattern_of(item: Any) -> Any:
    """An operator as its name; anything else as it is."""
    if type(item).__module__ == "torch._ops":
        return str(item).replace(".", "::", 1)
    if type(item).__name__ == "CustomOpDef":
        return repr(item).removeprefix("<CustomOpDef(").removesuffix(")>")
    return item
