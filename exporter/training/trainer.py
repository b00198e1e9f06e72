"""A training step as a loop in Python: what docs/training-elsewhere.md's trainers in JavaScript and C# are there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exporter.errors import short
from exporter.files.program import Program
from exporter.files.read import open_model
from exporter.files.save import saving
from exporter.files.trained import EVALUATION, EVALUATION_LOSS, INITIAL, TRAINING, average_of, check_same_state, listed, saved_values
from exporter.runtime.accelerate import Update
from exporter.runtime.changed import say_changed
from exporter.runtime.session import open_session, step_sessions
from exporter.runtime.shared_sizes import check_shared
from exporter.runtime.tensors import Runner, tensor, to_array, to_tensor
from exporter.training.artifacts import with_state_inputs, without_loss
from exporter.training.settings import Settings, check_finite
from exporter.training.step import TrainingStep
from symbolics import torch_private as private
from symbolics.errors import ArgumentError, FormatError, RunError
from symbolics.node.dtypes import DTYPES
from symbolics.node.metadata import StepLayout, step_of
from symbolics.text import clean, reason, shown

__all__ = ["Trainer"]

_CPU = torch.device("cpu")


class Trainer:
    """Trains from a training step, and holds the state: parameters, buffers and the optimizer's moments.

    A step writes parameters and moments in place, as eager optimizers do. So it needs less memory than a loop over
    `inference_session`, which holds the next state beside the present one. Losses and state are the same bit by bit, except
    for Functions that draw from torch's own generator, whose calls onnxruntime may order otherwise. A step that raises has
    changed nothing. Threads may share a trainer; their steps follow one another.

    Attributes:
        layout: Which input and output of the step is what.
        outputs: The other outputs of the last step, by name: outputs of the model, ``gradient_norm`` (with ``accumulate`` it is 0 in
            the runs that do not update).

    Examples:
        >>> trainer = exporter.Trainer(step, evaluation)  # or exporter.Trainer.load("artifacts")
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=1000)
        >>> loss = trainer.step({"x": x, "target": y})
        >>> schedule.step()
        >>> outputs = trainer.evaluate({"x": x, "target": y})  # with "loss"; without the target, only the model's outputs
        >>> saved = trainer.save("trained.state")  # trainer.restore("trained.state") goes on from there, bit by bit
        >>> keys = model.load_state_dict(trainer.state_dict(), strict=False)  # not strict: frozen parameters are not in it
    """

    @short
    def __init__(
        self,
        step: TrainingStep,
        evaluation: Program | None = None,
        *,
        allow: Any = (),
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        accelerate: bool = True,
        strict: bool = False,
    ) -> None:
        """Make a trainer of a step in memory.

        Args:
            step: What `export_training_step` returned. Its initial state is copied.
            evaluation: What `export_evaluation` returned for the same model. `evaluate` needs it.
            allow: What the files may call: classes, functions, and patterns such as ``"mypkg.ops:*"``. Default: nothing.
            sess_options, providers, accelerate: As `inference_session` takes them.
            strict: Whether a Function that has changed since the export is an error, not a warning.

        Raises:
            RunError: onnxruntime is missing or refuses the step. Or, with ``strict``, a Function has changed.
            TrustError: The step names something that ``allow`` does not.
            ExportError: The evaluation is of another model.
        """
        layout = getattr(step, "layout", None)
        if layout is None:
            way = (
                "Trainer.load(path) opens files" if isinstance(step, (str, os.PathLike)) else "exporter.export_training_step(...) makes one"
            )
            raise ArgumentError(f"Trainer takes a training step, not something of type {type(step).__name__}: {way}")
        forward = None if evaluation is None else with_state_inputs(evaluation.model, layout)
        plain = None if forward is None else without_loss(forward, layout)
        initial = {name: to_tensor(array) for name, array in step.initial.items()}
        how = {"sess_options": sess_options, "providers": providers, "accelerate": accelerate}
        self._open(step.model, (plain or forward, forward if plain else None), layout, initial, allow, how, strict)

    @classmethod
    @short
    def load(
        cls,
        source: str | os.PathLike[str],
        allow: Any = (),
        *,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        accelerate: bool = True,
        strict: bool = False,
    ) -> Trainer:
        """Make a trainer of files: a folder of artifacts, or ``step.onnx`` with ``step.init.onnx`` beside it.

        Args:
            source: The folder (of `write_artifacts`, or ``pythonop step --artifacts``), or the file of the step, which has no
                evaluation.
            allow, sess_options, providers, accelerate, strict: As `Trainer` takes them.

        Raises:
            FormatError: A file is missing or damaged, or is not a training step.
            RunError, TrustError: As `Trainer` raises them.
        """
        path = Path(source)
        try:
            is_folder = path.is_dir()
        except (OSError, ValueError) as error:
            raise FormatError(f"{shown(str(path))} cannot be read: {reason(error)}") from error
        evaluations: tuple[Path | None, Path | None]
        if is_folder:
            step, first, evaluations = path / TRAINING, path / INITIAL, (path / EVALUATION, listed(path, EVALUATION_LOSS))
        else:
            step, first, evaluations = path, path.parent / f"{path.stem}.init.onnx", (None, None)
        layout = step_of(open_model(step, data=False))
        if layout is None:
            raise FormatError(f"{step} is no training step: export_training_step(...).save() and `pythonop step` write one")
        start = Runner(open_session(first), _CPU)
        odd = [name for name, kind in start.types.items() if kind not in DTYPES]
        if start.inputs or odd:
            what = f"it takes {shown(next(iter(start.inputs)))}" if start.inputs else f"torch has no tensor for {shown(odd[0])}"
            raise FormatError(f"{first} is no initial state: {what}. export_training_step(...).save() and `pythonop step` write one")
        initial = {name: tensor(value).clone() for name, value in start.run({}).items()}
        trainer = cls.__new__(cls)
        how = {"sess_options": sess_options, "providers": providers, "accelerate": accelerate}
        trainer._open(step, evaluations, layout, initial, allow, how, strict)
        return trainer

    def _open(
        self,
        step: Any,
        evaluations: tuple[Any, Any],
        layout: StepLayout,
        initial: dict[str, torch.Tensor],
        allow: Any,
        how: dict[str, Any],
        strict: bool,
    ) -> None:
        """Open the files; ``how``: sess_options, providers, accelerate."""
        self.layout = layout
        self.outputs: dict[str, torch.Tensor] = {}
        self._state, self._lock, self._busy = initial, threading.RLock(), ""
        main, update, self._apart = step_sessions(step, layout.carried, allow, **how)
        self._main = Runner(main, _CPU, after_torch=True)
        self._update = None if update is None else Runner(update, _CPU)
        if self._update is not None and not self._update.takes_room:  # an onnxruntime that is given no memory to write to
            self._update, self._apart = None, None
            allowed = () if how["sess_options"] is not None else allow
            self._main = Runner(open_session(step, allowed, **how), _CPU, after_torch=True)
        self._check(layout)
        self._needed = [name for name in self._main.inputs if name not in initial]
        carried = set(layout.carried.values()).difference(layout.seeds)
        self._known = {*self._needed, *(name for name in initial if name not in carried)}
        plain, self._with_loss = evaluations
        self._evaluation = None if plain is None else Runner(open_session(plain, allow, providers=how["providers"]), _CPU)
        self._allow, self._providers = allow, how["providers"]
        self._settings: Settings | None = None
        evaluated = {} if self._evaluation is None else self._evaluation.session.changed
        say_changed({**main.changed, **evaluated}, strict=strict)

    def _check(self, layout: StepLayout) -> None:
        """That the layout is one of this step and this state."""
        outputs = {*self._main.names, *(self._apart.written if self._apart is not None else ())}
        targets = Counter(layout.carried.values())
        odd = [name for name in (layout.loss, *layout.carried) if name not in outputs]
        twice = [name for name, count in targets.items() if count > 1] or [name for name in (layout.loss,) if name in layout.carried]
        if odd or twice:
            what = f"no output {shown(odd[0])}, which its metadata name" if odd else f"two meanings for {shown(twice[0])} in its metadata"
            raise FormatError(f"the step has {what}: export_training_step(...).save() and `pythonop step` write files that fit")
        if missing := sorted(set(targets).difference(self._state)):
            raise FormatError(f"the initial state has no {shown(missing[0])!r}, which the step carries on: both files must be of one step")
        for name, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                raise FormatError(f"the initial state has text in {shown(name)!r}: a step carries on numbers alone")

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """This thread's turn; a signal's handler or a Function that asks in the middle of a step is told so, where the state is in between."""
        with self._lock:
            if self._busy == "update" or (self._busy and what in ("step", "restore")):
                raise RunError(f"{what}() is called from within step(), by a Function or a signal's handler: call it when the step is over")
            yield

    @property
    def steps(self) -> int:
        """How many times the parameters were updated, including updates before a `restore`."""
        with self._turn("steps"):
            return int(self._state.get("state.step", 0))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What the schedulers of torch.optim.lr_scheduler take: ``param_groups`` with ``lr`` of each group, and ``weight_decay`` of those that have one.

        What you write there holds from the next step on, rounded to the dtype of the step's input. A group that was exported with a
        weight decay of zero has no key ``weight_decay``. Everything else of the optimizer is fixed in the step.
        """
        with self._turn("optimizer"):
            if self._settings is None:
                self._settings = Settings(self._state)
            return self._settings

    @short
    def step(self, batch: Mapping[str, Any]) -> float:
        """Make one training step.

        Args:
            batch: A tensor, array or number for each input, by name: the model's arguments and the targets. It may also have
                ``learning_rate`` and ``weight_decay`` (``learning_rate_1``, ... of further groups), for this step only; and, where
                the model draws, ``seed``: a whole number that dropout's masks and other random numbers come from, in this step and,
                counted up, in those after it.

        Returns:
            The loss before the step, a number.

        Raises:
            ArgumentError: The batch lacks an input, has one that the step does not have, or one of another dtype; or two inputs differ
                in a size that they share; or a learning rate or weight decay is NaN or infinite.
            RunError: onnxruntime refuses a shape. What a Function raises comes out as it was.
        """
        with self._turn("step"):
            self._busy = "step"
            try:
                if self._settings is not None:
                    self._settings.write(self._state)
                loss = self._step(batch)
                if self._settings is not None:
                    self._settings.step()
                return loss
            finally:
                self._busy = ""

    def _step(self, batch: Mapping[str, Any]) -> float:
        fed = _fitting(batch, self._main, self._needed, self._known)
        for name in fed.keys() - self._needed:
            check_finite(name, fed[name])
        given = {**self._state, **fed}
        results, handles = self._main.run_owning([given[name] for name in self._main.inputs])
        self._main.session.store.free_all(handles)
        found = dict(zip(self._main.names, self._main.tensors(results, range(len(self._main.names))), strict=True))
        del results
        loss = float(found[self.layout.loss])
        carried = {name: found[output] for output, name in self.layout.carried.items() if output in found}
        changed = [name for name, value in carried.items() if value.shape != self._state[name].shape]
        if changed:
            was, now = list(self._state[changed[0]].shape), list(carried[changed[0]].shape)
            raise RunError(
                f"the step makes {clean(changed[0])!r} of shape {now}, which is {was}: the batch has other shapes than the step was exported for"
            )
        with _uninterrupted():
            if self._update is not None and self._apart is not None:
                given.update((name, found[name]) for name in self._update.inputs if name in found)
                self._write(self._update, self._apart, given)
            self._state.update(carried)
        added = self._apart.added if self._apart is not None else ()
        self.outputs = {
            name: value
            for name, value in found.items()
            if name != self.layout.loss and name not in self.layout.carried and name not in added
        }
        return loss

    def _write(self, runner: Runner, update: Update, given: Mapping[str, torch.Tensor]) -> None:
        """Write where the state lies. Nothing may be refused halfway, so shapes are looked at before."""
        for name, shape in update.reads.items():
            if given[name].shape != shape:
                raise RunError(
                    f"{clean(name)!r} has the shape {list(given[name].shape)}, and the step says {list(shape)}: export the step anew"
                )
        room = [self._state[update.written[name]] for name in runner.names]
        self._busy = "update"
        runner.run_owning([given[name] for name in runner.inputs], room)

    @short
    def evaluate(self, batch: Mapping[str, Any], *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Compute the model's outputs in eval mode, with the parameters as they are now.

        Args:
            batch: A tensor, array or number for each of the model's arguments, by name. With the targets as well, ``loss`` is among
                the outputs, if the evaluation was exported with its loss.
            ema: Whether to use the averages of the parameters. The step must have been exported with ``ema``.

        Returns:
            A tensor for each output, by name.

        Raises:
            ArgumentError: There is no evaluation, no loss in it, or no average; or the batch does not fit.
            RunError: onnxruntime refuses a shape.
        """
        with self._turn("evaluate"):
            runner = self._evaluator(any(name in batch for name in self.layout.targets))
            needed = [name for name in runner.inputs if name not in self._state]
            learned = self._averages() if ema else {}
            given = {**self._state, **learned, **_fitting(batch, runner, needed, set(needed))}
            return {name: tensor(value) for name, value in runner.run(given).items()}

    def _evaluator(self, with_loss: bool) -> Runner:
        if self._evaluation is None:
            raise ArgumentError("this trainer has no evaluation: give Trainer(step, export_evaluation(...)), or load a folder of artifacts")
        if not with_loss or set(self.layout.targets).intersection(self._evaluation.inputs):
            return self._evaluation
        if self._with_loss is None:
            raise ArgumentError("the evaluation takes no targets, for it has no loss: give export_evaluation the step's loss= and targets=")
        if not isinstance(self._with_loss, Runner):
            self._with_loss = Runner(open_session(self._with_loss, self._allow, providers=self._providers), _CPU)
        return self._with_loss

    def _averages(self) -> dict[str, torch.Tensor]:
        """The averages of the parameters by the names of the parameters."""
        found = {name: self._state.get(average_of(name)) for name in self.layout.parameters.values()}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise ArgumentError(f"the step keeps no average of {clean(missing[0])}: give export_training_step ema=0.999")
        return {name: value for name, value in found.items() if value is not None}

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Copies of the parameters and buffers that were trained, by the keys of the model's own state_dict.

        Of a complex parameter they have the real and imaginary parts, in a last axis of 2 (`torch.view_as_complex`).

        Args:
            ema: Whether to return the averages of the parameters. The step must have been exported with ``ema``.

        Raises:
            ArgumentError: The step keeps no averages.
        """
        with self._turn("state_dict"):
            keys = {**self.layout.parameters, **self.layout.buffers}
            state = {**self._state, **self._averages()} if ema else self._state
            return {key: state[name].clone() for key, name in keys.items() if name in state}

    def save(self, path: str | os.PathLike[str] | None = None) -> bytes:
        """Write the whole state to a file, and return it as bytes. The trainers of other languages read it, too.

        It is a line of JSON with names, dtypes and sizes, and then the values.

        Args:
            path: The file to write, whole or not at all. None: none is written.

        Returns:
            The bytes.

        Raises:
            ExportError: The file cannot be written.
        """
        with self._turn("save"):
            if self._settings is not None:
                self._settings.write(self._state)
            saved = b"".join([self._head(), *(to_array(value).tobytes() for value in self._state.values())])
        if path is not None:
            with saving() as files:
                files.open(path).write(saved)
        return saved

    @short
    def restore(self, saved: bytes | str | os.PathLike[str]) -> None:
        """Go on from a state that `save` wrote, here or in another language, bit by bit.

        Args:
            saved: The bytes, or the file that holds them.

        Raises:
            ArgumentError: It is damaged, or the state of another model or optimizer.
            FormatError: The file cannot be read.
        """
        values = saved_values(saved, "restore", damaged=ArgumentError)
        with self._turn("restore"):
            own = {name: (to_array(value.new_empty(0)).dtype, value.shape) for name, value in self._state.items()}
            check_same_state(values, own, "this trainer")
            self._state.update((name, to_tensor(values[name])) for name in own)
            if self._settings is not None:
                self._settings.read(self._state)

    def _head(self) -> bytes:
        described = [
            {"name": name, "type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "bytes": value.nbytes}
            for name, value in self._state.items()
        ]
        return (json.dumps(described, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl+C waits until this is over: half of a state would be written."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _fitting(batch: Mapping[str, Any], runner: Runner, needed: Sequence[str], known: Collection[str]) -> dict[str, torch.Tensor]:
    """The values of a batch as tensors of the types that a session takes."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(f"a batch is a dictionary of the step's inputs, {', '.join(map(clean, needed))}, not {type(batch).__name__}")
    unknown, missing = [name for name in batch if name not in known], [name for name in needed if name not in batch]
    if unknown or missing:
        what = f"no input {shown(str(unknown[0]))}" if unknown else f"an input {shown(missing[0])}, which the batch lacks"
        raise ArgumentError(f"the file has {what}: it takes {', '.join(map(clean, needed))}")
    found = {name: _as_tensor(name, value, DTYPES.get(runner.inputs[name] or 0), runner.scalars) for name, value in batch.items()}
    check_shared(runner.named, ((name, found[name]) for name in needed))
    return found


def _as_tensor(name: str, value: Any, dtype: torch.dtype | None, scalars: Collection[str]) -> torch.Tensor:
    """A value of a batch; numbers and lists take the type that the file wants, tensors and arrays have it."""
    wanted = f"the input {clean(name)!r} takes a tensor of {dtype}"
    try:
        if isinstance(value, torch.Tensor):
            made = value
        elif isinstance(value, np.ndarray):
            made = to_tensor(value.astype(value.dtype.newbyteorder("="), copy=False))
        else:
            made = torch.as_tensor(value.item() if isinstance(value, np.generic) else value)
            if dtype is not None and torch.can_cast(made.dtype, dtype):  # from the numbers themselves: torch reads them as float32
                made = torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{wanted}, not {type(value).__name__}: {clean(str(error), 200)}") from error
    if not isinstance(made, torch.Tensor) or (dtype is not None and made.dtype != dtype):
        raise ArgumentError(f"{wanted}, not {getattr(made, 'dtype', type(value).__name__)}: convert it")
    if name in scalars and made.dim():
        raise ArgumentError(f"the input {clean(name)!r} takes one number, not a tensor of shape {list(made.shape)}")
    return _plain(made, wanted)


def _plain(value: torch.Tensor, wanted: str) -> torch.Tensor:
    """A tensor that has its numbers in the memory of the CPU."""
    is_wrapped = len(list(private.layers_of(value))) > 1 or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapped or value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
        kind = type(value).__name__ if is_wrapped or value.is_nested else f"{value.layout} on {value.device}"
        raise ArgumentError(f"{wanted} on the CPU, dense and plain, not {kind}: convert it with .to_dense() and .cpu()")
    return value.detach()
