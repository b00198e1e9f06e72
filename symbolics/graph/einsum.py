"""The subscripts of an Einsum."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import unsupported

__all__ = ["apart", "axes_in_order", "sizes_of_result", "subscripts"]

#: The sizes of an operand: numbers, or what stands for one that is not known; None where the rank is not.
Shape = Sequence[Any] | ir.Shape | None


def axes_in_order(terms: Sequence[str]) -> list[list[int]]:
    """Of each operand, its axes in the order in which their letters come first in the equation."""
    order: dict[str, int] = {}
    for term in terms:
        for letter in term:
            order.setdefault(letter, len(order))
    return [sorted(range(len(term)), key=lambda axis: order[term[axis]]) for term in terms]


def apart(equation: str, shapes: Sequence[Shape]) -> str:
    """An equation in which no axis of one element is stretched along a letter: it has a letter of its own, and is summed.

    Args:
        equation: The equation; where it does not fit the shapes it stays as it is.
        shapes: Of the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return equation
    pairs = [_axes(term, shape) for term, shape in zip(terms, shapes)]
    long = {letter for found in pairs for letter, dim in found if dim != 1}
    free = iter(letter for letter in string.ascii_letters if letter not in equation)
    for place, found in enumerate(pairs):
        for letter in {letter: None for letter, dim in found if dim == 1 and letter in long}:
            if any(other == letter and dim != 1 for other, dim in found):
                continue  # a diagonal of sides that differ: no Einsum
            own = next(free, None)
            if own is None:
                return equation
            terms[place] = terms[place].replace(letter, own)
    if terms == left.split(","):
        return equation
    return f"{','.join(terms)}->{right if arrow else _result(left)}"


def sizes_of_result(equation: str, shapes: Sequence[Shape], inferred: Sequence[Any]) -> list[Any]:
    """The sizes of what an Einsum gives, where ONNX's inference takes 1 from an axis that is stretched."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms, found = left.split(","), list(inferred)
    long = {letter: dim for term, shape in zip(terms, shapes) for letter, dim in _axes(term, shape) if shape is not None and dim != 1}
    front, _, back = (right if arrow else _result(left)).partition("...")
    if len(found) >= len(front) + len(back):
        for axis, letter in [*enumerate(front), *((place - len(back), letter) for place, letter in enumerate(back))]:
            found[axis] = long.get(letter, 1) if found[axis] == 1 else found[axis]
    return found


def _axes(term: str, shape: Shape) -> list[tuple[str, Any]]:
    """The letters of an operand, each with its size; those under an ellipsis have none."""
    front, dots, back = term.partition("...")
    count = len(front) + len(back)
    if shape is None:
        return [(letter, None) for letter in front + back]
    if len(shape) < count or (not dots and len(shape) != count):
        return []
    return [*zip(front, shape), *zip(back, shape[len(shape) - len(back) :])]


def _result(left: str) -> str:
    """The subscripts of the result where the equation does not say them."""
    letters = left.replace("...", "").replace(",", "")
    return "..." * ("..." in left) + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))


def subscripts(node: ir.Node, ranks: Sequence[int | None], equation: str) -> tuple[list[str], str]:
    """The subscripts of the operands and of the output, with letters for the ellipsis, the output explicit.

    Args:
        node: The Einsum, for messages.
        ranks: Of its operands; None where one is not known, which an operand with an ellipsis must not have.
        equation: Its equation.

    Raises:
        UnsupportedOperatorError: The equation does not fit the ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    widths = [-1 if r is None else r - len(t.replace("...", "")) for r, t in zip(ranks, terms)]
    if len(terms) != len(ranks) or any(w < 0 if "..." in t else r not in (None, len(t)) for w, r, t in zip(widths, ranks, terms)):
        raise unsupported(node, f"the equation {equation!r} does not fit the ranks of the inputs")
    widths = [w if "..." in t else 0 for w, t in zip(widths, terms)]
    ellipsis = "".join(free[: max(widths)])
    if not arrow:
        right = _result(left)
    terms = [t.replace("...", ellipsis[len(ellipsis) - w :]) for t, w in zip(terms, widths)]
    return terms, right.replace("...", ellipsis)
