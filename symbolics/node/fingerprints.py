"""Fingerprints of Functions: by them a file says which forward and which backward it was exported with.

A fingerprint is a digest of the syntax tree: of a half's methods, of what they call and read in their own module, and so on. Comments, docstrings,
annotations, formatting and places do not count, nor does Python's release. Where there is no source it is one of the code objects, which
another release of Python cannot compare. No torch here, and nothing is imported or run.

What a program has set since, ``Spike.alpha = 3.0`` or ``config.STEPS = 25``, stands in no source: `Half.places` says where such values are, `symbolics.node.outside_values` reads them.
"""

from __future__ import annotations

import argparse
import ast
import dis
import functools
import hashlib
import linecache
import symtable
import sys
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from symbolics.node.classes import is_class, is_function, look, names_in, own_name
from symbolics.node.metadata import Fingerprint

__all__ = ["Half", "changed_halves", "fingerprint", "halves_of", "is_changing", "methods_of", "source_of"]

#: How a fingerprint was taken; another rule gets another name, so that nobody compares with what an older one gave.
_SOURCE = "source-1"
_CODE = f"code-{sys.version_info[0]}.{sys.version_info[1]}"
#: The methods of a Function, by the half that they belong to.
_HALVES = {"forward": ("forward", "setup_context", "vmap"), "backward": ("backward", "vjp", "jvp")}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
#: Fields of a syntax tree that no run depends on.
_SILENT = frozenset(("annotation", "returns", "type_comment", "type_params", "ctx", "kind", "simple"))
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def fingerprint(what: Any) -> Fingerprint:
    """The fingerprint of a Function.

    Args:
        what: A Function class, or an `symbolics.node.operators.Operator`.

    Returns:
        The fingerprint; a half is "" where it is not written in Python.
    """
    return Fingerprint(**{half: _taken(what, half, _SOURCE) or _taken(what, half, _CODE) for half in _HALVES})


def changed_halves(recorded: Fingerprint, what: Any) -> list[str]:
    """Which halves of a Function, "forward" and "backward", are others than a file says. What cannot be compared counts as equal."""
    found = []
    for half in _HALVES:
        text = getattr(recorded, half)
        now = _taken(what, half, text.partition(":")[0])
        if now and now != text:
            found.append(half)
    return found


def halves_of(what: Any) -> list[Half]:
    """What is known of each half of a Function, or of an operator or module as `fingerprint` takes it; empty without any code of Python."""
    for half in _HALVES:
        _ = _taken(what, half, _SOURCE) or _taken(what, half, _CODE)
    return list(_known.get(what, {}).values())


#: Methods that change a list or a tensor in place, beside those whose name ends in "_".
_CHANGING = frozenset("append extend insert pop remove clear sort reverse".split())
#: Functions of torch that make tensors of its default type.
_FACTORIES = frozenset("arange as_tensor empty eye full linspace logspace ones rand randn tensor Tensor zeros get_default_dtype".split())


class Half(NamedTuple):
    """What is known of a half.

    Attributes:
        digest: Its fingerprint; "" where it cannot be taken.
        places, written, makes_tensors: As `_Closure` has them.
    """

    digest: str = ""
    places: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    written: Collection[str] = ()
    makes_tensors: bool = False


#: What was taken before, by what it was taken of: a class keeps the text that it was first seen with.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Half]] = weakref.WeakKeyDictionary()


def _taken(what: Any, half: str, how: str) -> str:
    """A half's fingerprint, "" where it cannot be taken so."""
    methods = methods_of(what, half) if is_class(what) else what.python_functions().get(half)
    if is_class(what) and look(what, half) is None:  # a module has no backward of its own
        return ""
    if methods is None or how not in (_SOURCE, _CODE):
        return ""
    known, key = _known.setdefault(what, {}), (how, *((name, id(method)) for name, method in methods.items()))
    if key not in known:
        known[key] = _digest(what, methods, how)
    return known[key].digest


def _digest(what: Any, methods: dict[str, Any], how: str) -> Half:
    classes = [base for base in what.__mro__ if not _is_of_torch(base)] if is_class(what) else []
    closure = (_SourceClosure if how == _SOURCE else _CodeClosure)(classes)
    if not all(closure.add(name, method) for name, method in methods.items()):
        return Half()
    text = "\0\0".join("\0".join((name, *words)) for name, words in sorted(closure.parts.items()))
    digest = f"{how}:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
    return Half(digest, closure.places, closure.written, closure.makes_tensors)


