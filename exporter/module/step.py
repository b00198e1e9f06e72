"""The forward and the backward of a loaded file as one node of autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from exporter.errors import shorten
from exporter.module.higher import Versions, differentiate, looped
from exporter.module.plans import Plan, Plans
from exporter.module.residuals import Residuals
from exporter.module.torch_kernels import beside
from exporter.runtime.sums import backward_pass
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.names import GRADIENTS_KEY
from symbolics.text import shown

__all__ = ["ForwardRun", "Step", "TransformedStep"]


_Tangents = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


class ForwardRun:
    """One run of a forward beside its tensors. A plain object: torch.func hands it on as it is.

    Attributes:
        plans, plan: The sessions.
        tangents: Gives the tangents of the outputs by name, from the tensors and the tangents of those that move.
        apart: Whether the tensors are dual tensors whose tangents somebody else passes on.
        updates: The values that buffers get, and what their statistics are made of.
        kept: What the forward has left for a backward; under vmap one for each of the batch.
    """

    __slots__ = ("apart", "kept", "plan", "plans", "tangents", "updates")

    def __init__(self, plans: Plans, plan: Plan, tangents: _Tangents | None = None, apart: bool = False) -> None:
        self.plans = plans
        self.plan = plan
        self.tangents = tangents
        self.apart = apart
        self.updates: dict[str, torch.Tensor] = {}
        self.kept: list[Residuals] = []

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The model's outputs, from tensors in the order of the plan's names; the rest stays here."""
        plan = self.plan
        runner = plan.forward
        found, handles = runner.run_owning([values[place] for place in plan.feeds])
        if plan.wanted or handles:
            self.kept.append(Residuals({name: found[place] for name, place in plan.residuals}, handles, self.plans.store))
        if plan.updates:
            names, places = plan.updates
            self.updates.update(zip(names, runner.tensors(found, places), strict=True))
        return runner.tensors(found, plan.results)


def _keep(ctx: Any, run: ForwardRun, values: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], key: torch.Tensor | None) -> None:
    """What a backward will need; outputs without a gradient are marked so."""
    plan = run.plan
    ctx.run = run
    if plan.refused is not None:
        return
    # A buffer gets its next value before the backward, which reads this one.
    read = [values[place].clone() if changes else values[place] for place, changes in plan.reads]
    # Tensors that the caller knows are watched by autograd: a change in place before the backward is an error there.
    ctx.save_for_backward(*read, *[results[place] for place in plan.own])
    # Only a gradient of a gradient reads the others. Not saved: whoever changes them in place before a plain backward may.
    ctx.others = Versions({name: values[place] for name, place in plan.unread})
    ctx.key, ctx.freed = key, False
    ctx.shapes = [values[wanted.place].shape for wanted in plan.wanted]
    if plan.flat:
        ctx.mark_non_differentiable(*(results[place] for place in plan.flat))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangents: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """One run of the gradient graph; absent cotangents stay absent.

    Raises:
        RuntimeError: What the forward has left is used up, or a tensor was changed in place.
        FormatError: The file's gradient of a value has another shape than the value.
        RunError: A cotangent is a batch of autograd's own making; or the gradients would have tangents that nobody computes.
        UnsupportedOperatorError, RunError: The plan has no gradients.
    """
    run, plan = ctx.run, ctx.run.plan
    if plan.refused is not None:
        raise plan.refused.with_traceback(None)
    given = {name: g for name, place in plan.cotangents if (g := cotangents[place]) is not None}
    watched = ctx.saved_tensors
    if ctx.freed:
        raise RuntimeError("Trying to backward through the graph a second time: call backward(retain_graph=True) the first time")
    gradients: list[torch.Tensor | None] = [None] * len(plan.names)
    if not given:
        return gradients
    if any(map(private.is_legacy_batch, given.values())):
        raise RunError(
            "a loaded file takes no batch of cotangents (is_grads_batched=True, vectorize=True).\n"
            "  way out: torch.func.jacrev, which runs it once for each, or vectorize=False"
        )
    forward_mode = private.forward_level() >= 0
    if forward_mode and run.apart:
        raise RunError(
            "a gradient of a loaded file, inside of a torch.autograd.forward_ad.dual_level() in which the file was given dual tensors: it would have "
            "no tangent.\n  way out: torch.func.jvp of torch.func.grad (torch.func.hessian), or take the gradient when the level is closed"
        )
    needed = ctx.needs_input_grad
    if torch.is_grad_enabled() or private.transforms_active() or (forward_mode and any(map(private.may_move, given.values()))):
        found = _differentiable(ctx, watched, given)
        return [found.get(name) if needed[place + 1] else None for place, name in enumerate(plan.names)]
    for i, g in _run_backward(ctx, watched, given):
        wanted, shape = plan.wanted[i], ctx.shapes[i]
        if not needed[wanted.place + 1] or wanted.reach.isdisjoint(given):
            continue
        gradients[wanted.place] = g
        if g.shape != shape:
            raise FormatError.damaged(
                f"metadata {GRADIENTS_KEY}",
                f"what it names as the gradient of {shown(wanted.name)!r} has the shape {list(g.shape)}, not {list(shape)}",
            )
    return gradients


