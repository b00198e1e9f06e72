"""Which names of a file may become Python objects.

A file is data from somewhere else. It names Function classes, and sometimes enums, dataclasses, named tuples and
callables among their arguments, or an operator of torch.library; none of these names means anything until the caller says so, with `register` or
with ``allow=``. Allowing a class means trusting its ``forward`` and ``backward`` with arguments that the file chose.

A pattern covers what is called by its Functions alone. What the file itself may have called (a hook, a callable argument), and what
stands in a module that starts processes or loads code, has an entry of its own.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from exporter.errors import short
from symbolics.errors import Faq, TrustError
from symbolics.node.classes import (
    CONSTRUCTOR,
    find,
    is_class,
    is_filled,
    is_function,
    look,
    own_name,
    tuple_fields,
    value_fields,
    why_not_plain,
)
from symbolics.node.names import is_operator, qualified_name, why_not_importable
from symbolics.node.patterns import Patterns, pattern_of
from symbolics.text import lookalike, marked, quoted, said, shown
from symbolics.users import warn

__all__ = ["Gate", "name_of", "register", "registered", "unregister"]

T = TypeVar("T")

# Long enough for any honest name, short enough for every message.
_MAX_NAME = 512

# What every process can write down itself: registering one of these would rename every equal value of a file.
_VALUES = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(Ellipsis))


# ------------------------------------------------------------------------------------------------------ the registry

_objects: dict[str, Any] = {}
_names: dict[int, str] = {}  # id(object) -> name; _objects keeps the objects alive, so an id stays theirs


@short
def register(obj: T, name: str | None = None) -> T:
    """Give an object or a class a name that files may use.

    Use it for what another process cannot import: a class inside a function, a lookup table, a process group. Call it in the
    process that exports, and again in the one that runs the file. It also works as a decorator.

    Args:
        obj: A class (a Function, an enum, ...), a function, or any object that a Function takes as argument.
        name: The name in the file. Default for classes and functions: ``module:qualname``. Any other object needs a name.

    Returns:
        ``obj``.

    Raises:
        TypeError: ``obj`` has no name of its own and ``name`` is missing; or it is a plain value such as a number, or an operator, which
            files name as torch does.
        ValueError: The name is empty, too long, or has control characters.

    Warns:
        PythonopWarning: Another object had the name. Files now mean the new one.

    Examples:
        >>> table = exporter.register(object(), "mypkg.table")
    """
    if type(obj) in _VALUES:
        raise TypeError(f"exporter.register: {obj!r} is a plain value, files hold it as it is")
    if isinstance(operator := pattern_of(obj), str) and operator is not obj:
        raise TypeError(
            f"exporter.register: files name the operator {operator} as torch does: the process that opens them gives allow=[{operator!r}]"
        )
    if name is None:
        if not hasattr(obj, "__qualname__") or not isinstance(getattr(obj, "__module__", None), str):
            raise TypeError(f"exporter.register: an object of type {qualified_name(type(obj))} needs a name: register(obj, name)")
        name = qualified_name(obj)
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"exporter.register: a name is a printable str of 1 to {_MAX_NAME} characters, not {shown(str(name))}")
    old = _objects.get(name)
    if old is obj:
        return obj
    if old is not None:
        if not name.startswith("__main__:"):  # redefining a class in a notebook is no accident
            warn(
                f"exporter.register: {shown(name)} named another object until now, files that name it mean the new one; "
                "give each object a name of its own: register(obj, name)"
            )
        unregister(name)
    _objects[name] = obj
    _names[id(obj)] = name
    return obj


def unregister(name: str) -> None:
    """Forget a registered name; an unknown one is no error."""
    obj = _objects.pop(name, None)
    if obj is not None and _names.get(id(obj)) == name:
        del _names[id(obj)]
        for other, candidate in _objects.items():
            if candidate is obj:
                _names[id(obj)] = other


def registered() -> dict[str, Any]:
    """A copy of the registry: name -> object."""
    return dict(_objects)


def name_of(obj: Any) -> str | None:
    """The name under which this very object is registered, None where it is not."""
    return _names.get(id(obj))


# ---------------------------------------------------------------------------------------------------------- the gate

#: Functions of our own that files name: each calls nothing but what the file names in its arguments, and that passes the gate.
_OWN = {"symbolics.capture.gradient_hooks:GradientHook"}


#: What starts processes, loads code, or runs what it is given, beside the standard library: these modules and all below them.
_POWERFUL = frozenset(
    """
    torch._C torch._classes torch._dynamo torch._export torch._functorch torch._higher_order_ops torch._inductor torch._lazy torch._ops torch.contrib
    torch.distributed.elastic torch.distributed.launch torch.distributed.launcher torch.distributed.rpc torch.distributed.run torch.export torch.fx torch.hub
    torch.jit torch.multiprocessing torch.onnx torch.package torch.serialization torch.testing torch.utils.benchmark torch.utils.bottleneck
    torch.utils.bundled_inputs torch.utils.collect_env torch.utils.cpp_extension torch.utils.data torch.utils.hipify torch.utils.model_dump
    torch.utils.model_zoo torch.utils.tensorboard torch.utils.viz
    IPython _pytest cffi cloudpickle dill joblib numpy.ctypeslib numpy.distutils numpy.f2py numpy.testing pip pkg_resources psutil pytest setuptools
    """.split()
)

# Why an object of plain data needs an entry; and by kinds of classes, methods that run where nobody calls them by name.
_FILLED_AT_WILL = "the file says all that its methods read"
_VALUE_RUNS = ("__call__", "__del__", "__torch_function__")
_RUN_BY_ITSELF = {"enum": _VALUE_RUNS, "dataclass": _VALUE_RUNS, "namedtuple": _VALUE_RUNS, "module": ("__del__",)}

# One pattern that means both means more or less all of torch.
_FAR_APART = ("torch.autograd.function:Function", "torch.utils.checkpoint:CheckpointFunction")
_said_wide: set[str] = set()


def _is_powerful(module: str) -> bool:
    """Whether a module is one that no pattern means: each name in it has an entry of its own."""
    parts = module.split(".")
    return parts[0] in sys.stdlib_module_names or any(".".join(parts[:count]) in _POWERFUL for count in range(1, len(parts) + 1))


def _is_function_class(obj: Any) -> bool:
    import torch

    return is_class(obj) and issubclass(obj, torch.autograd.Function)


def _is_module_class(obj: Any) -> bool:
    import torch

    return is_class(obj) and issubclass(obj, torch.nn.Module)


#: kind -> (what it must be, the check)
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "function": ("a subclass of torch.autograd.Function", _is_function_class),
    "module": ("a subclass of torch.nn.Module", _is_module_class),
    "enum": ("an enum class", lambda obj: is_class(obj) and issubclass(obj, enum.Enum)),
    "dataclass": ("a dataclass", lambda obj: value_fields(obj) is not None),
    "namedtuple": ("a NamedTuple class", lambda obj: tuple_fields(obj) is not None),
    "plain": ("a class of objects made of their __dict__ alone", lambda obj: not why_not_plain(obj)),
    "callable": ("a callable", callable),
    "object": ("a registered object", lambda obj: True),
    "class": ("a class", is_class),  # of which the file names the constructor
}


class Gate:
    """Turns the names of one file into Python objects: the resolver of `symbolics.node.arguments.decode`.

    ``allow`` holds classes, functions and patterns (`symbolics.node.patterns.Patterns` has the language). A pattern
    starts with a package's name, which has no wildcard. It is matched before anything is imported, and a name that
    matches is imported: what a pattern covers is code that the file may choose from.

    Three kinds of names need an entry of their own: the object, or ``module:qualname`` written out as the export wrote it. These are functions
    and classes that the file may have called (a hook of a gradient, a callable argument); what stands in the standard library, or in another module
    that starts processes or loads code; and enums, dataclasses and named tuples with a ``__call__``, ``__del__`` or ``__torch_function__``, and classes of
    modules with a ``__del__``. An entry for a class of which files hold objects (a module, an enum, a dataclass, plain data) is none for its constructor:
    that is ``module:qualname.__init__``.

    A name is looked up in the registry, then among the classes of ``allow``, then by import. Names in ``__main__``
    and names with ``<locals>`` are never looked for by import: another process has other ones. Nor is a ``__main__`` inside
    a package: to import it is to run a program.
    """

    def __init__(self, allow: Any = ()) -> None:
        """Args:
            allow: Classes, functions and patterns; one alone may stand without a list.

        Raises:
            TypeError: An entry is neither a class or function nor a str.
            ArgumentError: A pattern has a wildcard in the package's name, or is empty.

        Warns:
            PythonopWarning: A pattern means more or less all of torch; once a process.
        """
        self._patterns = Patterns(allow, "allow")
        for entry in self._patterns.items:
            if isinstance(entry, str) and entry not in _said_wide and all(map(Patterns(entry, "allow").match_name, _FAR_APART)):
                _said_wide.add(entry)
                warn(
                    f"allow={entry!r} lets a file choose among all Functions of torch, and import its modules: name those that the file needs, "
                    "as in 'torch.utils.checkpoint:CheckpointFunction'; pythonop inspect shows them"
                )
        #: The Functions and operators that it has handed out, by the names that files have for them.
        self.functions: dict[str, Any] = {}
        self._classes = {qualified_name(entry): entry for entry in self._patterns.items if not isinstance(entry, str)}

    def __call__(self, kind: str, name: str) -> Any:
        """The object that a file names.

        Args:
            kind: "function" (a Function class), "module" (a class of modules), "enum", "dataclass", "namedtuple", "plain", "callable" or "object".
            name: What the file says.

        Raises:
            TrustError: The name is not allowed, leads nowhere, or to something of another kind. A name that is not
                allowed imports nothing.
        """
        wanted = _KINDS[kind][0]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise TrustError.damaged(f"the name of {wanted}", f"it has {len(name) if isinstance(name, str) else 0} characters")
        if kind == "callable" and name.endswith(CONSTRUCTOR):
            return self._constructor(name)
        if name in _objects:
            found = _objects[name]
        elif name in self._classes and kind != "object":
            found = self._classes[name]
        elif kind == "object":
            raise TrustError(
                f"the file names the object {marked(name)}, which is not registered here: "
                f"call exporter.register(obj, {quoted(name)}) in this process before it opens the file"
            )
        else:
            found = self._import(kind, name)
        _check_kind(kind, name, found)
        if runs := [method for method in _RUN_BY_ITSELF.get(kind, ()) if look(found, method) is not None]:
            self._check_named(wanted, name, f"its {runs[0]} would run with what the file says")
        if kind == "plain":
            self._check_named(wanted, name, _FILLED_AT_WILL)
        if kind in ("function", "module"):
            self.functions[name] = found
        return found

    def _constructor(self, name: str) -> Any:
        """The class whose constructor a file may call, where that has an entry of its own.

        Raises:
            TrustError: It has none, or leads to no class.
        """
        own = name.removesuffix(CONSTRUCTOR)
        if not self._patterns.has(name):
            if own not in self._classes:
                _check_importable(own, "a class")
                _check_loaded("class", own, "is not allowed")
            raise TrustError(
                f"the file names {marked(name)}, a class that it may have called, and no pattern allows that, nor an entry for the class: "
                f"pass allow=[{quoted(name)}] if you trust its constructor with arguments of the file's choice{lookalike(name)}",
                faq=Faq.NOT_ALLOWED,
            )
        found = self._classes[own] if own in self._classes else self._look_up(own, "a class")
        if not is_class(found):
            raise _another_kind(own, "a class")
        return found

    def allows(self, name: str) -> bool:
        """Whether a name passes the registry, the classes or the patterns, without importing anything."""
        return self._is_named(name) or (":" in name and self._patterns.match_name(name))

    def _is_named(self, name: str) -> bool:
        """Whether a name is in the registry, or has an entry of its own."""
        return name in _objects or name in self._classes or name in _OWN or self._patterns.has(name)

    def _given(self, module: str) -> str:
        """For the message about a name of this module, which none of the patterns matches."""
        given = [entry for entry in self._patterns.items if isinstance(entry, str)]
        alone = next((f", which is that module alone, and not {entry}.*" for entry in given if module.startswith(f"{entry}.")), "")
        return f" by {', '.join(map(repr, given[:3]))}{', ...' if len(given) > 3 else ''}{alone}" if given else ""

    def _check_named(self, wanted: str, name: str, why: str) -> None:
        """See that a name has an entry of its own.

        Raises:
            TrustError: It has none, whatever the patterns match.
        """
        if not self._is_named(name):
            raise TrustError(
                f"the file names {marked(name)} where {wanted} should be, which no pattern allows, for {why}: pass allow=[{quoted(name)}] if you know what it does with "
                f"arguments of the file's choice, or call exporter.register(obj) first{lookalike(name)}",
                faq=Faq.NOT_ALLOWED,
            )

    def check_operator(self, name: str, module: str) -> None:
        """See that an operator may be called.

        Args:
            name: ``namespace::name.overload``.
            module: What the file says registers it.

        Raises:
            TrustError: No pattern names it.
        """
        if len(name) > _MAX_NAME:
            raise TrustError.damaged("the name of an operator", f"it has {len(name)} characters")
        if not self._patterns.match_name(name):
            beside = f", and {quoted(module)} for the module that registers it" if module not in ("", "torch") else ""
            raise TrustError(
                f"the file names the operator {marked(name)}, which is not allowed{self._given('')}: pass allow=[{quoted(name.rpartition('.')[0])}] if you trust its code with what the file "
                f"says{beside}{lookalike(name, module)}",
                faq=Faq.NOT_ALLOWED,
            )

    def import_for_operator(self, name: str, module: str) -> None:
        """Import the module that registers an operator which this process does not have.

        Args:
            name: The operator, which is allowed.
            module: What the file says registers it.

        Raises:
            TrustError: The module is not allowed, or cannot be imported.
        """
        missing = f"the operator {marked(name)} is allowed, but nothing registers it here"
        if not module or not all(part.isidentifier() for part in module.split(".")) or "__main__" in module.split("."):
            raise TrustError(
                f"{missing}, and the file names no module that does (at the export it was {marked(module) or 'unknown'}): import what registers it first"
            )
        written_out = self._patterns.has(module) or self._patterns.has(f"{module}:*")
        if not (written_out if _is_powerful(module) else self._patterns.match_module(module)):
            raise TrustError(
                f"{missing}. At the export it was registered by {marked(module)}: import that first, or let the file do so: add {quoted(module)} to allow="
            )
        _names_of(module, name)

    def _import(self, kind: str, name: str) -> Any:
        wanted = _KINDS[kind][0]
        module = name.partition(":")[0]
        _check_importable(name, wanted)
        why = "the file may have it called" if kind == "callable" else _FILLED_AT_WILL if kind == "plain" else ""
        if _is_powerful(module):
            why = f"{marked(module)} lies in the standard library, or is known to start processes or to load code"
        allowed = self.allows(name)
        if not allowed or (why and not self._is_named(name)):
            _check_loaded(kind, name, "has no entry of its own" if allowed else f"is not allowed{self._given(module)}")
        if not allowed:
            because = f" ({why})" if _is_powerful(module) else ""
            raise TrustError(
                f"the file names {marked(name)} where {wanted} should be, which is not allowed{self._given(module)}: pass allow=[{quoted(name)}]{because} "
                f"if you trust its code with what the file says, or call exporter.register(cls) first; `pythonop inspect` lists all that the file names{lookalike(name)}",
                faq=Faq.NOT_ALLOWED,
            )
        if why:
            self._check_named(wanted, name, why)
        return self._look_up(name, wanted)

    @staticmethod
    def _look_up(name: str, wanted: str) -> Any:
        """What stands under a name that is allowed, in a module that is imported for it.

        Raises:
            TrustError: There is no such name, or it is another name of something.
        """
        _check_importable(name, wanted)
        try:
            names = _names_of(name.partition(":")[0], name)
            return _objects[name] if name in _objects else _found_in(names, name)  # the module may have registered it
        except KeyError as error:
            module, _, qualname = name.partition(":")
            raise TrustError(
                f"{marked(name)} is allowed, but {marked(module)} has no {marked(qualname)} here: install the version the model was exported with, or, if "
                "it was renamed, leave a class of the old name behind",
                faq=Faq.CHANGED,
            ) from error


def _found_in(names: Mapping[str, Any], name: str) -> Any:
    """What a module, which holds these names, has under a name of the file.

    Raises:
        KeyError: Nothing.
        TrustError: It is another name of something, or inside of what is no class.
    """
    module, _, qualname = name.partition(":")
    try:
        found = find(names, qualname)
    except TypeError as error:
        raise TrustError(
            f"{marked(name)} walks through {shown(str(error))}'s owner, which is no class: only nested classes can be named"
        ) from error
    if type(found) is types.BuiltinFunctionType and module == "torch" and found.__name__ == qualname:
        return found  # torch.tanh and its like know no module
    own = own_name(found)
    if own != (module, qualname):
        moved = (
            f". If it has moved, write 'class {marked(qualname)}({marked('.'.join(own))}): pass' into {marked(module)}, or call exporter.register(cls, "
            f"{quoted(name)}) before the file is opened"
            if is_class(found) and is_function(found)
            else ""
        )
        raise TrustError(
            f"{marked(name)} is another name of {marked(f'{own[0]}:{own[1]}')}: a file must name an object where it is defined{moved}",
            faq=Faq.CHANGED if moved else None,
        )
    return found


def _check_kind(kind: str, name: str, found: Any) -> None:
    """See that what stands under a name is what the file says that it is.

    Raises:
        TrustError: It is not, or it is a class of which files hold objects, and the file would have it called.
    """
    wanted, check = _KINDS[kind]
    if not check(found):
        raise _another_kind(name, wanted)
    if is_filled(found) and (kind == "callable" or (kind == "object" and name == qualified_name(found))):
        raise TrustError(
            f"the file names the class {marked(name)} as a function: an entry of allow= for a class is none for its constructor. Export the file again: "
            f"it then names {marked(name + CONSTRUCTOR)}, which has an entry of its own"
        )


def _another_kind(name: str, wanted: str) -> TrustError:
    return TrustError(
        f"the file names {marked(name)} where {wanted} should be, which it is not: the file was not made by pythonop, or the class has changed"
    )


def _check_loaded(kind: str, name: str, first: str) -> None:
    """Refuse a name that no entry of ``allow=`` would help, as far as what is imported already says so. Nothing is imported for it.

    Raises:
        TrustError: What the name leads to is of another kind, or has another name; ``first`` stands before that: that it is not allowed.
    """
    module = name.partition(":")[0]
    loaded = sys.modules.get(module)
    try:
        if kind in ("function", "module") and module.partition(".")[0] in sys.stdlib_module_names:
            raise _another_kind(name, _KINDS[kind][0])
        if type(loaded) is types.ModuleType:  # of another type, to look into it may run code
            with contextlib.suppress(KeyError):
                _check_kind(kind, name, _found_in(vars(loaded), name))
    except TrustError as error:
        raise TrustError(f"{marked(name)} {first}, and no entry would help: {error}", faq=error.faq) from error


def _check_importable(name: str, wanted: str) -> None:
    """Refuse a name that no other process can import.

    Raises:
        TrustError: It is one.
    """
    if why := why_not_importable(name):
        raise TrustError(
            f"{marked(name)} ({wanted}) cannot be imported in another process, for {marked(why)}: "
            "give the class itself in allow=, call exporter.register(cls) before this process opens the file, or move the class to the top level of a module that can be imported",
            faq=Faq.IN_A_FUNCTION,
        )


def _names_of(module: str, name: str) -> dict[str, Any]:
    """What a module holds, which is imported for it.

    Raises:
        TrustError: It cannot be imported, or put something into its place that is no module.
    """
    try:
        return dict(vars(importlib.import_module(module)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: a script that was meant to be run, not imported
        raise TrustError(
            f"{marked(name)} is allowed, but the module {marked(module)} cannot be imported here ({type(error).__name__}: {shown(said(error))}): "
            "install it" + ("" if is_operator(name) else ", or register the class with exporter.register(cls)"),
            faq=Faq.NOT_INSTALLED,
        ) from error
