"""A training step as a loop in Python: what docs/training.md's trainers in JavaScript and C# are there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exporter.files.program import Program
from exporter.files.read import open_model
from exporter.runtime.session import inference_session, step_sessions
from exporter.runtime.tensors import Runner, tensor, to_array, to_tensor
from exporter.training.artifacts import EVALUATION, INITIAL, TRAINING, with_state_inputs
from exporter.training.step import TrainingStep
from symbolics.errors import ArgumentError, FormatError
from symbolics.node.dtypes import DTYPES
from symbolics.node.metadata import StepLayout, step_of
from symbolics.text import clean, shown

__all__ = ["Trainer"]

_CPU = torch.device("cpu")


class Trainer:
    """Trains from a step, and holds its state: parameters, buffers and the optimizer's moments, each in memory once.

    ::

        trainer = Trainer.load("artifacts")                       # or Trainer(exporter.export_training_step(...))
        for x, y in batches:
            loss = trainer.step({"x": x, "target": y})
        outputs = trainer.evaluate({"x": x})
        model.load_state_dict(trainer.state_dict(), strict=False) # not strict: what is frozen is not among them

    A step writes parameters and moments where they lie, as eager optimizers do (`exporter.runtime.in_place`), so that it needs less
    memory than a loop over `exporter.inference_session`, which has the next state beside the present one. A step whose forward or
    backward raises has changed nothing. Threads may share a trainer; their steps follow one another.

    Attributes:
        layout: Which input and output of the step is what.
        outputs: What else the last step gave out beside the loss, by name: outputs of the model, ``gradient_norm``.
    """

    def __init__(self, step: TrainingStep, evaluation: Program | None = None, *, allow: Any = (), sess_options: Any = None) -> None:
        """Of a step in memory.

        Args:
            step: What `exporter.export_training_step` returned; its initial state is copied.
            evaluation: What `exporter.training.artifacts.export_evaluation` returned for the same model, for `evaluate`.
            allow: Classes and patterns that the files may name; see `exporter.files.trust.Gate`.
            sess_options: Options to start from, as `exporter.inference_session` takes them.

        Raises:
            RunError: onnxruntime is not there or refuses the step.
            TrustError: The step names something that is not allowed.
            ExportError: The evaluation is of another model.
        """
        assert step.layout is not None
        model = None if evaluation is None else with_state_inputs(evaluation.model, step.layout)
        initial = {name: to_tensor(array) for name, array in step.initial.items()}
        self._open(step.model, model, step.layout, initial, allow, sess_options)

    @classmethod
    def load(cls, source: str | os.PathLike[str], allow: Any = (), *, sess_options: Any = None) -> Trainer:
        """Of files: a folder of artifacts (``pythonop step --artifacts``), or ``step.onnx`` with ``step.init.onnx`` beside it.

        Args:
            source: The folder, or the step's file, which has no evaluation.
            allow, sess_options: As above.

        Raises:
            FormatError: A file is missing or damaged, or is no training step.
            RunError, TrustError: As above.
        """
        path = Path(source)
        if path.is_dir():
            step, first, evaluation = path / TRAINING, path / INITIAL, path / EVALUATION
        else:
            step, first, evaluation = path, path.parent / f"{path.stem}.init.onnx", None
        layout = step_of(open_model(step, data=False))
        if layout is None:
            raise FormatError(f"{step} is no training step: export_training_step(...).save() and `pythonop step` write one")
        start = Runner(inference_session(first), _CPU)
        initial = {name: tensor(value).clone() for name, value in start.run({}).items()}
        trainer = cls.__new__(cls)
        trainer._open(step, evaluation, layout, initial, allow, sess_options)
        return trainer

    def _open(self, step: Any, evaluation: Any, layout: StepLayout, initial: dict[str, torch.Tensor], allow: Any, options: Any) -> None:
        self.layout = layout
        self.outputs: dict[str, torch.Tensor] = {}
        self._state, self._lock = initial, threading.Lock()
        main, update, self._written = step_sessions(step, layout.carried, allow, sess_options=options)
        self._main = Runner(main, _CPU)
        self._update = None if update is None else Runner(update, _CPU)
        if self._update is not None and not self._update.takes_room:  # an onnxruntime that is given no memory to write to
            self._update, self._written = None, {}
            self._main = Runner(inference_session(step, allow, sess_options=options), _CPU)
        self._needed = [name for name in self._main.inputs if name not in initial]
        carried = set(layout.carried.values())
        self._known = {*self._needed, *(name for name in initial if name not in carried)}
        if missing := sorted(carried.difference(initial)):
            raise FormatError(f"the initial state has no {shown(missing[0])!r}, which the step carries on: both files must be of one step")
        self._evaluation = None if evaluation is None else Runner(inference_session(evaluation, allow), _CPU)

    def step(self, batch: Mapping[str, Any]) -> float:
        """Make one training step.

        Args:
            batch: input name -> tensor, array or number: the model's arguments and the targets. It may also hold ``learning_rate``,
                for this step alone.

        Returns:
            The loss, before the step.

        Raises:
            ArgumentError: The batch lacks an input, has one that the step does not have, or one of another type.
            RunError: onnxruntime refuses a shape, or what a Function raised, as it was.
        """
        with self._lock:
            given = {**self._state, **_fitting(batch, self._main, self._needed, self._known)}
            results, handles = self._main.run_owning([given[name] for name in self._main.inputs])
            self._main.session.store.free_all(handles)
            found = dict(zip(self._main.names, self._main.tensors(results, range(len(self._main.names))), strict=True))
            del results
            if self._update is not None:
                given.update((name, found.pop(name)) for name in self._update.inputs if name in found)
                room = [self._state[self._written[name]] for name in self._update.names]
                self._update.run_owning([given[name] for name in self._update.inputs], room)
            self._state.update((name, found.pop(output)) for output, name in self.layout.carried.items() if output in found)
            loss = float(found.pop(self.layout.loss))
            self.outputs = found
            return loss

    def evaluate(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model's outputs in eval mode, with what was learned so far.

        Args:
            batch: input name -> tensor, array or number: the model's arguments.

        Returns:
            name -> tensor.

        Raises:
            ArgumentError: There is no evaluation, or the batch is not what it takes.
        """
        runner = self._evaluation
        if runner is None:
            raise ArgumentError("this trainer has no evaluation: give Trainer(step, export_evaluation(...)), or load a folder of artifacts")
        with self._lock:
            needed = [name for name in runner.inputs if name not in self._state]
            given = {**self._state, **_fitting(batch, runner, needed, set(needed))}
            return {name: tensor(value) for name, value in runner.run(given).items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and buffers that were trained, by the model's own state_dict keys."""
        with self._lock:
            keys = {**self.layout.parameters, **self.layout.buffers}
            return {key: self._state[name].clone() for key, name in keys.items() if name in self._state}

    def save(self) -> bytes:
        """The whole state: a line of JSON with names, types and sizes, then the values. The trainers of other languages read it, too."""
        with self._lock:
            return b"".join([self._head(), *(to_array(value).tobytes() for value in self._state.values())])

    def restore(self, saved: bytes) -> None:
        """Go on from what `save` gave, here or in another language, to the same bits.

        Raises:
            ArgumentError: It is the state of another model or optimizer, or damaged.
        """
        with self._lock:
            head = self._head()
            size = len(head) + sum(value.nbytes for value in self._state.values())
            if saved[: len(head)] != head or len(saved) != size:
                raise ArgumentError(
                    "what was saved is the state of another model or optimizer, or it is cut off: restore what save() of this step gave"
                )
            at = len(head)
            for value in self._state.values():
                if value.nbytes:
                    part = torch.frombuffer(bytearray(saved[at : at + value.nbytes]), dtype=value.dtype)
                    value.copy_(part.view(value.shape))
                at += value.nbytes

    def _head(self) -> bytes:
        described = [
            {"name": name, "type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "bytes": value.nbytes}
            for name, value in self._state.items()
        ]
        return (json.dumps(described, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _fitting(batch: Mapping[str, Any], runner: Runner, needed: Sequence[str], known: Collection[str]) -> dict[str, torch.Tensor]:
    """The values of a batch as tensors of the types that a session takes."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(f"a batch is a dictionary of the step's inputs, {', '.join(map(clean, needed))}, not {type(batch).__name__}")
    unknown, missing = [name for name in batch if name not in known], [name for name in needed if name not in batch]
    if unknown or missing:
        what = f"no input {shown(unknown[0])}" if unknown else f"an input {shown(missing[0])}, which the batch lacks"
        raise ArgumentError(f"the file has {what}: it takes {', '.join(map(clean, needed))}")
    found = {}
    for name, value in batch.items():
        kind = runner.inputs[name]
        dtype = None if kind is None else DTYPES.get(kind)
        is_typed = hasattr(value, "dtype")
        try:
            found[name] = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=None if is_typed else dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"the input {clean(name)!r} takes a tensor of {dtype}, not {type(value).__name__}: {clean(str(error), 200)}"
            ) from error
        if dtype is not None and found[name].dtype != dtype:
            raise ArgumentError(f"the input {clean(name)!r} takes {dtype}, not {found[name].dtype}: convert it with .to({dtype})")
    return found
