"""The forward and the backward of a loaded file as one node of autograd, and what the first leaves for the second."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from exporter.module.plans import Plan, Plans
from exporter.runtime.store import ContextStore
from exporter.runtime.tensors import tensor
from exporter.train_mode.batch_norm import counter_of
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.names import GRADIENTS_KEY
from symbolics.text import shown

__all__ = ["Residuals", "Step", "outputs_of", "ready"]


class Residuals:
    """What one forward leaves for its backward: values, and contexts of PythonOps, which are freed with it."""

    def __init__(self, values: dict[str, Any], handles: Sequence[int], store: ContextStore) -> None:
        self.values: dict[str, Any] | None = values
        self.close = weakref.finalize(self, _free, store, tuple(handles))


def _free(store: ContextStore, handles: Iterable[int]) -> None:
    for handle in handles:
        store.free(handle)


def ready(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as a session reads them; the caller's list of them must live until the run is over."""
    return {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in feeds.items()}


def outputs_of(plan: Plan, values: dict[str, Any], box: dict[str, Any]) -> list[torch.Tensor]:
    """The model's outputs; what updates buffers goes into the box."""
    for entry in plan.statistics:
        box.update((name, tensor(values[name])) for name in entry.values)
    box.update((name, tensor(values[name])) for name in plan.buffers.values())
    return [tensor(values[name]) for name in plan.outputs]


class Step(torch.autograd.Function):
    """The forward and the backward of a file as one node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, plans: Plans, plan: Plan, names: list[str], box: dict[str, Any], *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """One run of the forward; outputs without a gradient are marked so."""
        partition = plan.partition
        assert partition is not None
        found = plan.forward.run(ready(dict(zip(names, values, strict=True))))
        results = outputs_of(plan, found, box)
        by_name = dict(zip(names, values, strict=True))
        # Tensors that the caller knows are watched by autograd: a change in place before the backward is an error there.
        own = [name for name in partition.residuals if name in plan.outputs]
        # A buffer gets its next value before the backward, which reads this one.
        updated = {*plan.buffers, *(name for entry in plan.statistics for name in (entry.mean, entry.var, counter_of(entry.mean)))}
        read = (by_name[name].clone() if name in updated else by_name[name] for name in partition.reads)
        ctx.save_for_backward(*read, *(results[plan.outputs.index(name)] for name in own))
        handles = [int(found[name].numpy()) for name in partition.contexts]
        ctx.residuals = Residuals({name: found[name] for name in partition.residuals}, handles, plans.store)
        ctx.plans, ctx.plan, ctx.names = plans, plan, names
        ctx.shapes = {name: value.shape for name, value in by_name.items()}
        ctx.likes = [(result.shape, result.dtype) for result in results]
        ctx.mark_non_differentiable(*(r for name, r in zip(plan.outputs, results, strict=True) if name not in partition.cotangents))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One run of the gradient graph; absent cotangents stay absent.

        Raises:
            RunError: With create_graph=True: what it returned would be constants for a second backward.
            FormatError: The file's gradient of a value has another shape than the value.
        """
        if torch.is_grad_enabled():
            raise RunError(
                "a loaded file has no second derivative: create_graph=True needs the gradient of its gradient graph. Build that as a file "
                "(build_gradient_graph of build_gradient_graph's model), or take second derivatives in the model it was exported from"
            )
        plans, plan = ctx.plans, ctx.plan
        partition = plan.partition
        given = {name for name, g in zip(plan.outputs, cotangents, strict=True) if g is not None and name in partition.cotangents}
        none = (None, None, None, None)
        watched = ctx.saved_tensors
        residuals = ctx.residuals
        if residuals.values is None:
            raise RuntimeError("Trying to backward through the graph a second time: call backward(retain_graph=True) the first time")
        if not given:
            return (*none, *(None for _ in ctx.names))
        feeds: dict[str, Any] = dict(residuals.values)
        feeds.update(ready(dict(zip(partition.reads, watched, strict=False))))
        for name, g, (shape, dtype) in zip(plan.outputs, cotangents, ctx.likes, strict=True):
            if name in partition.cotangents:
                feeds[partition.cotangents[name]] = (torch.zeros(shape, dtype=dtype, device=plans.device) if g is None else g).contiguous()
        keep = private.keeps_graph()
        if not keep:
            residuals.values = None
        with plans.lock:
            plans.store.retain = keep
            try:
                found = plan.backward.run(feeds)
            finally:
                plans.store.retain = False
        if not keep:
            residuals.close()
        wanted = {name: tensor(found[output]) for name, output in partition.gradients.items() if partition.reach[name] & given}
        for name, g in wanted.items():
            if g.shape != ctx.shapes[name]:
                raise FormatError.damaged(
                    f"metadata {GRADIENTS_KEY}",
                    f"what it names as the gradient of {shown(name)!r} has the shape {list(g.shape)}, not {list(ctx.shapes[name])}",
                )
        return (*none, *(wanted.get(name) if ctx.needs_input_grad[i + 4] else None for i, name in enumerate(ctx.names)))
