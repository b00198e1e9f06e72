"""The gradients of a loaded file as nodes of autograd of their own: create_graph=True, and the transforms of torch.func.

A node holds the tensors that its run has read and what that has left; its backward is a node of the next order. Under torch.func a
backward gets tensors of transforms, of which some are batches; they become plain ones by a Function's way through torch.func, and what
a run has left is found by a number, a tensor of its own: of a batch it is one number for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from exporter.module.orders import Order, Orders
from exporter.module.residuals import Residuals
from exporter.runtime.sums import backward_pass, batch_of_pass
from exporter.runtime.tensors import tensor
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.names import GRADIENTS_KEY
from symbolics.text import shown

__all__ = ["Gradient", "Versions", "differentiate", "looped"]

_USED_UP = "Trying to backward through the graph a second time: call backward(retain_graph=True) the first time"


class Versions:
    """Tensors as they were, so that one that was changed in place since is an error."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        try:
            self._before = {name: value._version for name, value in tensors.items()}
        except RuntimeError:  # tensors of inference mode count none
            self._before = {name: 0 if value.is_inference() else value._version for name, value in tensors.items()}

    def add(self, others: Versions) -> None:
        """Those too, as they were then."""
        self.tensors |= others.tensors
        self._before |= others._before

    def check(self, names: Sequence[str]) -> None:
        """Raises RuntimeError, torch's own, where one of these was changed."""
        for name in names:
            value = self.tensors.get(name)
            if value is not None and not value.is_inference() and value._version != self._before[name]:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: {name!r} of a loaded file"
                )


@dataclass
class _Call:
    """What a `Gradient` takes beside tensors; torch.func hands it on as it is.

    Attributes:
        orders, order: The gradients of the file, and which session of them runs.
        source: What the runs of the order below have left.
        kept: What the runs of this call leave.
        keyed: Whether a number says which of them.
        read: Tensors that other nodes hold and that must not change, either.
    """

    orders: Orders
    order: Order
    source: Sequence[Residuals]
    keyed: bool
    read: Versions
    kept: list[Residuals] = field(default_factory=list)