def methods_of(cls: type, half: str) -> dict[str, Any]:
    """The methods of a half, as they stand in the class or in a base that is not torch's."""
    found = {}
    for name in _HALVES[half]:
        owner = next((base for base in cls.__mro__ if name in names_in(base)), None)
        if owner is not None and not _is_of_torch(owner):
            found[name] = look(cls, name)
    return found


def _is_of_torch(cls: type) -> bool:
    return cls is object or str(own_name(cls)[0]).partition(".")[0] == "torch"


class _Closure:
    """What a half consists of: its methods, and what these lead to.

    Attributes:
        parts: A name for each part -> what its digest is taken of.
        places: ``module:name`` of what may be a value that is read -> a class or a namespace, and the name in it.
        written: The names that the half itself gives values, or whose lists and tensors it changes.
        makes_tensors: Whether it calls ``torch.zeros`` or the like.
    """

    def __init__(self, classes: list[type]) -> None:
        self.classes = classes
        self.parts: dict[str, list[str]] = {}
        self.places: dict[str, tuple[Any, str]] = {}
        self.written: set[str] = set()
        self.makes_tensors = False
        self._modules = {own_name(cls)[0] for cls in classes}
        self._met: dict[int, Any] = {}

    def add(self, name: str, value: Any) -> bool:
        """Take in a function, in whatever it is wrapped; False where what it runs cannot be seen."""
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return self.add(name, value.__func__)
        if isinstance(value, functools.partial):
            given = (*value.args, *sorted(value.keywords.items()))
            self._put(f"{name} given", [_value(each) for each in given if _is_plain(each)])
            return self.add(name, value.func)
        inner = getattr(value, "__wrapped__", None)
        if callable(inner):  # of the wrapper, what the same module wrote; the rest is another package's
            same = getattr(inner, "__globals__", None) is getattr(value, "__globals__", self)
            return self.add(name, inner) and (not same or self._add_once(f"{name} wrapper", value))
        return isinstance(value, types.FunctionType) and self._add_once(name, value)

    def _add_once(self, name: str, function: types.FunctionType) -> bool:
        if id(function) in self._met:
            return True
        self._met[id(function)] = function
        if str(function.__globals__.get("__name__")).startswith("torch."):  # a decorator of torch's
            return self._closed_over(name, function)
        return self._function(name, function)

    def _function(self, name: str, function: types.FunctionType) -> bool:
        raise NotImplementedError

    def _note_values(
        self, function: types.FunctionType, names: Iterable[str], pairs: Iterable[tuple[str, str]], attributes: set[str]
    ) -> None:
        """Note where values may be that a function reads: names of its module, attributes of what these are, and of the classes of the half."""
        module = str(function.__globals__.get("__name__"))
        for name in names:
            if type(function.__globals__.get(name)) is not bool:
                self.places[f"{module}:{name}"] = function.__globals__, name
        self.makes_tensors = self.makes_tensors or not (_FACTORIES.isdisjoint(attributes) and _FACTORIES.isdisjoint(names))
        own = next((cls for cls in self.classes[:1] if is_function(cls)), None)  # a module's are in its node
        for name in attributes & {name for cls in self.classes for name in names_in(cls)} if own is not None else ():
            self.places[f"{own_name(own)[0]}:{own_name(own)[1]}.{name}"] = own, name
        for name, attribute in pairs:
            holder = _holder_of(function.__globals__.get(name), module.partition(".")[0])
            if holder is not None and holder is not own:
                self.places[f"{module}:{name}.{attribute}"] = holder, attribute

    def _put(self, name: str, words: Iterable[str]) -> None:
        self.parts.setdefault(name, []).extend(words)

    def _closed_over(self, name: str, function: types.FunctionType, changing: Iterable[str] = ()) -> bool:
        """What a function took from the function around it: functions and plain values."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                continue
            if isinstance(value, types.FunctionType):
                near = value.__globals__ is function.__globals__ or value.__globals__.get("__name__") in self._modules
                if near and not self.add(f"{name} {variable}", value):
                    return False
            elif _is_plain(value) and variable not in changing:
                self._put(f"{name} {variable}", [_value(value)])
        return True


class _SourceClosure(_Closure):
    """By the syntax tree."""

    def _function(self, name: str, function: types.FunctionType) -> bool:
        source = source_of(function)
        nodes = source.nodes_of(function.__code__) if source is not None else []
        if source is None or not nodes:
            return False
        self._put(name, (word for node in nodes for word in _words(node)))
        return self._closed_over(name, function, source.nonlocals) and all(self._reads(source, node, function) for node in nodes)

    def _reads(self, source: _Source, node: ast.AST, function: types.FunctionType) -> bool:
        """Take in what a part of a module reads of that module, and of the classes that the half belongs to."""
        own = [node for cls in self.classes for node in source.classes.get(str(own_name(cls)[1]), ())]
        for name in sorted(source.names_in(node)):
            beside = function.__globals__.get(name)
            if isinstance(beside, types.FunctionType) and beside.__globals__ is function.__globals__:
                if not self.add(name, beside):
                    return False
            elif not all(self._node(source, name, each, function) for each in source.top.get(name, ()) if each not in own):
                return False
        inner = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
        attributes = {each.attr for each in inner}
        self.written |= {each.attr for each in inner if not isinstance(each.ctx, ast.Load)}
        self.written |= {name for each in ast.walk(node) if (name := _changed_by(each))}
        self.written |= {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
        if isinstance(node, _FUNCTIONS):
            pairs = [(each.value.id, each.attr) for each in inner if isinstance(each.value, ast.Name)]
            self._note_values(function, source.names_in(node), pairs, attributes)
        return all(
            self._node(source, f"{cls.name}.{name}", each, function)
            for cls in own
            for name, nodes in _bound(cls.body).items()
            if name in attributes and name != "apply"
            for each in nodes
        )

    def _node(self, source: _Source, name: str, node: ast.AST, function: types.FunctionType) -> bool:
        if id(node) in self._met:
            return True
        self._met[id(node)] = node
        self._put(name, _words(node))
        return self._reads(source, node, function)


class _CodeClosure(_Closure):
    """By the code objects."""

    def _function(self, name: str, function: types.FunctionType) -> bool:
        self._put(name, _code_words(function.__code__))
        for code in _codes(function.__code__):
            loads = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
            called = [(each, function.__globals__.get(each)) for each in sorted(loads)]
            called += [(f"{own_name(cls)[1]}.{each}", names_in(cls).get(each)) for cls in self.classes for each in code.co_names]
            self._note_values(function, loads, (), set(code.co_names))
            self.written |= {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_GLOBAL", "STORE_ATTR")}
            if any(map(is_changing, code.co_names)) or any(each.opname == "STORE_SUBSCR" for each in dis.get_instructions(code)):
                self.written |= loads | set(code.co_names)  # of which of them is not known
            for other, value in called:
                inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(inner, types.FunctionType) and inner.__globals__ is function.__globals__ and not self.add(other, inner):
                    return False
        return self._closed_over(name, function)


def _changed_by(node: ast.AST) -> str:
    """The name of what a syntax tree changes: it sets an item of it, or asks for a method that changes it; "" for others."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _name_of(node.value)
    return _name_of(node.value) if isinstance(node, ast.Attribute) and is_changing(node.attr) else ""


