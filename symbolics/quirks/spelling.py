"""The spellings of a call that torch's own parser takes, and the one that what stands for the call is written for.

``torch.all(x, axis=-1, keepdims=True)``, ``torch.all(input=x, dim=-1, keepdim=True)`` and ``x.all(-1, True)`` are one call. The names of
arguments are those of the schemas that torch ships; what its parser takes beside them is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from symbolics import torch_private as private

__all__ = ["Form", "forms", "spelled"]

_FIRST = ("input", "x", "a", "x1")  # what Python calls the argument that is `self` in a schema
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}
_METHOD = type(str.join)


@dataclass(frozen=True)
class Form:
    """One of the ways in which the arguments of a function may be given.

    Attributes:
        order: The names of those that may be given by position.
        named: Those that are given by name alone.
        needed: Those without a default.
        spread: Whether the second one, a list, may be given as all that follow.
        numbers: Those that are no tensors.
        canon: The order that is meant, where that is another one.
    """

    order: tuple[str, ...]
    named: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    spread: bool = False
    numbers: tuple[str, ...] = ()
    canon: tuple[str, ...] = ()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by their names; None where this form does not take them."""
        if self.spread and len(args) > 1 and not isinstance(args[1], (tuple, list)):
            args = (args[0], args[1:])
        if len(args) > len(self.order):
            return None
        bound = dict(zip(self.order, args))
        for key, value in kwargs.items():
            name = key
            if key not in self.named and key not in self.order:
                name = "self" if key in _FIRST and "self" in self.order else _NUMPY.get(key, "")
                if name not in self.order and name not in self.named:
                    return None
            if name in bound:
                return None
            bound[name] = value
        if not self.needed <= bound.keys() or any(isinstance(bound[name], torch.Tensor) for name in self.numbers):
            return None
        return bound


_BY_HAND = {  # torch's parser has these apart from its schemas
    "copy_": Form(("self", "other", "non_blocking"), needed=frozenset({"self", "other"})),
    "nonzero": Form(("self",), frozenset({"as_tuple"}), frozenset({"self"})),
}


def _forms_of(func: Any) -> list[Form]:
    name = getattr(func, "__name__", "")
    if func is torch.Tensor.where:  # whose schema begins with the condition
        return [Form(("self", "condition", "other"), needed=frozenset({"self", "condition", "other"}))]
    found = []
    for schema in private.signatures_of(name):
        if any(argument.is_out for argument in schema.arguments):  # out= goes past all this
            continue
        order = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
        named = {argument.name for argument in schema.arguments if argument.kwarg_only}
        spread = isinstance(func, _METHOD) and len(order) == 2 and str(schema.arguments[1].type).startswith("List")
        found.append(
            Form(
                order,
                frozenset(named | {"requires_grad"} if "pin_memory" in named else named),  # the parser's alone, of what makes a tensor
                frozenset(argument.name for argument in schema.arguments if not argument.has_default_value()),
                spread,
            )
        )
    return [*_old(found, isinstance(func, _METHOD)), *found, *([_BY_HAND[name]] if name in _BY_HAND else ())]


def _old(found: Iterable[Form], method: bool) -> list[Form]:
    """``torch.addmm(beta, x, alpha, one, two)``, ``torch.addcdiv(x, value, one, two)``: torch warns of them, and takes them."""
    made = []
    for form in found:
        first, *rest = form.order
        if len(rest) != 2 or first != "self":
            continue
        for numbers in (("beta", "alpha"), ("beta",), ("value",)):
            if form.named != {"beta", "alpha"} if "beta" in numbers else form.named != {"value"}:
                continue
            before = (first, *numbers) if method or numbers == ("value",) else (numbers[0], first, *numbers[1:])
            made.append(Form((*before, *rest), needed=frozenset((*before, *rest)), numbers=numbers, canon=form.order))
    return made


def forms(functions: Iterable[Any]) -> dict[Any, list[Form]]:
    """The forms of each of torch's functions that its parser serves; one of Python has its arguments in order when it is seen."""
    return {function: found for function in functions if not hasattr(function, "__code__") and (found := _forms_of(function))}


def spelled(
    table: Mapping[Any, list[Form]], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position as far as they go without a gap, and the others by the names of torch's schemas.

    Args:
        table: What `forms` made.
        func, args, kwargs: The call.

    Returns:
        The arguments as they are where the function is not in the table, or takes no such arguments: it says so itself.
    """
    for form in table.get(func, ()) if kwargs or len(args) > 1 else ():
        given = {key: value for key, value in kwargs.items() if key != "out"}
        bound = form.bind(args, given)
        if bound is not None:
            first = []
            for name in form.canon or form.order:
                if name not in bound:
                    break
                first.append(bound.pop(name))
            return tuple(first), bound if "out" not in kwargs else {**bound, "out": kwargs["out"]}
    return args, kwargs