class Gradient(torch.autograd.Function):
    """One run of the gradients of some order."""

    @staticmethod
    def forward(call: _Call, key: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients, None for those that eager has not, then the number of what the run has left where one is wanted."""
        order, plans = call.order, call.orders.plans
        source = call.source[0 if key is None else int(key)]
        if source.values is None:
            raise RuntimeError(_USED_UP)
        given = {**source.values, **dict(zip(order.operands, tensors, strict=True))}
        values, handles = plans.run_backward(order.runner, [given[name] for name in order.runner.inputs], retain=True)
        found = {name: values[i] for i, name in enumerate(order.runner.names)}
        left = Residuals({**source.values, **{name: found[name] for name in order.left}}, handles, plans.store)
        left.below = source
        call.kept.append(left)
        absent = {name for name, flag in order.presence.items() if not tensor(found[flag])}
        results = [None if name in absent else tensor(found[name]) for name in order.results]
        return (*results, torch.tensor(len(call.kept) - 1)) if call.keyed else tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep the tensors, which the next order reads."""
        call, _, *tensors = inputs
        ctx.call = call
        ctx.key = output[-1] if call.keyed else None
        ctx.versions = Versions(dict(zip(call.order.operands, tensors, strict=True)))
        if call.keyed:
            ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)
        ctx.freed = False
        ctx.likes = [None if value is None else (value.shape, value.dtype) for value in output]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The next order."""
        call = ctx.call
        if ctx.freed:
            raise RuntimeError(_USED_UP)
        order = call.order
        given = {name: g for name, g in zip(order.results, cotangents, strict=False) if g is not None}
        if not given:
            return (None, None, *(None for _ in order.operands))
        found = differentiate(call.orders, order, call.kept, ctx.key, ctx.versions, call.read, given)
        ctx.freed = not (private.keeps_graph() or torch.is_grad_enabled())
        if ctx.freed:
            ctx.versions = None
        return (None, None, *(found.get(name) if ctx.needs_input_grad[i + 2] else None for i, name in enumerate(order.operands)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One run for each of the batch."""
        return looped(Gradient.apply, info, in_dims, args)

    @staticmethod
    def jvp(ctx: Any, _call: None, _key: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The tangents of the gradients: the next order is linear in its cotangents, and its own gradient by these is the tangent.

        Raises:
            RunError: A tensor moves that the gradients cannot be differentiated by.
            UnsupportedOperatorError, RunError: From `Orders`.
        """
        call = ctx.call
        order = call.order
        directions = {name: t for name, t in zip(order.operands, tangents, strict=True) if t is not None}
        call.orders.check_differentiable(order, directions)
        likes = {name: like for name, like in zip(order.results, ctx.likes, strict=False) if like is not None}
        # Without their tangents: those would ask for the tangents of the next order, and so on.
        operands = Versions({name: forward_ad.unpack_dual(value).primal for name, value in ctx.versions.tensors.items()})

        def transposed(*cotangents: torch.Tensor) -> dict[str, torch.Tensor]:
            given = dict(zip(likes, cotangents, strict=True))
            found = differentiate(call.orders, order, call.kept, ctx.key, operands, call.read, given)
            return {name: found[name] for name in directions if name in found}

        device = call.orders.plans.device
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in likes.values()]
        reached, product = torch.func.vjp(transposed, *zeros)[:2]
        found = product({name: directions[name] for name in reached}) if reached else zeros
        moved = dict(zip(likes, found, strict=True))
        return (*map(moved.get, order.results), *([None] if call.keyed else []))


def differentiate(
    orders: Orders,
    below: Order | None,
    source: Sequence[Residuals],
    key: torch.Tensor | None,
    operands: Versions,
    read: Versions,
    cotangents: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients of some order, in a way that they can be differentiated where grad mode is on.

    Args:
        orders, below: Of which order's gradients; None: of the plan's outputs.
        source: What the runs of the order below have left.
        key: Which of them: a number, None for the first.
        operands: The tensors of the order below by name.
        read: Tensors that must not have changed, either.
        cotangents: Of the outputs of the order below; those that are missing are absent.

    Returns:
        operand -> gradient; those that the given cotangents do not reach are missing.

    Raises:
        RuntimeError: A tensor has been changed in place, or what was left is used up.
        UnsupportedOperatorError, RunError: From `Orders`.
    """
    order = orders.above(below, frozenset(cotangents))
    operands.check([name for name in order.runner.inputs if name in operands.tensors])
    read.check(list(read.tensors))
    for residuals in source:
        residuals.shared = True
    call = _Call(orders, order, source, key is not None or private.transforms_active(), read)
    tensors = [operands.tensors[name] for name in order.operands if name in operands.tensors]
    tensors += [cotangents[output] for output in order.cotangents]
    with backward_pass():
        results = dict(zip(order.results, Gradient.apply(call, key, *tensors), strict=False))  # type: ignore[no-untyped-call]
    reached = {name: results[output] for name, output in order.gradients.items() if order.reach.get(name, frozenset()) & cotangents.keys()}
    found = {name: g for name, g in reached.items() if g is not None}
    for name, g in found.items():
        if name in operands.tensors and g.shape != operands.tensors[name].shape:
            raise FormatError.damaged(
                f"metadata {GRADIENTS_KEY}",
                f"what it names as the gradient of {shown(name)!r} has the shape {list(g.shape)}, not {list(operands.tensors[name].shape)}",
            )
    return found


def looped(apply: Callable[..., tuple[torch.Tensor, ...]], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """A Function's vmap: a session takes no batch of what is not one to its graph, so it runs once for each.

    Raises:
        RunError: The batch has no element: nothing says what shapes the outputs have.
    """
    if not info.batch_size:
        raise RunError("torch.func.vmap of a loaded file runs it once for each element of the batch, and this batch has none")
    rows = []
    for i in range(info.batch_size):
        with batch_of_pass(i):
            rows.append(apply(*(value if dim is None else value.select(dim, i) for value, dim in zip(args, in_dims, strict=True))))
    columns = list(map(_stacked, zip(*rows, strict=True)))
    return tuple(columns), tuple(None if column is None else 0 for column in columns)


def _stacked(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """A batch, with zeros for what some of its elements have not; None where no element has it."""
    like = next((value for value in values if value is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if value is None else value for value in values])