def is_changing(method: str) -> bool:
    """Whether a method of that name changes a list or a tensor in place."""
    return method in _CHANGING or (method.endswith("_") and not method.startswith("_"))


def _name_of(node: ast.AST) -> str:
    """The last name of ``a.b.c``; of ``a[0].b`` too, as what is changed stands in it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _holder_of(value: Any, package: str) -> Any:
    """What has the attributes of a value, a class, a namespace or a module of the same package; None for others, whose attributes code may make."""
    if is_class(value):
        return value if str(own_name(value)[0]).partition(".")[0] == package else None
    if type(value) in (types.SimpleNamespace, argparse.Namespace):
        return vars(value)
    return vars(value) if type(value) is types.ModuleType and value.__name__.partition(".")[0] == package else None


# ---------------------------------------------------------------------------------------------------------- sources


class _Source:
    """The text of a module, taken apart.

    Attributes:
        top: What the module binds at its top level: a name -> the statements.
        classes: The classes, by their qualified names.
        nonlocals: Variables that functions change in the functions around them.
    """

    def __init__(self, text: str) -> None:
        with warnings.catch_warnings():  # of escapes that Python will not know some day
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            self._code = compile(tree, "<source>", "exec", dont_inherit=True)
            table = symtable.symtable(text, "<source>", "exec")
        self.top = _bound(tree.body)
        self.classes = defaultdict[str, list[ast.ClassDef]](list)
        self._functions = defaultdict[tuple[str, int], list[ast.AST]](list)
        self.nonlocals = {name for node in ast.walk(tree) if isinstance(node, ast.Nonlocal) for name in node.names}
        self._list(tree, "")
        self._tables = defaultdict[tuple[str, int], list[symtable.SymbolTable]](list)
        waiting = [table]
        while waiting:
            each = waiting.pop()
            self._tables[each.get_name(), each.get_lineno()].append(each)
            waiting += each.get_children()

    def _list(self, tree: ast.AST, path: str) -> None:
        waiting = [(tree, path)]
        while waiting:
            node, path = waiting.pop()
            if isinstance(node, _FUNCTIONS):
                name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
                first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
                self._functions[name, first].append(node)
                path = f"{path}{name}.<locals>."
            elif isinstance(node, ast.ClassDef):
                self.classes[path + node.name].append(node)
                path = f"{path}{node.name}."
            waiting += [(child, path) for child in ast.iter_child_nodes(node)]

    def nodes_of(self, code: types.CodeType) -> list[ast.AST]:
        """The functions of the text that a code object may be of; none where it was made of another text."""
        nodes = self._functions.get((code.co_name, code.co_firstlineno), [])
        if any(isinstance(each, ast.Assert) for node in nodes for each in ast.walk(node)):
            return nodes  # pytest rewrites it, and -O leaves it out
        return nodes if any(_is_same(code, each) for each in self._compiled.get((code.co_name, code.co_firstlineno), ())) else []

    @functools.cached_property
    def _compiled(self) -> dict[tuple[str, int], list[types.CodeType]]:
        found = defaultdict[tuple[str, int], list[types.CodeType]](list)
        for code in _codes(self._code):
            found[code.co_name, code.co_firstlineno].append(code)
        return found

    def names_in(self, node: ast.AST) -> set[str]:
        """The names of the module that a statement or function of it reads."""
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        outside = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ())]
        if isinstance(node, _FUNCTIONS):
            outside += [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
        found = {each.id for part in outside for each in ast.walk(part) if isinstance(each, ast.Name)}
        waiting = list(self._tables["lambda" if isinstance(node, ast.Lambda) else node.name, node.lineno])
        while waiting:
            table = waiting.pop()
            found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
            waiting += table.get_children()
        return found


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> _Source | None:
    try:
        return _Source(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def source_of(function: types.FunctionType) -> _Source | None:
    """The text of the module that a function stands in, as it is now."""
    name = function.__code__.co_filename
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, function.__globals__))
    return _parsed(text) if text else None


def _bound(body: Iterable[ast.stmt]) -> dict[str, list[ast.AST]]:
    """What statements bind, by name; imports are another module's matter."""
    found = defaultdict[str, list[ast.AST]](list)
    waiting = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name].append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        found[each.id].append(node)
        elif isinstance(node, _BLOCKS):
            inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            waiting += [*(each for part in inner for each in part), *(s for h in getattr(node, "handlers", ()) for s in h.body)]
    return found


