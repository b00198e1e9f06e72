"""The join of a gradient graph and an optimizer: parameters and state become inputs, their next values outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.forward.finish import drop_outputs
from exporter.forward.fold import fold
from exporter.forward.state import held_out
from exporter.train_mode.batch_norm import Statistics, counter_of
from exporter.training.groups import Group, steps_made
from symbolics.errors import ExportError
from symbolics.graph.builder import Builder
from symbolics.graph.copies import inline
from symbolics.graph.scope import Scope
from symbolics.node.metadata import StepLayout, read_pairing, read_state, read_step, write_state, write_step
from symbolics.node.names import GRADIENTS_KEY, OUTPUTS_KEY, STATE_KEY, STEP_KEY
from symbolics.optimizers import add_decay, body, shrink

__all__ = ["Join"]

LOSS, NORM, RATE = "loss", "gradient_norm", "learning_rate"
_DOUBLE, _FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT
# torch.amp.GradScaler's defaults.
_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 65536.0, 2.0, 0.5, 2000


class Join:
    """One training graph on its way to a training step.

    Attributes:
        model: The model; it is changed in place.
        initial: input -> its first value.
        layout: What the inputs and outputs are; after `describe`.
    """

    def __init__(self, model: ir.Model, groups: Sequence[Group], *, clip_norm: float | None, accumulate: int, scaled: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.groups = groups
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.scaled = scaled
        self.initial: dict[str, np.ndarray] = {}
        self.layout: StepLayout | None = None
        self.op = Builder(Scope("step/", lambda value: False))
        self.next: dict[ir.Value, ir.Value] = {}  # input -> the value it has in the next step
        self.parameters: dict[str, ir.Value] = {}
        self.buffers: dict[str, ir.Value] = {}
        self.untrained: list[str] = []
        self.keys: dict[str, list[str]] = {}  # initializer -> its state_dict keys

    def run(self, seed: str | None, statistics: Sequence[Statistics], changing: Collection[str]) -> None:
        """Join.

        Args:
            seed: The input that dropout's masks come from.
            statistics: Of the train-mode BatchNormalizations.
            changing: The buffers that a forward changes, by their state_dict keys.

        Raises:
            ExportError: A buffer changes in a way that the graph does not show.
        """
        graph, op = self.graph, self.op
        pairing = read_pairing(self.model.metadata_props)
        assert pairing is not None
        entries = read_state(self.model.metadata_props) or {}
        for key, entry in entries.items():
            self.keys.setdefault(entry.initializer, []).append(key)
        by_name = {_name(value): value for value in graph.outputs}
        loss = graph.outputs[0]
        gradients = {name: by_name[output] for name, output in pairing.outputs.items() if name not in pairing.unreached}
        self.untrained = [key for name in pairing.unreached for key in self.keys.get(name, [name])]
        drop_outputs(graph, len(graph.outputs))
        self._free_names()
        with op.arithmetic():
            self._seed(loss, pairing.inputs[_name(loss)])
            self._batch_norms(statistics, changing)
            parameters = {name: self._input(f"param.{name}", name) for name in gradients}
            self.parameters = parameters
            outputs = self._optimize(parameters, gradients)
            if seed is not None:
                masks = next(value for value in graph.inputs if value.name == seed)
                self.initial[seed] = np.array(0, np.int64)
                self.next[masks] = masks + 1  # other masks in each step, without a word from the loop
        graph.extend(op.nodes)
        self._outputs(loss, outputs)
        self._tidy()

    def describe(self, inputs: Sequence[str], targets: Sequence[str]) -> None:
        """Write the metadata: what is an argument of the model, what a target, what goes round."""
        carried = {_name(new): _name(old) for old, new in self.next.items()}
        groups = [{**group.hyperparameters, "keys": list(group.names)} for group in self.groups]
        present = {value.name for value in self.graph.inputs}
        layout = StepLayout(
            carried=carried,
            inputs=tuple(name for name in inputs if name in present),
            targets=tuple(name for name in targets if name in present),
            loss=LOSS,
            parameters={key: _name(value) for name, value in self.parameters.items() for key in self.keys[name]},
            buffers={key: _name(value) for name, value in self.buffers.items() for key in self.keys[name]},
            untrained=tuple(self.untrained),
            optimizer=self.groups[0].name,
            hyperparameters=tuple(groups),
        )
        metadata = self.model.metadata_props
        metadata[STEP_KEY] = write_step(layout)
        self.layout = read_step(metadata)
        metadata.pop(GRADIENTS_KEY, None)
        metadata.pop(OUTPUTS_KEY, None)
        initializers = self.graph.initializers
        entries = read_state(metadata) or {}
        metadata[STATE_KEY] = write_state({key: entry for key, entry in entries.items() if entry.initializer in initializers})

    # ------------------------------------------------------------------------------------------------ inputs, outputs
    def _free_names(self) -> None:
        """The names that the step gives its own inputs and outputs are taken from values of the model."""
        for node in self.graph:
            for value in node.outputs:
                if value.name in (LOSS, NORM, RATE):
                    value.name = f"{value.name}/value"
        for value in self.graph.inputs:
            if value.name in (LOSS, NORM, RATE) or value.name.startswith(("param.", "state.", "buffer.")):  # type: ignore[union-attr]
                raise ExportError(
                    f"an argument of the model is called {value.name!r}, a name that a training step uses itself: rename the argument"
                )

    def _input(self, name: str, initializer: str) -> ir.Value:
        """Make an input of an initializer."""
        value = self.graph.initializers.pop(initializer)
        tensor = value.const_value
        assert tensor is not None
        self.initial[name] = tensor.numpy().copy()  # the model goes on training, maybe
        value.const_value = None
        value.name = name
        self.graph.inputs.append(value)
        return value

    def _new_input(self, name: str, initial: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(initial.dtype)), shape=ir.Shape(initial.shape))
        self.graph.inputs.append(value)
        self.initial[name] = initial
        return value

    def _outputs(self, loss: ir.Value, told: Mapping[str, ir.Value]) -> None:
        """The loss, what else is told, then what goes round, in the order of the inputs."""
        taken: set[ir.Value] = set()
        for name, value in ((LOSS, loss), *told.items()):
            self._output(name, value, value, taken)
        for old in [value for value in self.graph.inputs if value in self.next]:
            self.next[old] = self._output(f"{old.name}.next", self.next[old], old, taken)

    def _output(self, name: str, value: ir.Value, like: ir.Value, taken: set[ir.Value]) -> ir.Value:
        """Make an output of a value; it gets a node of its own where it is an input, or an output already."""
        if value.producer() is None or value in taken:
            node = ir.Node("", "Identity", [value], name=f"{name}/identity")
            self.graph.append(node)
            value = node.outputs[0]
        value.name, value.type, value.shape = name, like.type, like.shape
        taken.add(value)
        self.graph.outputs.append(value)
        return value

    # ------------------------------------------------------------------------------------------------------ the parts
    def _seed(self, loss: ir.Value, name: str) -> None:
        """The gradient of the loss is one, or the scale that keeps float16 gradients from vanishing."""
        graph = self.graph
        seed = next(value for value in graph.inputs if value.name == name)
        if self.scaled:
            self.scale = self._new_input("state.loss_scale", np.array(_SCALE, np.float32))
            self.growth = self._new_input("state.growth_tracker", np.array(0, np.int64))
            node = ir.Node("", "Cast", [self.scale], [ir.AttrInt64("to", int(seed.dtype or _FLOAT))], name="step/scale")
            node.outputs[0].name, node.outputs[0].type = "step/scale", seed.type
            graph.insert_before(graph[0], node)
            one = node.outputs[0]
        else:
            one = self.op.constant(1.0, seed.dtype or _FLOAT)
        seed.replace_all_uses_with(one)
        graph.inputs.remove(seed)

    def _batch_norms(self, statistics: Sequence[Statistics], changing: Collection[str]) -> None:
        """Running statistics go from step to step; so do the counts of batches beside them.

        Raises:
            ExportError: Another buffer changes.
        """
        op, graph = self.op, self.graph
        owners = {key: name for name, keys in self.keys.items() for key in keys}
        values: dict[str, ir.Value] = {}
        by_name = {value.name: value for node in graph for value in node.outputs}
        for entry in statistics:
            mean, var, shape = (by_name[name] for name in entry.values)
            for key in (entry.mean, entry.var):
                if key not in values:  # a module that is called twice has two nodes over one pair of buffers
                    values[key] = self._input(f"buffer.{key}", key)
            running = values[entry.mean], values[entry.var]
            size = op.Cast(op.ReduceProd(shape, None, keepdims=0), to=var.dtype or _FLOAT)
            channels = op.Cast(op.Gather(shape, 1), to=var.dtype or _FLOAT)
            batches = self._counted(owners.get(counter_of(entry.mean)), values)
            for old, batch in zip(running, (mean, var * (size / (size - channels)))):  # torch keeps the unbiased variance
                now = self.next.get(old, old)
                if entry.momentum is None:  # the average of all batches
                    assert batches is not None
                    self.next[old] = now + (batch - now) / op.Cast(batches, to=var.dtype or _FLOAT)
                else:
                    self.next[old] = now * entry.momentum + batch * (1 - entry.momentum)
        self.buffers = values
        lost = [key for key in changing if owners.get(key) not in values]
        if lost:
            raise ExportError(
                f"a forward changes the buffer {lost[0]!r}, and no ONNX operator of the graph computes its new value: the step would keep the old one. "
                "Return the new value from forward and keep it outside, or put that module into eval mode"
            )

    def _counted(self, counter: str | None, values: dict[str, ir.Value]) -> ir.Value | None:
        """The count of batches after one more; None where there is no such buffer."""
        if counter is None:
            return None
        if counter not in values:
            values[counter] = self._input(f"buffer.{counter}", counter)
        count = values[counter]
        self.next[count] = self.next.get(count, count) + 1
        return self.next[count]

    def _optimize(self, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """The next parameters and state. Returns what else the step tells, by name."""
        op = self.op
        gradients = {name: op.cast(g, parameters[name].dtype) for name, g in gradients.items()}
        if self.accumulate == 1:
            return self._update(op, parameters, gradients)
        sums = {}
        for name, g in gradients.items():
            kept = self._new_input(f"state.{name}.gradient", np.zeros_like(self.initial[f"param.{name}"]))
            sums[kept] = op.Add(kept, g)
        run = self._new_input("state.micro_step", np.array(0, np.int64))
        count = op.Mod(op.Add(run, 1), self.accumulate)

        around, self.next = self.next, {}
        update, keep = op.child(), op.child()
        with update.arithmetic():
            told = self._update(update, parameters, dict(zip(gradients, sums.values(), strict=True)))
            self.next.update((kept, update.zeros(update.shape(kept), _kind(kept))) for kept in sums)
        inputs = list(self.next)
        results = [*self.next.values(), *told.values()]
        same = [*(sums.get(value, value) for value in inputs), *(keep.constant(0.0, _kind(value)) for value in told.values())]
        branches = [_branch(update, results, "update"), _branch(keep, same, "keep")]
        made = op.node("If", [op.Equal(count, 0)], outputs=len(results), then_branch=branches[0], else_branch=branches[1])
        for value, like in zip(made, [*inputs, *told.values()], strict=True):
            value.type, value.shape = like.type, like.shape
        self.next = {**around, **dict(zip(inputs, made)), run: count}
        return dict(zip(told, made[len(inputs) :]))

    def _update(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        told: dict[str, ir.Value] = {}
        if self.scaled:
            inverse = op.Div(1 / self.accumulate, self.scale)
            gradients = {name: g * op.cast(inverse, g.dtype) for name, g in gradients.items()}
        elif self.accumulate > 1:
            gradients = {name: op.scale(g, 1 / self.accumulate) for name, g in gradients.items()}
        if self.clip_norm is not None:
            squares = [op.ReduceSumSquare(g, None, keepdims=0) for g in gradients.values()]
            norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
            told[NORM] = norm
            factor = op.Min(op.Div(self.clip_norm, op.Add(norm, 1e-6)), 1.0)
            gradients = {name: g * op.cast(factor, g.dtype) for name, g in gradients.items()}
        before = set(self.next)
        self._updates(op, parameters, gradients)
        if self.scaled:
            self._skip_overflow(op, [value for value in self.next if value not in before], gradients)
        return told

    def _updates(self, op: Builder, parameters: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]) -> None:
        doubles = all(value.dtype is _DOUBLE for value in parameters.values())
        first = self.groups[0].hyperparameters["lr"]
        rate = self._new_input(RATE, np.array(first, np.float64 if doubles else np.float32))
        step = self._new_input("state.step", np.array(steps_made(self.groups, parameters), np.int64))
        self.next[step] = count = op.Add(step, 1)
        shared_rate = op.cast(rate, _DOUBLE)
        for group in self.groups:
            names = [name for name in group.names if name in parameters]
            if not names:
                continue
            optimizer, numbers = group.optimizer, group.numbers
            ratio = numbers["lr"] / first if first else 1.0
            lr = shared_rate if ratio == 1 else op.Mul(shared_rate, op.constant(ratio, _DOUBLE))
            takes = [op.constant(numbers[name], _DOUBLE) for name in ("weight_decay", *optimizer.takes)]
            factors = dict(zip(optimizer.gives, call(op, optimizer.factors, [count, lr, *takes])))

            def scalar(name: str, kind: ir.DataType, factors: Any = factors, numbers: Any = numbers) -> ir.Value:
                if name in factors:
                    return op.memo((factors[name], kind), lambda: op.cast(factors[name], kind))
                return op.constant(numbers[name], kind)

            for name in names:
                p, g = parameters[name], gradients[name]
                kind = _kind(p)
                known = group.state.get(name, {})
                slots = []
                for slot in optimizer.slots:
                    start = known[slot].detach().cpu().numpy() if slot in known else np.zeros_like(self.initial[f"param.{name}"])
                    slots.append(self._new_input(f"state.{name}.{slot}", start))
                old = p
                if numbers["weight_decay"]:
                    if optimizer.decoupled:
                        old = call(op, shrink, [p, scalar("kept", kind)])[0]
                    else:
                        g = call(op, add_decay, [p, g, scalar("weight_decay", kind)])[0]
                values = call(op, optimizer.update, [old, g, *slots, *(scalar(s, kind) for s in optimizer.shared)])
                self.next.update(zip((p, *slots), values, strict=True))

    def _skip_overflow(self, op: Builder, changed: Sequence[ir.Value], gradients: Mapping[str, ir.Value]) -> None:
        """Where a gradient is not finite nothing changes but the scale; see torch.amp.GradScaler."""
        # x - x is 0 for finite x, NaN for the others, and NaN survives the sum.
        rests = [op.cast(op.ReduceSum(op.Sub(g, g), None, keepdims=0), _FLOAT) for g in gradients.values()]
        finite = op.Equal(op.Sum(*rests) if len(rests) > 1 else rests[0], op.constant(0.0, _FLOAT))
        for old in changed:
            self.next[old] = op.Where(finite, self.next[old], old)
        grown = op.Add(self.growth, 1)
        full = op.Equal(grown, _INTERVAL)
        larger = op.Where(full, op.Mul(self.scale, _GROWTH), self.scale)
        self.next[self.scale] = op.Where(finite, larger, op.Mul(self.scale, _BACKOFF))
        self.next[self.growth] = op.Where(op.And(finite, op.Not(full)), grown, op.i64(0))

    # -------------------------------------------------------------------------------------------------------- the end
    def _tidy(self) -> None:
        """Fold, merge and remove; names of inputs, outputs and state stay."""
        graph = self.graph
        self.op.scope.register(graph)
        known = {entry.initializer for entry in (read_state(self.model.metadata_props) or {}).values()}
        used = {name: value for name, value in graph.initializers.items() if value.uses()}
        for name in [name for name in graph.initializers if name not in used]:
            del graph.initializers[name]
        with held_out(graph, {name: value for name, value in used.items() if name in known}), _named(graph):
            fold(self.model)


def _branch(builder: Builder, values: Sequence[ir.Value], name: str) -> ir.Graph:
    """A branch of an If; what it gives out is made in it, once."""
    inside = {output for node in builder.nodes for output in node.outputs}
    own = [value if value in inside and value not in values[:number] else builder.Identity(value) for number, value in enumerate(values)]
    for value, like in zip(own, values, strict=True):
        value.type, value.shape = like.type, like.shape
    return ir.Graph([], own, nodes=builder.nodes, name=name)


def _kind(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


@contextlib.contextmanager
def _named(graph: ir.Graph) -> Iterator[None]:
    """Passes may put another value in an output's place: it takes over the name."""
    names = [value.name for value in graph.outputs]
    yield
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def call(op: Builder, function: Any, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """The outputs of a function of the optimizer table; its nodes go to ``op``."""
    called = body(function)
    node = ir.Node(called.domain, called.name, inputs, num_outputs=len(called.outputs))
    nodes, outputs = inline(op.scope, node, called)
    for position in range(len(inputs)):
        node.replace_input_with(position, None)
    op.nodes.extend(nodes)
    first = inputs[-1]
    for value in outputs:
        assert value is not None
        value.type = value.type or first.type
    return outputs  # type: ignore[return-value]
