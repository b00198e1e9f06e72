"""Which side of a branch a call takes, as far as values of modules and of classes decide it that nothing sets again."""

from __future__ import annotations

import ast
import enum
import functools
import linecache
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from symbolics.node.classes import is_class, own_name

__all__ = ["UNDECIDED", "alive", "augmented", "decided", "ends", "is_plain", "is_set_again", "parts"]

#: What nothing is known of.
UNDECIDED: Any = object()
_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Methods that set the attributes of what is being made.
_MAKING = ("__init__", "__new__", "__post_init__")


def is_plain(value: Any) -> bool:
    """Whether a value is one that nothing changes: a number, a text, None, a member of an enum, or a tuple of these."""
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, enum.Enum) or _is_tuple(value)


def _is_tuple(value: Any) -> bool:
    return type(value) in (tuple, frozenset) and all(map(is_plain, value))


def decided(test: ast.expr, value_of: Callable[[ast.expr], Any]) -> Any:
    """The value of an expression, or `UNDECIDED`.

    Args:
        test: The expression.
        value_of: The value of a name or of an attribute, or `UNDECIDED`.
    """
    if isinstance(test, ast.Constant):
        return test.value
    if isinstance(test, (ast.Name, ast.Attribute)):
        return value_of(test)
    if isinstance(test, ast.Tuple):
        values = [decided(each, value_of) for each in test.elts]
        return UNDECIDED if any(value is UNDECIDED for value in values) else tuple(values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = decided(test.operand, value_of)
        return UNDECIDED if value is UNDECIDED else not value
    if isinstance(test, ast.BoolOp):
        stops, found = isinstance(test.op, ast.Or), [decided(each, value_of) for each in test.values]
        for value in found:
            # `x or True` is true whatever x is, of which only that is known.
            if value is not UNDECIDED and bool(value) is stops:
                return value if value is found[0] else stops
        return UNDECIDED if any(value is UNDECIDED for value in found) else found[-1]
    if isinstance(test, ast.Compare):
        values = [
            decided(test.left, value_of),
            *(_compared(each, op, value_of) for each, op in zip(test.comparators, test.ops, strict=True)),
        ]
        if any(value is UNDECIDED for value in values) or not all(type(each) in _OPERATORS for each in test.ops):
            return UNDECIDED
        try:
            return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(test.ops, values, values[1:], strict=False))
        except TypeError:
            return UNDECIDED
    return UNDECIDED


def _compared(expression: ast.expr, op: ast.cmpop, value_of: Callable[[ast.expr], Any]) -> Any:
    """What stands to the right of an operator: a list is what `in` looks into, and equals no tuple."""
    if isinstance(expression, (ast.List, ast.Set)) and isinstance(op, (ast.In, ast.NotIn)):
        expression = ast.Tuple(expression.elts, ast.Load())
    return decided(expression, value_of)


def alive(expression: ast.AST, value_of: Callable[[ast.expr], Any]) -> Iterator[ast.AST]:
    """What `ast.walk` gives of an expression, without the sides of ``and``, ``or`` and ``if else`` that no call comes to."""
    waiting = [expression]
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.IfExp):
            value = decided(node.test, value_of)
            waiting += [
                node.test,
                *([] if value is not UNDECIDED and not value else [node.body]),
                *([] if value is not UNDECIDED and value else [node.orelse]),
            ]
        elif isinstance(node, ast.BoolOp):
            for each in node.values:
                waiting.append(each)
                value = decided(each, value_of)
                if value is not UNDECIDED and bool(value) is isinstance(node.op, ast.Or):
                    break
        else:
            waiting += ast.iter_child_nodes(node)


def augmented(every: Iterable[ast.AST], name: str) -> int:
    """How often a variable is changed by ``+=`` and the like, which leaves a container what it is, and a number not."""
    return sum(isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id == name for each in every)


def ends(statements: Iterable[ast.stmt]) -> bool:
    """Whether nothing behind these statements runs after them."""
    return any(isinstance(each, (ast.Return, ast.Raise, ast.Continue, ast.Break)) for each in statements)


def parts(statement: ast.stmt, value_of: Callable[[ast.expr], Any]) -> tuple[str, ...]:
    """The blocks of a statement that a call may come to."""
    value = decided(statement.test, value_of) if isinstance(statement, ast.While) else UNDECIDED
    return ("body", "orelse") if value is UNDECIDED or value else ("orelse",)


def is_set_again(name: str, function: types.FunctionType, owner: Any = None) -> bool:
    """Whether a module may give a name, or an attribute that is called so, another value after it was loaded.

    Args:
        name: The name.
        function: What reads it. A module without a source may.
        owner: What has the attribute: a module, a class or an object, whose own module is asked as well.
    """
    files = [function.__code__.co_filename]
    if owner is not None:
        module = owner.__name__ if isinstance(owner, types.ModuleType) else str(own_name(owner if is_class(owner) else type(owner))[0])
        files += (
            [getattr(sys.modules[module], "__file__", None) or ""]
            if sys.modules.get(module) is not sys.modules.get(function.__module__)
            else []
        )
    texts = ["".join(linecache.getlines(file, function.__globals__)) for file in files]
    return any((found := _set_in(text)) is None or name in found for text in texts)


@functools.lru_cache(maxsize=32)
def _set_in(text: str) -> frozenset[str] | None:
    """The names that functions of a module declare as others', and the attributes that its code sets, but for those of objects that are being made."""
    try:
        tree = ast.parse(text) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        return None
    made = {
        attribute
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and node.name in _MAKING
        for attribute in ast.walk(node)
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.value, ast.Name) and attribute.value.id == "self"
    }
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node not in made:
            found.add(node.attr)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
            found.add(str(node.slice.value))  # globals()["N"], vars(module)["N"]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            found.update(str(each.value) if isinstance(each, ast.Constant) else "" for each in node.args[1:2])
    return None if "" in found else frozenset(found)
