"""The state that a Function keeps between calls: what its forward or its backward changes outside of its arguments, as its source says.

A file holds none of it. What a forward does is seen when it runs, `symbolics.capture.side_effects`; a backward does not run in an export, and a dict of
the module is no argument. Here the source is read: assignments, items that are set, methods that change a list or a tensor, and those of the
functions that are called and are not another package's. Nothing of the user's is run. What is only kept for the next time, computed from its key
alone, is no state (`Change.kind`).
"""

from __future__ import annotations

import argparse
import ast
import dis
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from symbolics.capture.absences import Absences
from symbolics.capture.switches import UNDECIDED, alive, augmented, decided, ends, is_plain, is_set_again, parts
from symbolics.node.classes import attributes_of, is_class, look, own_name
from symbolics.node.fingerprints import is_changing, methods_of, source_of
from symbolics.node.operators import Operator
from symbolics.users import is_users

__all__ = ["Change", "changes_of", "names_of", "said_of"]

_HALVES = ("forward", "backward")
#: What has items or numbers that are changed in place.
_CONTAINERS = (dict, list, set, deque, bytearray, np.ndarray, torch.Tensor)
#: Methods that change one of these, beside those that `is_changing` knows.
_CHANGING = frozenset(
    "add appendleft difference_update discard extendleft fill intersection_update popitem popleft put setdefault update".split()
)
#: How many functions that call one another are followed.
_DEEP = 5
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_UNKNOWN: Any = object()
#: What is said of a change first.
_KINDS = ("", "once", "memo")

_STATE = {
    "forward": "its forward changes {}, which it may read in the next call; the file holds none of it, and another process starts without it: "
    "pass the state as a tensor and return the new one",
    "backward": "its backward changes {}, which the next call may read; the file holds none of it, and another process starts without it: "
    "pass the state as a tensor, and change it in the training loop",
    "inlined": "its forward changes {}, which it may read in the next call; inlined, the file has the value of the export: "
    "pass the state as a tensor and return the new one",
}


def said_of(how: str, names: Iterable[str]) -> list[str]:
    """The text of a warning, in a list; nothing where nothing is changed.

    Args:
        how: By which half, "forward" or "backward"; or "inlined", by an inlined forward.
        names: What is changed.
    """
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return [_STATE[how].format(", ".join(found[:5]) + more)] if found else []


@dataclass(frozen=True, eq=False)
class Change:
    """One thing that a Function changes.

    Attributes:
        half: Which half does, "forward" or "backward".
        name: What it is called in a message.
        owner: Where it stands: a class, the names of a module or of an object, or the container itself.
        key: Its name in there; None for all that the container has.
        kind: "" for what is there and changes. "once": it is set where it is absent, to what the first call says. "memo": to what any call would say, which
            is no state; or it is put back in the end.
    """

    half: str
    name: str
    owner: Any
    key: str | None
    kind: str = ""


def changes_of(function: Any) -> list[Change]:
    """What a Function, or an `Operator`, changes outside of its arguments, one for each name, and for each half."""
    found = list[Change]()
    for half in _HALVES:
        if is_class(function):
            methods = methods_of(function, half)
        else:
            methods = function.python_functions().get(half, {}) if isinstance(function, Operator) else {}
        reader = _Reader(half, function.__mro__ if is_class(function) else ())
        for method in methods.values():
            reader.read(method, {}, own=True)
        found += reader.found.values()
    return found


class _Found(NamedTuple):
    """What an expression leads to.

    Attributes:
        value: The object; `_UNKNOWN` for what is somewhere in a container.
        name: Its name.
        owner: The container that has it, itself where it is one.
    """

    value: Any
    name: str
    owner: Any = None

    def is_container(self) -> bool:
        return self.value is _UNKNOWN or isinstance(self.value, _CONTAINERS)

    def may_change(self) -> bool:
        return self.is_container() or is_class(self.value) or isinstance(self.value, types.ModuleType) or names_of(self.value) is not None