def _run_backward(ctx: Any, watched: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]) -> Iterable[tuple[int, torch.Tensor]]:
    """Gradients, each with its place among the plan's `wanted`."""
    run, plan, plans = ctx.run, ctx.run.plan, ctx.run.plans
    residuals = run.kept[0 if ctx.key is None else int(ctx.key)]
    backward = plan.orders.plain(given)
    if backward is None:
        return []
    row = [*residuals.values.values(), *watched[: len(plan.reads)], *given.values()]
    if backward.others:
        ctx.others.check(backward.others)
        row += [ctx.others.tensors[name] for name in backward.others]
    keep = private.keeps_graph()
    if not keep:
        ctx.freed, ctx.others = True, None
        if not residuals.shared:
            residuals.values = None
    feeds = [row[place] for place in backward.feeds]
    room = backward.room([ctx.shapes[i] for i in backward.wanted[: len(backward.gradients)]], plans.pool)
    around: contextlib.AbstractContextManager[dict[str, torch.Tensor]] = beside() if backward.passed else contextlib.nullcontext({})
    with around as passed, backward_pass() if residuals.shared else contextlib.nullcontext():
        found, handles = plans.run_backward(backward.runner, feeds, keep or residuals.shared, room)
    plans.store.free_all(handles)
    if not keep and not residuals.shared:
        residuals.close()
    gradients = [room[place] for place in backward.gradients] if room else backward.runner.tensors(found, backward.gradients)
    return zip(backward.wanted, [*gradients, *(passed[name] for name in backward.passed)], strict=True)


def _differentiable(ctx: Any, watched: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients as results of a `Gradient`, which has a gradient itself."""
    run, plan = ctx.run, ctx.run.plan
    count = len(plan.reads)
    operands = Versions(dict(zip(plan.partition.reads, watched[:count], strict=True)))
    operands.add(ctx.others)
    own = Versions({str(i): value for i, value in enumerate(watched[count:])})
    ctx.freed = not (private.keeps_graph() or torch.is_grad_enabled())
    return differentiate(plan.orders, None, run.kept, ctx.key, operands, own, given)


class Step(torch.autograd.Function):
    """The forward and the backward of a file as one node of autograd."""

    @classmethod
    def call(cls, run: ForwardRun, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`apply` outside of torch.func: what torch 2.13 does in Python before it takes as long as the rest of it."""
        return super(torch.autograd.Function, cls).apply(run, *map(private.unwrap_if_dead, values))  # type: ignore[misc]

    @staticmethod
    def forward(ctx: Any, run: ForwardRun, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One run of the forward."""
        results = tuple(run(values))
        _keep(ctx, run, values, results, None)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One run of the gradient graph, or of a `Gradient` where that will be differentiated."""
        try:
            return (None, *_backward(ctx, cotangents))
        except Exception as error:
            shorten(error)
            raise


class TransformedStep(torch.autograd.Function):
    """The same as torch.func takes it: forward without ctx. Outside of a transform it would be slower, by torch's way of calling it."""

    @staticmethod
    def forward(run: ForwardRun, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One run of the forward; then the number of what it has left."""
        results = run(values)
        return (*results, torch.tensor(len(run.kept) - 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """As `Step`."""
        run, *values = inputs
        *results, key = output
        ctx.run = run
        ctx.save_for_forward(*values)
        if run.plan.orders is None and run.plan.refused is None:
            ctx.mark_non_differentiable(*(output if run.plan.partition is not None else (o for o in output if not o.is_floating_point())))
            return
        _keep(ctx, run, tuple(values), tuple(results), key)

    backward = Step.backward

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One run for each of the batch."""
        return looped(TransformedStep.apply, info, in_dims, args)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One run of the tangent graph."""
        run = ctx.run
        names = run.plan.names
        moved = {name: t for name, t in zip(names, tangents, strict=True) if t is not None}
        found = run.tangents(dict(zip(names, ctx.saved_tensors, strict=True)), moved)
        return (*(found.get(name) for name in run.plan.outputs), None)
