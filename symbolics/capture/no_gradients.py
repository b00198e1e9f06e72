"""Where the backward of a call gives None for a tensor that needs a gradient: asked of the autograd nodes of an eager run.

PyTorch leaves such a tensor without a gradient: a parameter's ``.grad`` stays None, and no optimizer touches it. Only the backward
itself knows; so each is called once, on random cotangents, while eager's autograd graph is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.always_none import always_none
from symbolics.capture.binding import bind
from symbolics.capture.callsite import Call
from symbolics.capture.inlining import modules_among
from symbolics.capture.interception import belongs_to_torch
from symbolics.errors import ExportError
from symbolics.node.containers import expand_leaves
from symbolics.node.operators import Operator

__all__ = ["Backward", "NoGradients", "backward_of", "needing_gradients"]

#: The tensors of a call that need a gradient: the place of each among what backward returns -> its number among the tensors of the call.
Needing = dict[int, int]
#: The tensors of a call that have no gradient though they need one, by number -> whether that holds for every run, and not only for this one.
Answer = dict[int, bool]


class Askable(Protocol):
    """The backward of one call, of a Function, an operator or a module."""

    @property
    def function(self) -> Any:
        """What was called."""

    @property
    def call(self) -> Call:
        """Where."""

    def ask(self) -> Answer:
        """The tensors that have no gradient though they need one."""


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward of one call.

    Attributes:
        function: The Function class, or the `Operator`.
        node: Its autograd node; None where nobody can ask it.
        needing: Which of its results are asked for.
        outputs: One per result of the call: shape, dtype, device, and whether it has a gradient; None for what is no tensor.
        call: Where the call was made.
    """

    function: Any
    node: Any
    needing: Needing
    outputs: tuple[tuple[torch.Size, torch.dtype, torch.device, bool] | None, ...]
    call: Call

    def ask(self) -> Answer:
        """The tensors that have no gradient though they need one; none where backward cannot be asked."""
        if self.node is None:
            return {}
        try:
            with torch.no_grad():
                found = self.node.apply(*(None if output is None else _cotangent(*output) for output in self.outputs))
        except Exception:  # by random numbers alone no backward is at fault: then nothing is known of it
            return {}
        found = found if isinstance(found, tuple) else (found,)
        code = private.backward_of(private.function_of(self.node))
        return {number: always_none(code, place) for place, number in self.needing.items() if place < len(found) and found[place] is None}


def _cotangent(shape: torch.Size, dtype: torch.dtype, device: torch.device, differentiable: bool) -> torch.Tensor:
    if not differentiable or not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    generator = torch.Generator("cpu").manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=wide, device="cpu").to(device, dtype)


def needing_gradients(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Needing | None:
    """The tensors of a call that is about to be made that need a gradient; None where it has no backward.

    Args:
        function: The Function class, or the `Operator`.
        args, kwargs: The arguments.
    """
    if not torch.is_grad_enabled() or (isinstance(function, type) and belongs_to_torch(function)):
        return None
    needing: Needing = {}
    if private.transforms_active():  # what is called are wrappers, which have no values once their transform has ended
        return needing
    if modules_among(args, kwargs):  # it may write gradients of theirs, which calls hooks of the user's
        return needing
    try:
        bound = bind(function, args, kwargs)[0]
    except ExportError:
        return needing
    place = number = 0
    for value in bound.args:  # keywords have no gradient
        # Of an operator, backward answers for the tensors of a list one by one; of a Function, for its arguments alone.
        leaves = list(expand_leaves([value]))
        parts = leaves if isinstance(function, Operator) and _is_list_of_tensors(value) else [value]
        for part in parts:
            if isinstance(part, torch.Tensor) and part.requires_grad:
                needing[place] = number
            place += 1
            number += sum(isinstance(leaf, torch.Tensor) for leaf in (leaves if part is value else [part]))
    return needing


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)


def backward_of(function: Any, result: Any, needing: Needing | None, call: Call) -> Iterable[Backward]:
    """The backward of a call that was made, as far as it can be asked; nothing where it has none.

    Args:
        function: The Function class, or the `Operator`.
        result: What the call returned.
        needing: As `needing_gradients` gave it before.
        call: Where it was made.
    """
    if needing is None:
        return ()
    if not needing:
        return (Backward(function, None, needing, (), call),)
    values = pytree.tree_leaves(result) if isinstance(function, Operator) else result if isinstance(result, tuple) else (result,)
    nodes = {value.grad_fn for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None}
    if not nodes:
        return ()
    node = nodes.pop()
    asked = private.function_of(node)
    known = private.is_registered_autograd(asked) if isinstance(function, Operator) else asked is function
    outputs = tuple(
        (value.shape, value.dtype, value.device, value.grad_fn is not None) if isinstance(value, torch.Tensor) else None for value in values
    )
    return (Backward(function, None if nodes or not known else node, needing, outputs, call),)


@dataclass
class NoGradients:
    """What the backwards of an eager run gave None for.

    Attributes:
        sites: Function (or operator), module and line of a call -> the tensors without a gradient in each of the calls that were made there.
    """

    sites: dict[tuple[Any, str, str], Answer] = field(default_factory=dict)

    @classmethod
    def ask(cls, backwards: Iterable[Askable]) -> Self:
        """Ask each backward; who opens a listener, or guards a model's state, does it around this."""
        found = cls()
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return found  # a backward may wait for the other processes, and who knows whether they export
        for each in backwards:
            key = (each.function, each.call.module, each.call.source)
            if key not in found.sites or found.sites[key]:
                answer = each.ask()
                known = found.sites.get(key, answer)
                found.sites[key] = {number: known[number] and always for number, always in answer.items() if number in known}
        return found

    def of(self, function: Any, module: str, source: str, kinds: Sequence[str], flags: Sequence[bool]) -> dict[str, tuple[int, ...]]:
        """The tensor inputs of a captured call that have no gradient, as the attributes of its `AutogradCall` that say so.

        Args:
            function, module, source: The Function or operator, and where it is called.
            kinds: The kind of each slot of its arguments.
            flags: Whether each needs a gradient.
        """
        answer = self.sites.get((function, module, source), {})
        tensors = [index for index, kind in enumerate(kinds) if kind == "tensor"]
        found = {index: answer[number] for number, index in enumerate(tensors) if number in answer and flags[index]}
        return {
            "no_gradient": tuple(index for index, always in found.items() if always),
            "no_gradient_seen": tuple(index for index, always in found.items() if not always),
        }