class _Reader:
    """Reads functions.

    Attributes:
        half: Which half they are of.
        classes: The Function's class and its bases, whose attributes have short names.
        found: What they change, by name.
    """

    def __init__(self, half: str, classes: Sequence[type]) -> None:
        self.half, self.classes = half, classes
        self.found: dict[str, Change] = {}
        self._met: set[Any] = set()
        self._package = ""  # of the first function that is read

    def read(self, method: Any, given: Mapping[str, _Found], tainted: Set[str] = frozenset(), *, own: bool = False, deep: int = 0) -> None:
        """Read a function.

        Args:
            method: The function, in whatever it is wrapped.
            given: What is known of its parameters.
            tainted: The parameters that hold what the caller was given.
            own: Whether it is a method of the Function: all its parameters do.
            deep: How many functions lead to it.
        """
        function = _plain(method)
        module = "" if function is None else str(function.__globals__.get("__name__"))
        if function is None or deep > _DEEP or not _is_users(module) or not self._is_near(module):
            return
        key = (function.__code__, *sorted((name, id(each.value)) for name, each in given.items()), *sorted(tainted))
        if key in self._met:
            return
        self._met.add(key)
        known = {**_defaults(function), **given}
        source = source_of(function)
        nodes = source.nodes_of(function.__code__) if source is not None else []
        for node in nodes:
            if isinstance(node, _FUNCTIONS):
                _Body(self, function, node, known, set(_parameters(function)) if own else tainted, deep).read()
        if not nodes:
            self._read_code(function)

    def _is_near(self, module: str) -> bool:
        """Whether a module is of the Function's package, or of none that is installed."""
        self._package = self._package or module.partition(".")[0]
        file = str(getattr(sys.modules.get(module), "__file__", ""))
        return module.partition(".")[0] == self._package or not ("site-packages" in file or "dist-packages" in file)

    def _read_code(self, function: types.FunctionType) -> None:
        """Of a function without a source: the globals, and the attributes of classes and modules, that it sets."""
        steps, names = list(dis.get_instructions(function.__code__)), function.__globals__
        for before, step in zip([None, *steps], steps, strict=False):
            if step.opname == "STORE_GLOBAL":
                self.note(f"{names.get('__name__')}:{step.argval}", names, step.argval)
            elif step.opname == "STORE_ATTR" and before is not None and before.opname == "LOAD_GLOBAL":
                self.set_attribute(self.named(names.get(before.argval), before.argval, names), step.argval)

    def named(self, value: Any, name: str, names: Mapping[str, Any]) -> _Found:
        """What a global variable holds."""
        if is_class(value):
            module, qualname = own_name(value)
            return _Found(value, str(qualname) if any(value is cls for cls in self.classes) else f"{module}:{qualname}")
        return _Found(value, f"{names.get('__name__')}:{name}", value)

    def set_attribute(self, base: _Found, attribute: str, kind: str = "") -> None:
        """Note that an attribute is set."""
        value = base.value
        if base.is_container():
            self.note(base.name, base.owner, None, kind)
        elif is_class(value) and _is_users(str(own_name(value)[0])):
            self.note(f"{base.name}.{attribute}", value, attribute, kind)
        elif isinstance(value, types.ModuleType) and _is_users(value.__name__):
            self.note(f"{value.__name__}:{attribute}", vars(value), attribute, kind)
        elif (names := names_of(value)) is not None:
            self.note(f"{base.name}.{attribute}", names, attribute, kind)

    def note(self, name: str, owner: Any, key: str | None, kind: str = "") -> None:
        """Note a change."""
        if name not in self.found or (_KINDS.index(self.found[name].kind) > _KINDS.index(kind)):
            self.found[name] = Change(self.half, name, owner, key, kind)


