"""Whether a backward gives None in a place whatever it is called with, by its source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["always_none"]


def always_none(backward: Callable[..., Any] | None, place: int) -> bool:
    """Whether each return of a function says None for a place of its results: ``return g * s, None`` does for place 1.

    Args:
        backward: The function; one in decorators that keep ``__wrapped__`` is unwrapped.
        place: The number of the result.

    Returns:
        False where that is not so, or there is no source that could be read.
    """
    returns = _returns(inspect.unwrap(backward)) if backward is not None else None
    return returns is not None and all(_is_none(value, place) for value in returns)


@functools.lru_cache(maxsize=1024)
def _returns(function: Callable[..., Any]) -> tuple[ast.expr | None, ...] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):  # a lambda, among other things of its line
        return None
    nodes = list(_own(definition))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        return None
    return tuple(node.value for node in nodes if isinstance(node, ast.Return))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a function, and not in one inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own(child)


def _is_none(value: ast.expr | None, place: int) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_none(value.body, place) and _is_none(value.orelse, place)
    if isinstance(value, ast.Tuple):
        before = value.elts[: place + 1]
        if len(before) <= place or any(isinstance(item, ast.Starred) for item in before):
            return False
        return _is_none_itself(before[place])
    return value is None or _is_none_itself(value)


def _is_none_itself(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
