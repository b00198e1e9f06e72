"""A training graph and an optimizer become one step: parameters and state are inputs, their next values outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.forward.fold import fold
from exporter.forward.state import held_out
from exporter.train_mode.batch_norm import Statistics, counter_of, one_value
from exporter.training.carried import LOSS, Carried
from exporter.training.groups import Group
from exporter.training.loss_scale import LossScale
from exporter.training.optimize import Optimization
from symbolics.errors import ExportError, Faq
from symbolics.graph.builder import Builder
from symbolics.graph.scope import Scope
from symbolics.graph.values import HALVES, dtype_of, name_of
from symbolics.node.metadata import BufferChanges, StepLayout, changes_of, pairing_of, read_state, read_step, write_state, write_step
from symbolics.node.names import BUFFERS_KEY, GRADIENTS_KEY, OUTPUTS_KEY, STATE_KEY, STEP_KEY, TRANSIENT_KEY

__all__ = ["Assembly"]


class Assembly:
    """One training graph on its way to a training step.

    Attributes:
        model: The model; it is changed in place.
        carried: Its inputs with their first values, and what each is in the next step.
        layout: What the inputs and outputs are; after `describe`.
    """

    def __init__(self, model: ir.Model, groups: Sequence[Group], *, scaled: bool, **options: Any) -> None:
        self.model = model
        self.graph = model.graph
        self.groups = groups
        self.carried = Carried(model.graph)
        self.layout: StepLayout | None = None
        self._op = Builder(Scope("step/", lambda value: False))
        self._options = options  # clip_norm, clip_value, accumulate, ema
        self._scaled = scaled
        self._parameters: dict[str, ir.Value] = {}
        self._buffers: dict[str, ir.Value] = {}
        self._untrained: list[str] = []
        self._keys: dict[str, list[str]] = {}  # initializer -> its state_dict keys

    def run(self, seed: str | None, statistics: Sequence[Statistics], given: Sequence[str] = ()) -> None:
        """Assemble.

        Args:
            seed: The input that dropout's masks come from.
            statistics: Of the train-mode BatchNormalizations.
            given: Outputs of the model that the step gives out beside the loss.

        Raises:
            ExportError: The forward changes state that the file does not carry.
        """
        graph, op, carried = self.graph, self._op, self.carried
        pairing = pairing_of(self.model)
        assert pairing is not None
        for key, entry in (read_state(self.model.metadata_props) or {}).items():
            self._keys.setdefault(entry.initializer, []).append(key)
        changes = changes_of(self.model)
        by_name = {name_of(value): value for value in graph.outputs}
        loss = graph.outputs[0]
        cotangent = pairing.inputs[name_of(loss)]
        gradients = {name: by_name[output] for name, output in pairing.outputs.items() if name not in pairing.unreached}
        self._untrained = [key for name in pairing.unreached for key in self._keys.get(name, [name])]
        graph.outputs.clear()
        carried.free_names()
        with op.arithmetic():
            scale = self._seed(cotangent)
            self._batch_norms(statistics)
            self._parameters = {name: carried.from_initializer(f"param.{name}", name) for name in gradients}
            self._changed(changes, by_name)
            reported = Optimization(carried, self.groups, scale=scale, **self._options).write(op, self._parameters, gradients)
            if dtype_of(loss) in HALVES:  # JavaScript has its bits alone
                loss = op.Cast(loss, to=ir.DataType.FLOAT)
            if seed is not None:
                masks = next(value for value in graph.inputs if value.name == seed)
                carried.initial[seed] = np.array(0, np.int64)
                carried.next[masks] = masks + 1  # other masks in each step, without a word from the loop
        graph.extend(op.nodes)
        carried.write_outputs(loss, reported, {name: by_name[name] for name in given})
        self._tidy()

    def describe(self, inputs: Sequence[str], targets: Sequence[str]) -> None:
        """Write the metadata: what is an argument of the model, what a target, what goes round."""
        present = {value.name for value in self.graph.inputs}
        layout = StepLayout(
            carried={f"{name_of(old)}.next": name_of(old) for old in self.carried.next},  # a pass may have put other values in their place
            inputs=tuple(name for name in inputs if name in present),
            targets=tuple(name for name in targets if name in present),
            loss=LOSS,
            parameters={key: name_of(value) for name, value in self._parameters.items() for key in self._keys[name]},
            buffers={key: name_of(value) for name, value in self._buffers.items() for key in self._keys[name]},
            untrained=tuple(self._untrained),
            optimizer=self.groups[0].name,
            hyperparameters=tuple({**group.hyperparameters, "keys": list(group.names)} for group in self.groups),
        )
        metadata = self.model.metadata_props
        metadata[STEP_KEY] = write_step(layout)
        self.layout = read_step(metadata)
        metadata.pop(GRADIENTS_KEY, None)
        metadata.pop(OUTPUTS_KEY, None)
        metadata.pop(BUFFERS_KEY, None)
        metadata.pop(TRANSIENT_KEY, None)  # which the evaluation says
        initializers = self.graph.initializers
        entries = read_state(metadata) or {}
        metadata[STATE_KEY] = write_state({key: entry for key, entry in entries.items() if entry.initializer in initializers})

    def _seed(self, name: str) -> LossScale | None:
        """The gradient of the loss is one, or a scale."""
        seed = next(value for value in self.graph.inputs if value.name == name)
        scale = LossScale(self.carried) if self._scaled else None
        one = self._op.constant(1.0, dtype_of(seed)) if scale is None else scale.cotangent(dtype_of(seed))
        seed.replace_all_uses_with(one)
        self.graph.inputs.remove(seed)
        return scale

    def _batch_norms(self, statistics: Sequence[Statistics]) -> None:
        """Running statistics go from step to step; so do the counts of batches beside them."""
        op, graph = self._op, self.graph
        owners = {key: name for name, keys in self._keys.items() for key in keys}
        values = self._buffers
        by_name = {value.name: value for node in graph for value in node.outputs}
        for entry in statistics:
            mean, var, shape = (by_name[name] for name in entry.values)
            for key in (entry.mean, entry.var):
                if key not in values:  # a module that is called twice has two nodes over one pair of buffers
                    values[key] = self.carried.from_initializer(f"buffer.{key}", key)
            running = values[entry.mean], values[entry.var]
            size = op.Cast(op.ReduceProd(shape, None, keepdims=0), to=dtype_of(var))
            channels = op.Cast(op.Gather(shape, 1), to=dtype_of(var))
            batches = self._counted(owners.get(counter_of(entry.mean)), values)
            # Of one value for each channel there is none, and nothing follows but NaN: the index is then out of range, an error.
            there = op.Gather(op.constant([1.0], dtype_of(var)), op.Cast(op.Equal(size, channels), to=ir.DataType.INT64))
            if (check := there.producer()) is not None:
                check.name = f"{entry.var}: {one_value()}"
            for old, batch in zip(running, (mean, var * (size / (size - channels) * there))):  # torch keeps the unbiased variance
                now = op.Cast(self.carried.next.get(old, old), to=dtype_of(var))  # of a half type the batch's are float32
                if entry.momentum is None:  # the average of all batches
                    assert batches is not None
                    following = now + (batch - now) / op.Cast(batches, to=dtype_of(var))
                else:
                    following = now * entry.momentum + batch * (1 - entry.momentum)
                self.carried.next[old] = op.Cast(following, to=dtype_of(old))

    def _changed(self, changes: BufferChanges, outputs: Mapping[str, ir.Value]) -> None:
        """Every other buffer that forward changes goes from step to step, too; of a parameter that is trained, the optimizer gets the new value.

        Raises:
            ExportError: The file does not carry one.
        """
        for name, why in changes.lost.items():
            raise ExportError(
                f"a forward changes {name!r}, and the step cannot carry it: {why}; it would keep the old value. Let forward write into a buffer of fixed "
                "shape and type, return the new value and keep it outside, or put that module into eval mode",
                faq=Faq.NOT_CARRIED,
            )
        for initializer, output in changes.carried.items():
            if initializer in self._parameters:
                self.carried.written[self._parameters[initializer]] = outputs[output]
                continue
            if initializer not in self._buffers:  # a count of batches that forward sets itself, beside statistics that it does not
                self._buffers[initializer] = self.carried.from_initializer(f"buffer.{initializer}", initializer)
            buffer = self._buffers[initializer]
            self.carried.next[buffer] = outputs[output]

    def _counted(self, counter: str | None, values: dict[str, ir.Value]) -> ir.Value | None:
        """The count of batches after one more; None where there is no such buffer."""
        if counter is None:
            return None
        if counter not in values:
            values[counter] = self.carried.from_initializer(f"buffer.{counter}", counter)
        count = values[counter]
        self.carried.next[count] = self.carried.next.get(count, count) + 1
        return self.carried.next[count]

    def _tidy(self) -> None:
        """Fold, merge and remove; names of inputs, outputs and state stay."""
        graph = self.graph
        self._op.scope.register(graph)
        known = {entry.initializer for entry in (read_state(self.model.metadata_props) or {}).values()}
        used = {name: value for name, value in graph.initializers.items() if value.uses()}
        for name in [name for name in graph.initializers if name not in used]:
            del graph.initializers[name]
        with held_out(graph, {name: value for name, value in used.items() if name in known}), _named(graph):
            fold(self.model, named=True)


@contextlib.contextmanager
def _named(graph: ir.Graph) -> Iterator[None]:
    """Passes may put another value in an output's place: it takes over the name."""
    names = [value.name for value in graph.outputs]
    yield
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