class _Body:
    """One function of a source."""

    def __init__(
        self, reader: _Reader, function: types.FunctionType, node: Any, given: Mapping[str, _Found], tainted: Set[str], deep: int
    ) -> None:
        self.reader, self.function, self.node, self.given, self.deep = reader, function, node, given, deep
        every = list(ast.walk(node))
        self.globals = {name for each in every if isinstance(each, ast.Global) for name in each.names}
        self.outer = {name for each in every if isinstance(each, ast.Nonlocal) for name in each.names} & set(function.__code__.co_freevars)
        stored = {each.id for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
        stored |= {each.arg for each in every if isinstance(each, ast.arg)}
        self.locals = stored - self.globals - self.outer
        self.aliases = {name: value for name, value in _aliases(node).items() if name in self.locals}
        self.absences = Absences(node, self.aliases, tainted)

    def read(self) -> None:
        body = self.node.body
        self._block(body if isinstance(body, list) else [ast.Expr(body)], frozenset())

    # -------------------------------------------------------------------------------------------------- statements

    def _block(self, statements: Iterable[ast.stmt], absent: frozenset[str]) -> None:
        for each in statements:
            if isinstance(each, ast.If):
                absent = self._if(each, absent)
                side = decided(each.test, self._value_of)
                if side is not UNDECIDED and ends(each.body if side else each.orelse):
                    return
            elif isinstance(each, ast.Try):
                tried = frozenset(self.absences.looked_up(each.body))
                for part in (each.body, each.orelse, each.finalbody):
                    self._block(part, absent)
                for handler in each.handlers:
                    self._block(handler.body, absent | tried)
            else:
                self._statement(each, absent)

    def _if(self, statement: ast.If, absent: frozenset[str]) -> frozenset[str]:
        """Both sides; what is absent behind the statement."""
        self._calls(statement.test, absent)
        side, (then, other) = decided(statement.test, self._value_of), self.absences.of(statement.test)
        if side is UNDECIDED or side:
            self._block(statement.body, absent | then)
        if side is UNDECIDED or not side:
            self._block(statement.orelse, absent | other)
        return absent | other if statement.body and isinstance(statement.body[-1], (ast.Return, ast.Raise, ast.Continue)) else absent

    def _value_of(self, expression: ast.expr) -> Any:
        """The value of a name that nothing sets again; `UNDECIDED` elsewhere."""
        found = self._resolve(expression)
        for _ in range(_DEEP):
            if isinstance(expression, ast.Name) and augmented(ast.walk(self.node), expression.id):
                return UNDECIDED
            expression = self.aliases.get(expression.id, expression) if isinstance(expression, ast.Name) else expression
        if found is None or not is_plain(found.value) or not isinstance(expression, (ast.Name, ast.Attribute)):
            return UNDECIDED
        base = self._resolve(expression.value) if isinstance(expression, ast.Attribute) else None
        name = expression.attr if isinstance(expression, ast.Attribute) else expression.id
        return UNDECIDED if is_set_again(name, self.function, None if base is None else base.value) else found.value

    def _statement(self, statement: ast.stmt, absent: frozenset[str]) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._target(target, statement.value, absent)
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            self._target(statement.target, statement.value if isinstance(statement, ast.AnnAssign) else None, absent)
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                self._in_place(statement.target)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._target(target, None, frozenset())
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            self._target(statement.target, None, frozenset())
        for _, part in ast.iter_fields(statement):
            for each in part if isinstance(part, list) else [part]:
                if isinstance(each, (ast.expr, ast.withitem)):
                    self._calls(each, absent)
        for case in getattr(statement, "cases", ()):
            self._block(case.body, absent)
        for name in parts(statement, self._value_of):
            self._block([each for each in getattr(statement, name, None) or () if isinstance(each, ast.stmt)], absent)

    def _target(self, target: ast.expr, value: ast.expr | None, absent: frozenset[str]) -> None:
        """Something is assigned to."""
        note = self.reader.note
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._target(each, None, absent)
        elif isinstance(target, ast.Starred):
            self._target(target.value, None, absent)
        elif isinstance(target, ast.Name):
            kind = self.absences.kind_of(target, value, absent)
            if target.id in self.globals:
                note(f"{self.function.__globals__.get('__name__')}:{target.id}", self.function.__globals__, target.id, kind)
            elif target.id in self.outer:
                note(target.id, {}, target.id, kind)
        elif isinstance(target, ast.Attribute) and (base := self._resolve(target.value)) is not None:
            self.reader.set_attribute(base, target.attr, self.absences.kind_of(target, value, absent))
        elif isinstance(target, ast.Subscript) and (base := self._resolve(target.value)) is not None and base.is_container():
            note(base.name, base.owner, None, self.absences.kind_of(target, value, absent))

    def _in_place(self, expression: ast.expr) -> None:
        """A container that an expression leads to is changed."""
        if (base := self._resolve(expression)) is not None and base.is_container():
            self.reader.note(base.name, base.owner, None)

    # ------------------------------------------------------------------------------------------------------- calls

    def _calls(self, expression: ast.AST, absent: frozenset[str]) -> None:
        for call in alive(expression, self._value_of):
            if not isinstance(call, ast.Call):
                continue
            for keyword in call.keywords:
                if keyword.arg == "out":
                    self._in_place(keyword.value)
            if isinstance(call.func, ast.Attribute):
                self._method(call, call.func, absent)
            elif isinstance(call.func, ast.Name):
                self._function(call, call.func, absent)

    def _function(self, call: ast.Call, name: ast.Name, absent: frozenset[str]) -> None:
        if name.id in ("setattr", "delattr") and name.id not in self.locals:
            if len(call.args) < 2 or not isinstance(call.args[1], ast.Constant):
                return
            self._target(
                ast.Attribute(call.args[0], str(call.args[1].value), ast.Store()), call.args[2] if len(call.args) > 2 else None, absent
            )
        elif (found := self._resolve(name)) is not None:
            self._follow(found.value, call)

    def _method(self, call: ast.Call, method: ast.Attribute, absent: frozenset[str]) -> None:
        base, name = self._resolve(method.value), method.attr
        if base is None:
            return
        if base.is_container():
            if is_changing(name) or name in _CHANGING:
                known = name == "setdefault" and self.absences.is_computed_of(call.args[1:], call.args[:1])
                kind = "memo" if known else "once" if name == "setdefault" else ""
                self.reader.note(base.name, base.owner, None, kind)
        elif isinstance(base.value, types.ModuleType):
            self._follow(vars(base.value).get(name), call)
        elif is_class(base.value):
            if name == "apply" and issubclass(base.value, torch.autograd.Function):
                for each in methods_of(base.value, "forward").values():
                    self.reader.read(each, {}, own=True, deep=self.deep + 1)
                return
            found = look(base.value, name)
            self._follow(found, call, (base,) if isinstance(found, classmethod) else ())
        elif names_of(base.value) is not None:
            found = look(type(base.value), name)
            self._follow(found, call, () if isinstance(found, staticmethod) else (base,))

    def _follow(self, function: Any, call: ast.Call, first: tuple[_Found, ...] = ()) -> None:
        """Read a function that is called."""
        inner = _plain(function)
        if inner is None:
            return
        names = list(inner.__code__.co_varnames[: inner.__code__.co_argcount])
        passed = dict(zip(names[len(first) :], call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
        given = dict(zip(names, first, strict=False))
        for name, argument in passed.items():
            if (found := self._resolve(argument)) is not None and found.may_change():
                given[name] = found
        tainted = {name for name, argument in passed.items() if self.absences.origins(argument)}
        self.reader.read(inner, given, tainted, deep=self.deep + 1)

    # ------------------------------------------------------------------------------------------------- expressions

    def _resolve(self, expression: ast.expr, deep: int = 0) -> _Found | None:
        """What an expression leads to that is there before the call; None for all else."""
        if deep > _DEEP:
            return None
        if isinstance(expression, ast.Name):
            return self._variable(expression.id, deep)
        if isinstance(expression, ast.Call):  # a view, an item
            inner = self._resolve(expression.func.value, deep + 1) if isinstance(expression.func, ast.Attribute) else None
            if inner is None or not inner.is_container():
                return None
            views = isinstance(inner.value, torch.Tensor) and expression.func.attr in ("detach", "view", "flatten", "numpy")  # type: ignore[attr-defined]
            items = isinstance(inner.value, dict) and expression.func.attr in ("get", "setdefault")  # type: ignore[attr-defined]
            return inner if views else _Found(_UNKNOWN, inner.name, inner.owner) if items else None
        if not isinstance(expression, (ast.Attribute, ast.Subscript)) or (base := self._resolve(expression.value, deep + 1)) is None:
            return None
        if isinstance(base.value, torch.Tensor):
            return base
        return _attribute(base, expression.attr) if isinstance(expression, ast.Attribute) else _item(base, expression.slice)

    def _variable(self, name: str, deep: int) -> _Found | None:
        if name in self.locals:
            if name in self.aliases:
                return self._resolve(self.aliases[name], deep + 1)
            return self.given.get(name)
        function = self.function
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                return None
            return self.reader.named(value, name, function.__globals__) if is_class(value) else _Found(value, name, value)
        if name not in function.__globals__:
            return None
        return self.reader.named(function.__globals__[name], name, function.__globals__)


def _attribute(base: _Found, name: str) -> _Found | None:
    value = base.value
    if value is _UNKNOWN:
        return base
    if isinstance(value, types.ModuleType):
        found = vars(value).get(name, _UNKNOWN) if _is_users(value.__name__) else _UNKNOWN
        label = f"{value.__name__}:{name}"
    else:
        names = {} if is_class(value) else names_of(value) or {}
        found = names[name] if name in names else look(value if is_class(value) else type(value), name, _UNKNOWN)
        label = f"{base.name}.{name}"
    return None if found is _UNKNOWN else _Found(found, label, found)


def _item(base: _Found, index: ast.expr) -> _Found | None:
    if not base.is_container():
        return None
    if type(base.value) in (dict, list) and isinstance(index, ast.Constant):
        try:
            found = base.value[index.value]
        except (LookupError, TypeError):
            found = _UNKNOWN
        return _Found(found, base.name, found if isinstance(found, _CONTAINERS) else base.owner)
    return _Found(_UNKNOWN, base.name, base.owner)


def _aliases(node: ast.AST) -> dict[str, ast.expr]:
    """The local variables that are given a value once, and by a name of something: what that is."""
    every = list(ast.walk(node))
    times = Counter(each.id for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load))
    times.update(each.arg for each in every if isinstance(each, ast.arg))
    pairs = [(target, each.value) for each in every if isinstance(each, ast.Assign) for target in each.targets]
    pairs += [(each.target, each.value) for each in every if isinstance(each, ast.NamedExpr)]
    return {
        target.id: value
        for target, value in pairs
        if isinstance(target, ast.Name)
        and times[target.id] - augmented(every, target.id) == 1
        and isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    }


def _plain(method: Any) -> types.FunctionType | None:
    """The function that the user wrote, of what it is wrapped in; None where there is none."""
    for _ in range(_DEEP):
        if isinstance(method, (staticmethod, classmethod, types.MethodType)):
            method = method.__func__
        elif not isinstance(method, types.FunctionType):
            return None
        elif not isinstance(inner := vars(method).get("__wrapped__"), types.FunctionType):
            return method
        else:
            method = inner
    return None


def _parameters(function: types.FunctionType) -> Iterator[str]:
    code = function.__code__
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)]


def _defaults(function: types.FunctionType) -> dict[str, _Found]:
    """The parameters whose default is a container, which every call shares."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    pairs = [*zip(reversed(names), reversed(function.__defaults__ or ()), strict=False), *(function.__kwdefaults__ or {}).items()]
    return {name: _Found(value, f"the default of {name}", value) for name, value in pairs if isinstance(value, _CONTAINERS)}


def names_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's; None for what has none, or is torch's or Python's own."""
    if isinstance(value, (*_CONTAINERS, types.ModuleType, torch.nn.Module)) or value is _UNKNOWN or is_class(value):
        return None
    cls = type(value)
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return vars(value)
    return attributes_of(value) if _is_users(str(own_name(cls)[0])) else None


def _is_users(module: str) -> bool:
    """Whether a module is neither ours, nor torch's or Python's own."""
    if module == "__main__":
        return True
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or is_users(file)
