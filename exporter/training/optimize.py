"""From gradients to the next parameters: accumulation, clipping, and an optimizer of symbolics/optimizers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.training.carried import NORM, RATE, Carried
from exporter.training.groups import Group, steps_made
from exporter.training.loss_scale import LossScale
from symbolics.graph.builder import Builder
from symbolics.graph.copies import inline
from symbolics.graph.values import dtype_of
from symbolics.graph.walk import discard
from symbolics.optimizers import add_decay, body, shrink

__all__ = ["Optimization"]

_DOUBLE = ir.DataType.DOUBLE


@dataclass
class Optimization:
    """How a step updates its parameters; see `export_training_step` for the options.

    Attributes:
        scale: The loss scale of float16 training, None without.
    """

    carried: Carried
    groups: Sequence[Group]
    clip_norm: float | None
    accumulate: int
    scale: LossScale | None

    def write(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Write the next parameters and state; what else the step reports, by name.

        Args:
            op: Takes the nodes.
            parameters, gradients: By the names of the parameters' initializers.
        """
        gradients = {name: op.Cast(g, to=parameters[name].dtype) for name, g in gradients.items()}
        return self._update(op, parameters, gradients) if self.accumulate == 1 else self._accumulate(op, parameters, gradients)

    def _accumulate(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Sum the gradients; each so many runs an If updates by their mean and starts again from zero."""
        carried = self.carried
        sums = {}
        for name, g in gradients.items():
            before = carried.new(f"state.{name}.gradient", np.zeros_like(carried.initial[f"param.{name}"]))
            sums[before] = op.Add(before, g)
        run = carried.new("state.micro_step", np.array(0, np.int64))
        count = op.Mod(op.Add(run, 1), self.accumulate)

        around, carried.next = carried.next, {}
        update, keep = op.child(), op.child()
        with update.arithmetic():
            reported = self._update(update, parameters, dict(zip(gradients, sums.values(), strict=True)))
            carried.next.update((total, update.zeros(update.Shape(total), dtype_of(total))) for total in sums)
        inputs = list(carried.next)
        results = [*carried.next.values(), *reported.values()]
        same = [*(sums.get(value, value) for value in inputs), *(keep.constant(0.0, dtype_of(value)) for value in reported.values())]
        branches = [_branch(update, results, "update"), _branch(keep, same, "keep")]
        made = op.node("If", [op.Equal(count, 0)], outputs=len(results), then_branch=branches[0], else_branch=branches[1])
        for value, like in zip(made, [*inputs, *reported.values()], strict=True):
            value.type, value.shape = like.type, like.shape
        carried.next = {**around, **dict(zip(inputs, made)), run: count}
        return dict(zip(reported, made[len(inputs) :]))

    def _update(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        reported: dict[str, ir.Value] = {}
        if self.scale is not None:
            gradients = self.scale.unscaled(op, gradients, self.accumulate)
        elif self.accumulate > 1:
            gradients = {name: op.scale(g, 1 / self.accumulate) for name, g in gradients.items()}
        if self.clip_norm is not None:
            squares = [op.ReduceSumSquare(g, None, keepdims=0) for g in gradients.values()]
            norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
            reported[NORM] = norm
            factor = op.Min(op.Div(self.clip_norm, op.Add(norm, 1e-6)), 1.0)
            gradients = {name: g * op.Cast(factor, to=g.dtype) for name, g in gradients.items()}
        before = set(self.carried.next)
        self._apply(op, parameters, gradients)
        if self.scale is not None:
            self.scale.skip_overflow(op, [value for value in self.carried.next if value not in before], gradients)
        return reported

    def _apply(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> None:
        """One step of each group's optimizer."""
        carried = self.carried
        doubles = all(value.dtype is _DOUBLE for value in parameters.values())
        first = self.groups[0].hyperparameters["lr"]
        rate = carried.new(RATE, np.array(first, np.float64 if doubles else np.float32))
        step = carried.new("state.step", np.array(steps_made(self.groups, parameters), np.int64))
        carried.next[step] = count = op.Add(step, 1)
        shared_rate = op.Cast(rate, to=_DOUBLE)
        for group in self.groups:
            if not (names := [name for name in group.names if name in parameters]):
                continue
            optimizer, numbers = group.optimizer, group.numbers
            ratio = numbers["lr"] / first if first else 1.0
            lr = shared_rate if ratio == 1 else op.Mul(shared_rate, op.constant(ratio, _DOUBLE))
            inputs = [op.constant(numbers[name], _DOUBLE) for name in ("weight_decay", *optimizer.factor_inputs)]
            factors = dict(zip(optimizer.factor_outputs, _call(op, optimizer.factors, [count, lr, *inputs])))

            def scalar(name: str, kind: ir.DataType, factors: Any = factors, numbers: Any = numbers) -> ir.Value:
                if name in factors:
                    return op.memo((factors[name], kind), lambda: op.Cast(factors[name], to=kind))
                return op.constant(numbers[name], kind)

            for name in names:
                p, g = parameters[name], gradients[name]
                kind = dtype_of(p)
                known = group.state.get(name, {})
                slots = []
                for slot in optimizer.slots:
                    start = known[slot].detach().cpu().numpy() if slot in known else np.zeros_like(carried.initial[f"param.{name}"])
                    slots.append(carried.new(f"state.{name}.{slot}", start))
                old = p
                if numbers["weight_decay"]:
                    if optimizer.decoupled:
                        old = _call(op, shrink, [p, scalar("kept", kind)])[0]
                    else:
                        g = _call(op, add_decay, [p, g, scalar("weight_decay", kind)])[0]
                values = _call(op, optimizer.update, [old, g, *slots, *(scalar(s, kind) for s in optimizer.shared)])
                carried.next.update(zip((p, *slots), values, strict=True))


def _branch(builder: Builder, values: Sequence[ir.Value], name: str) -> ir.Graph:
    """A branch of an If; what it gives out is made in it, once."""
    inside = {output for node in builder.nodes for output in node.outputs}
    own = [value if value in inside and value not in values[:number] else builder.Identity(value) for number, value in enumerate(values)]
    for value, like in zip(own, values, strict=True):
        value.type, value.shape = like.type, like.shape
    return ir.Graph([], own, nodes=builder.nodes, name=name)


def _call(op: Builder, function: Any, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """The outputs of a function of the optimizer table; its nodes go to ``op``."""
    called = body(function)
    node = ir.Node(called.domain, called.name, inputs, num_outputs=len(called.outputs))
    nodes, outputs = inline(op.scope, node, called)
    discard(node)
    op.nodes.extend(nodes)
    for value in outputs:
        assert value is not None
        value.type = value.type or inputs[-1].type
    return outputs  # type: ignore[return-value]
