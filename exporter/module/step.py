"""The forward and the backward of a loaded file as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from exporter.module.higher import Versions, differentiate, looped
from exporter.module.plans import Plan, Plans
from exporter.module.residuals import Residuals, ready
from exporter.runtime.tensors import tensor
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.names import GRADIENTS_KEY
from symbolics.text import shown

__all__ = ["Run", "Step", "TransformedStep"]


_Tangents = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


class Run:
    """One run of a forward beside its tensors. A plain object: torch.func hands it on as it is.

    Attributes:
        plans, plan: The sessions.
        names: The inputs and the state, in the order of the tensors.
        tangents: Gives the tangents of the outputs by name, from the tensors and the tangents of those that move.
        apart: Whether the tensors are dual tensors whose tangents somebody else passes on.
        updates: The values that buffers get, and what their statistics are made of.
        kept: What the forward has left for a backward; under vmap one for each of the batch.
    """

    def __init__(self, plans: Plans, plan: Plan, names: list[str], tangents: _Tangents, apart: bool) -> None:
        self.plans = plans
        self.plan = plan
        self.names = names
        self.tangents = tangents
        self.apart = apart
        self.updates: dict[str, torch.Tensor] = {}
        self.kept: list[Residuals] = []

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The model's outputs; the rest stays here."""
        plan, partition = self.plan, self.plan.partition
        found = plan.forward.run(ready(dict(zip(self.names, values, strict=True))))
        for entry in plan.statistics:
            self.updates.update((name, tensor(found[name])) for name in entry.values)
        self.updates.update((name, tensor(found[name])) for name in plan.buffers.values())
        if partition is not None and partition.backward is not None:
            handles = [int(found[name].numpy()) for name in partition.contexts]
            self.kept.append(Residuals({name: found[name] for name in partition.residuals}, handles, self.plans.store))
        return [tensor(found[name]) for name in plan.outputs]


def _keep(ctx: Any, run: Run, values: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], key: torch.Tensor | None) -> None:
    """What a backward will need; outputs without a gradient are marked so."""
    plan, partition = run.plan, run.plan.partition
    assert partition is not None
    by_name = dict(zip(run.names, values, strict=True))
    # Tensors that the caller knows are watched by autograd: a change in place before the backward is an error there.
    own = [results[place] for place in plan.own]
    # A buffer gets its next value before the backward, which reads this one.
    read = [by_name[name].clone() if name in plan.updated else by_name[name] for name in partition.reads]
    ctx.save_for_backward(*read, *own)
    # Only a gradient of a gradient reads the others. Not saved: whoever changes them in place before a plain backward may.
    ctx.others = Versions({name: by_name[name] for name in plan.unread})
    ctx.run, ctx.key, ctx.freed = run, key, False
    ctx.likes = [(result.shape, result.dtype) for result in results]
    ctx.shapes = {name: value.shape for name, value in by_name.items()}
    if plan.flat:
        ctx.mark_non_differentiable(*(results[place] for place in plan.flat))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangents: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """One run of the gradient graph; absent cotangents stay absent.

    Raises:
        RuntimeError: What the forward has left is used up, or a tensor was changed in place.
        FormatError: The file's gradient of a value has another shape than the value.
        RunError: A cotangent is a batch of autograd's own making; or the gradients would have tangents that nobody computes.
    """
    run, plan = ctx.run, ctx.run.plan
    partition = plan.partition
    by_output = zip(plan.outputs, cotangents, strict=False)
    given = {name: g for name, g in by_output if g is not None and name in partition.cotangents}
    watched = ctx.saved_tensors
    if ctx.freed:
        raise RuntimeError("Trying to backward through the graph a second time: call backward(retain_graph=True) the first time")
    if not given:
        return [None] * len(run.names)
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
    reads = dict(zip(partition.reads, watched, strict=False))
    differentiated = torch.is_grad_enabled() or private.transforms_active() or (forward_mode and any(map(private.may_move, given.values())))
    find = _differentiable if differentiated else _plain
    wanted = find(ctx, reads, watched[len(reads) :], given)
    return [wanted.get(name) if ctx.needs_input_grad[i + 1] else None for i, name in enumerate(run.names)]


def _plain(
    ctx: Any, reads: dict[str, torch.Tensor], own: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    run, plan, plans = ctx.run, ctx.run.plan, ctx.run.plans
    partition = plan.partition
    residuals = run.kept[0 if ctx.key is None else int(ctx.key)]
    feeds: dict[str, Any] = {**residuals.values, **ready(reads)}
    for name, (shape, dtype) in zip(plan.outputs, ctx.likes, strict=False):
        if name in partition.cotangents:
            g = given.get(name)
            feeds[partition.cotangents[name]] = torch.zeros(shape, dtype=dtype, device=plans.device) if g is None else g.contiguous()
    keep = private.keeps_graph()
    if not keep:
        ctx.freed, ctx.others = True, None
        if not residuals.shared:
            residuals.values = None
    with plans.lock:
        plans.store.retain = keep or residuals.shared
        try:
            found = plan.backward.run(feeds)
        finally:
            plans.store.retain = False
    if not keep and not residuals.shared:
        residuals.close()
    wanted = {name: tensor(found[output]) for name, output in partition.gradients.items() if not partition.reach[name].isdisjoint(given)}
    for name, g in wanted.items():
        shape = ctx.shapes[name]
        if g.shape != shape:
            raise FormatError.damaged(
                f"metadata {GRADIENTS_KEY}",
                f"what it names as the gradient of {shown(name)!r} has the shape {list(g.shape)}, not {list(shape)}",
            )
    return wanted


def _differentiable(
    ctx: Any, reads: dict[str, torch.Tensor], own: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients as results of a `Gradient`, which has a gradient itself."""
    run, plan = ctx.run, ctx.run.plan
    operands = Versions(reads)
    operands.add(ctx.others)
    watched = Versions({str(i): value for i, value in enumerate(own)})
    likes = dict(zip(plan.outputs, ctx.likes, strict=False))
    ctx.freed = not (private.keeps_graph() or torch.is_grad_enabled())
    return differentiate(plan.orders, 1, run.kept, ctx.key, operands, watched, given, likes)


class Step(torch.autograd.Function):
    """The forward and the backward of a file as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Run, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One run of the forward."""
        results = tuple(run(values))
        _keep(ctx, run, values, results, None)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One run of the gradient graph, or of a `Gradient` where that will be differentiated."""
        return (None, *_backward(ctx, cotangents))


class TransformedStep(torch.autograd.Function):
    """The same as torch.func takes it: forward without ctx. Outside of a transform it would be slower, by torch's way of calling it."""

    @staticmethod
    def forward(run: Run, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        if run.plan.orders is None:
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
        moved = {name: t for name, t in zip(run.names, tangents, strict=True) if t is not None}
        found = run.tangents(dict(zip(run.names, ctx.saved_tensors, strict=True)), moved)
        return (*(found.get(name) for name in run.plan.outputs), None)
