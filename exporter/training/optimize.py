"""From gradients to the next parameters: accumulation, clipping, and an optimizer of symbolics/optimizers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir

from exporter.files.trained import average_of
from exporter.training.carried import INPUTS, NORM, Carried, setting
from exporter.training.groups import Group, steps_made
from exporter.training.loss_scale import LossScale
from symbolics.graph.builder import Builder
from symbolics.graph.values import dtype_of
from symbolics.optimizers import hyper

__all__ = ["Optimization"]

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


@dataclass
class Optimization:
    """How a step updates its parameters; see `export_training_step` for the options.

    Attributes:
        scale: The loss scale of float16 training, None without.
    """

    carried: Carried
    groups: Sequence[Group]
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    ema: float | None
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
        left = carried.written | sums
        same = [*(left.get(value, value) for value in inputs), *(keep.constant(0.0, dtype_of(value)) for value in reported.values())]
        branches = [_branch(update, results, "update"), _branch(keep, same, "keep")]
        made = op.node("If", [op.Equal(count, 0)], outputs=len(results), then_branch=branches[0], else_branch=branches[1])
        for value, like in zip(made, [*inputs, *reported.values()], strict=True):
            value.type, value.shape = like.type, like.shape
        carried.next = {**around, **dict(zip(inputs, made)), run: count}
        return dict(zip(reported, made[len(inputs) :]))

    def _update(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        if self.scale is not None:
            gradients = self.scale.unscaled(op, gradients, self.accumulate)
        elif self.accumulate > 1:
            gradients = {name: op.scale(g, 1 / self.accumulate) for name, g in gradients.items()}
        clipped, reported = self._clipped(op, gradients)
        before = set(self.carried.next)
        self._apply(op, parameters, clipped)
        if self.ema is not None:
            for name, p in parameters.items():
                average = self.carried.new(average_of(f"param.{name}"), self.carried.initial[f"param.{name}"].copy())
                self.carried.next[average] = average + (self.carried.next[p] - average) * (1 - self.ema)
        if self.scale is not None:
            self.scale.skip_overflow(op, [value for value in self.carried.next if value not in before], gradients)
        return reported

    def _clipped(self, op: Builder, gradients: Mapping[str, ir.Value]) -> tuple[Mapping[str, ir.Value], dict[str, ir.Value]]:
        """The gradients as torch.nn.utils.clip_grad_value_ and clip_grad_norm_ leave them, and what the step reports of it."""
        if self.clip_value is not None:
            bound = self.clip_value
            gradients = {name: op.Clip(g, op.number(-bound, g), op.number(bound, g)) for name, g in gradients.items()}
        if self.clip_norm is None:
            return gradients, {}
        kind = max((dtype_of(g) for g in gradients.values()), key=lambda kind: kind.itemsize)
        squares = [op.Cast(op.ReduceSumSquare(g, None, keepdims=0), to=kind) for g in gradients.values()]
        norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
        norm.shape = ir.Shape(())
        factor = op.Min(op.Div(self.clip_norm, op.Add(norm, 1e-6)), 1.0)
        return {name: g * op.Cast(factor, to=g.dtype) for name, g in gradients.items()}, {NORM: norm}

    def _apply(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> None:
        """One step of each group's optimizer."""
        carried = self.carried
        doubles = [value.dtype is _DOUBLE for value in parameters.values()]
        scalars = _DOUBLE if any(doubles) else _FLOAT  # many execution providers have no float64
        step = carried.new("state.step", np.array(steps_made(self.groups, parameters), np.int64))
        carried.next[step] = count = op.Add(step, 1)
        steps = op.Cast(count, to=scalars)
        for number, group in enumerate(self.groups):
            if not (names := [name for name in group.names if name in parameters]):
                continue

            def given(name: str, number: int = number, group: Group = group) -> ir.Value:
                start = np.array(group.hyperparameters[name], np.float64 if all(doubles) else np.float32)
                return op.Cast(carried.new(setting(INPUTS[name], number), start), to=scalars)

            optimizer, h = group.optimizer, hyper(group.hyperparameters)
            lr = given("lr")
            factors = optimizer.factors(op, h, lr, steps)
            if decays := bool(h.weight_decay):
                decay = given("weight_decay")
                factors["weight_decay"] = 1.0 - lr * decay if group.decoupled else decay
            for name in names:
                place, g = parameters[name], gradients[name]
                p = carried.written.get(place, place)
                kind = dtype_of(p)
                s = SimpleNamespace(**{key: _cast(op, value, kind) for key, value in factors.items()})
                slots = self._slots(group, name, h)
                if h.maximize:
                    g = op.Neg(g)
                old = p
                if decays and group.decoupled:
                    old = p * s.weight_decay
                elif decays:
                    g = g + p * s.weight_decay
                less, *state = optimizer.update(op, h, s, p, g, *slots)
                carried.next.update(zip((place, *slots), (old - less, *state), strict=True))

    def _slots(self, group: Group, name: str, h: SimpleNamespace) -> list[ir.Value]:
        """The state that a parameter has beside it, as torch has it or from its start."""
        start, known = self.carried.initial[f"param.{name}"], group.state.get(name, {})
        slots = []
        for slot, first in group.optimizer.slots(h, start.shape).items():
            value, shape = first if isinstance(first, tuple) else (first, start.shape)
            array = np.asarray(known[slot]).astype(start.dtype) if slot in known else np.full(shape, value, start.dtype)
            slots.append(self.carried.new(f"state.{name}.{slot}", array))
        return slots


def _branch(builder: Builder, values: Sequence[ir.Value], name: str) -> ir.Graph:
    """A branch of an If; what it gives out is made in it, once."""
    inside = {output for node in builder.nodes for output in node.outputs}
    own = [value if value in inside and value not in values[:number] else builder.Identity(value) for number, value in enumerate(values)]
    for value, like in zip(own, values, strict=True):
        value.type, value.shape = like.type, like.shape
    return ir.Graph([], own, nodes=builder.nodes, name=name)


def _cast(op: Builder, value: ir.Value, kind: ir.DataType) -> ir.Value:
    """A number of a group in the type of a parameter, once for all parameters of that type."""
    return op.memo((value, kind), lambda: op.Cast(value, to=kind))
