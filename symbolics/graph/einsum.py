"""The subscripts of an Einsum."""

from __future__ import annotations

import string
from collections.abc import Sequence

import onnx_ir as ir

from symbolics.graph.values import unsupported

__all__ = ["axes_in_order", "subscripts"]


def axes_in_order(terms: Sequence[str]) -> list[list[int]]:
    """Of each operand, its axes in the order in which their letters come first in the equation."""
    order: dict[str, int] = {}
    for term in terms:
        for letter in term:
            order.setdefault(letter, len(order))
    return [sorted(range(len(term)), key=lambda axis: order[term[axis]]) for term in terms]


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
        letters = left.replace("...", "").replace(",", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    terms = [t.replace("...", ellipsis[len(ellipsis) - w :]) for t, w in zip(terms, widths)]
    return terms, right.replace("...", ellipsis)