def _words(node: ast.AST) -> Iterator[str]:
    """A syntax tree as words that every release of Python makes alike."""
    stack: list[Any] = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, ast.Constant):
            yield _value(item.value)
        elif isinstance(item, ast.AST):
            yield f"({type(item).__name__.replace('AnnAssign', 'Assign')}"
            stack.append(")")
            fields = {name: value for name, value in ast.iter_fields(item) if name not in _SILENT and value is not None}
            if isinstance(item, ast.AnnAssign):
                fields["targets"] = [fields.pop("target")]
            for name, value in sorted(fields.items(), reverse=True):
                if isinstance(value, list):
                    value = _items(item, name, value)
                    stack += [*reversed(value), *([name] if value else [])]
                else:
                    stack += [value if isinstance(value, ast.AST) else _value(value), name]


def _items(node: ast.AST, name: str, items: list[Any]) -> list[Any]:
    """A list of a syntax tree: statements without those that do nothing, parts of an f-string as every release has them."""
    if name in ("body", "orelse", "finalbody") and not isinstance(node, ast.Lambda):
        return [each for each in items if not _does_nothing(each)]
    if isinstance(node, ast.JoinedStr):
        joined: list[Any] = []
        for each in items:
            if isinstance(each, ast.Constant) and joined and isinstance(joined[-1], ast.Constant):
                joined[-1] = ast.Constant(str(joined[-1].value) + str(each.value))
            elif not isinstance(each, ast.Constant) or each.value:
                joined.append(each)
        return joined
    return [each if isinstance(each, ast.AST) else _value(each) for each in items]


def _does_nothing(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass) or (isinstance(node, ast.AnnAssign) and node.value is None)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _value(value: Any) -> str:
    if type(value) is tuple:
        return f"({','.join(map(_value, value))})"
    if type(value) is frozenset:
        return f"{{{','.join(sorted(map(_value, value)))}}}"
    return f"{type(value).__name__} {hex(value) if type(value) is int else ascii(value)}"


# ------------------------------------------------------------------------------------------------------ code objects


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those inside it."""
    waiting = [code]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]


def _code_words(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield from (each.co_code.hex(), *each.co_names, *each.co_varnames, *each.co_freevars)
        yield from (_value(value) for value in each.co_consts if not isinstance(value, types.CodeType))


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    return list(_code_words(one)) == list(_code_words(other))
