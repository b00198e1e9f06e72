"""Arithmetic that a file may hold: ``alpha / (2 ** bits - 1)`` over the arguments of a call."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from symbolics.errors import FormatError
from symbolics.text import clean

__all__ = ["Expression"]

_LONGEST, _MOST_PARTS, _LARGEST_POWER = 200, 60, 64
_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("Add", lambda a, b: a + b),
    ast.Sub: ("Sub", lambda a, b: a - b),
    ast.Mult: ("Mul", lambda a, b: a * b),
    ast.Div: ("Div", lambda a, b: a / b),
    ast.Pow: ("Pow", lambda a, b: a**b),
}


class Expression:
    """Numbers and names, ``+ - * / **``, signs and parentheses.

    Args:
        text: The expression, or a number.

    Attributes:
        text: The expression as text.
        names: What it is made of.

    Raises:
        FormatError: It is something else, too long, or has too many parts.
    """

    def __init__(self, text: str | float) -> None:
        self.text = text if isinstance(text, str) else repr(text)
        try:
            if len(self.text) > _LONGEST:
                raise ValueError(f"it is longer than {_LONGEST} characters")
            self._tree = ast.parse(self.text.strip(), mode="eval").body
            parts = list(ast.walk(self._tree))
            if len(parts) > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS} parts")
            for part in parts:
                _check(part)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            said = error.msg if isinstance(error, SyntaxError) else str(error)
            raise FormatError(
                f"{clean(self.text[:60])!r} is no number, name of an argument, or + - * / ** of these: {clean(said)}"
            ) from error
        self.names = {part.id for part in parts if isinstance(part, ast.Name)}

    def said_of(self, names: Mapping[str, str | float]) -> Expression:
        """The same with other names, or numbers, in the place of names."""

        class Other(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                found = names.get(node.id, node.id)
                return ast.Name(found, ast.Load()) if isinstance(found, str) else ast.parse(repr(float(found)), mode="eval").body

        tree = ast.parse(self.text.strip(), mode="eval")
        return Expression(ast.unparse(Other().visit(tree)))

    def value(self, values: Mapping[str, Any]) -> Any:
        """What it comes to; arrays compute in their own type.

        Raises:
            FormatError: It divides by 0, passes all numbers, or has a name without a value.
        """
        return self.made(values, lambda op, a, b: _compute(op, a, b, self.text))

    def made(self, values: Mapping[str, Any], make: Callable[[str, Any, Any], Any]) -> Any:
        """What ``make(operator of ONNX, one, other)`` makes of it, part by part; numbers among themselves are computed.

        Raises:
            FormatError: As of `value`.
        """

        def visit(node: ast.expr) -> Any:
            if isinstance(node, ast.Constant):
                return float(node.value)  # type: ignore[arg-type]
            if isinstance(node, ast.Name):
                if node.id not in values:
                    raise FormatError(f"{clean(self.text)!r}: there is no {clean(node.id)!r}")
                return values[node.id]
            if isinstance(node, ast.UnaryOp):
                inner = visit(node.operand)
                return inner if isinstance(node.op, ast.UAdd) else join("Mul", -1.0, inner)
            assert isinstance(node, ast.BinOp)
            return join(_BINARY[type(node.op)][0], visit(node.left), visit(node.right))

        def join(op: str, one: Any, other: Any) -> Any:
            numbers = isinstance(one, float) and isinstance(other, float)
            return _compute(op, one, other, self.text) if numbers else make(op, one, other)

        return visit(self._tree)


def _check(part: ast.AST) -> None:
    value = part.value if isinstance(part, ast.Constant) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(float(value)):
            raise ValueError("a number of it is not finite")
        return
    allowed: Iterable[type] = (ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, *_BINARY)
    if not isinstance(part, tuple(allowed)):
        raise ValueError(f"{type(part).__name__} is no part of it")


def _compute(op: str, one: Any, other: Any, text: str) -> Any:
    if op == "Pow" and not (isinstance(other, float) and abs(other) <= _LARGEST_POWER):
        raise FormatError(f"{clean(text)!r}: a power is a number, {_LARGEST_POWER} at most")
    compute = next(compute for name, compute in _BINARY.values() if name == op)
    try:
        with np.errstate(all="ignore"):
            found = compute(one, other)
        if isinstance(found, complex):
            raise ValueError("it is no real number")
    except (ArithmeticError, ValueError) as error:
        raise FormatError(f"{clean(text)!r} cannot be computed: {error}") from error
    return found
