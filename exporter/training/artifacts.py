"""A folder that holds a training: the step, an evaluation, the initial state, and a manifest that says what each input is.

A program in another language needs nothing else: ``manifest.json`` has the names, shapes and types, and the evaluation
takes the very state that goes round from step to step. docs/training-elsewhere.md shows the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from exporter.errors import short
from exporter.files.program import Program, save_models
from exporter.files.save import writable
from exporter.files.trained import EVALUATION, EVALUATION_LOSS, EVALUATION_PLAIN, INITIAL, MANIFEST_FORMAT, TRAINING, UNREAD, files_of
from exporter.gradient_graph.partition import extract, forward_part
from exporter.runtime.provider_forms import write_file
from exporter.training.carried import LOSS
from exporter.training.objective import Objective, check_names
from exporter.training.step import TrainingStep
from symbolics.errors import ArgumentError, ExportError
from symbolics.graph.values import attr, dtype_of, is_python_op, name_of
from symbolics.node.metadata import StepLayout, forget_absent_changes, read_state, read_transient, write_state, write_transient
from symbolics.node.names import OUTPUTS_KEY, STATE_KEY, TRANSIENT_KEY
from symbolics.node.result import without_first
from symbolics.text import clean
from symbolics.users import warn

__all__ = [
    "export_evaluation",
    "places",
    "with_state_inputs",
    "without_loss",
    "write_artifacts",
]


@short
def export_evaluation(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] | torch.Tensor = (),
    precision: str | None = None,
    dynamic_shapes: Any = None,
    output_names: Sequence[str] | None = None,
    **options: Any,
) -> Program:
    """Export the forward of a model in eval mode, with the input names of its training step.

    Args:
        model: The model. It is put into eval mode for the export, and gets its own mode back.
        args, kwargs, targets, precision, dynamic_shapes: As you gave them to `export_training_step`. Without ``loss``, the
            targets and their sizes are left out.
        loss: ``loss(output, *targets)``, as you gave it to the step. The program then takes the targets, too, and its first
            output is ``loss``. None: the program returns the model's outputs only.
        output_names: Names for the model's outputs, in order. Default: those of torch.
        **options: dynamo, opset_version, inline, portable, opaque, functions, fallback and others, as `export` takes them.

    Returns:
        The program. Its parameters are initializers. `Trainer` and `write_artifacts` feed them from the state of the step.

    Raises:
        ExportError: The model or the loss cannot be exported, or the loss is not a single number.
        ArgumentError: An option has a value that it cannot have.

    Examples:
        >>> options = {"loss": torch.nn.functional.mse_loss, "targets": (y,)}
        >>> step = exporter.export_training_step(model, (x,), **options)
        >>> evaluation = exporter.export_evaluation(model, (x,), **options)
        >>> trainer = exporter.Trainer(step, evaluation)
    """
    names = check_names(output_names)
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss is of type {type(loss).__name__}, not a function or module")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    targets = (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    with _evaluating(model):
        objective = Objective(model, args, dict(kwargs or {}), loss, targets, precision, evaluates=True)
        program = objective.export(
            dynamic_shapes=dynamic_shapes, output_names=([LOSS, *names] if loss is not None else names) or None, **options
        )
    return program


def without_loss(model: ir.Model, layout: StepLayout) -> ir.Model | None:
    """A copy of an evaluation, whose state is inputs, that needs no targets; None where it needs none."""
    inputs = [name_of(value) for value in model.graph.inputs]
    if not set(layout.targets).intersection(inputs):
        return None
    outputs = [name_of(value) for value in model.graph.outputs if value.name != LOSS]
    plain = extract(model, [name for name in inputs if name not in layout.targets], outputs)
    for value in [value for value in plain.graph.inputs if value.name not in layout.inputs and not _is_read(value)]:
        plain.graph.inputs.remove(value)
    if structure := plain.metadata_props.get(OUTPUTS_KEY):
        plain.metadata_props[OUTPUTS_KEY] = without_first(structure)
    known, entries = plain.graph.initializers, read_state(plain.metadata_props) or {}
    plain.metadata_props[STATE_KEY] = write_state({key: entry for key, entry in entries.items() if entry.initializer in known})
    return plain


@short
def write_artifacts(
    step: TrainingStep,
    evaluation: Program,
    folder: str | os.PathLike[str],
    *,
    provider: str | None = None,
    external_data: bool | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Write a folder with all that a program in any language needs to train and evaluate: all of its files, or none.

    The files are ``training.onnx`` (the step), ``eval.onnx`` (the model's outputs in eval mode), ``initial.onnx`` (the initial
    state) and ``manifest.json`` (names, shapes and dtypes). If the evaluation was exported with its loss, there is
    ``eval_loss.onnx`` as well, which takes the targets and returns the loss beside the outputs. With ``provider`` there is
    ``eval_plain.onnx``, the evaluation for every runtime, which `trained` fills. Where no node of the evaluation reads some of the
    model's state_dict (counts of batches, unused parameters), ``unread.onnx`` holds it for `trained`; no program that trains needs it.
    `Trainer.load` opens the folder. docs/training-elsewhere.md has the trainers in other languages.

    Args:
        step: What `export_training_step` returned.
        evaluation: What `export_evaluation` returned for the same model. In the files it takes the state of the step as inputs.
        folder: The folder to write. It is made if it is missing. Files of these names are replaced, others stay.
        provider: Write step and evaluation in operators that this execution provider has, as `TrainingStep.written_for` does:
            "webgpu" for a page that trains on a graphics card. Other providers run such files, too.
        external_data, check: As `Program.save` takes them.

    Returns:
        The contents of manifest.json.

    Raises:
        ExportError: A file cannot be written, a model is not valid ONNX, or the evaluation is of another model.
        ArgumentError: There is no such form for this provider.

    Examples:
        >>> manifest = exporter.write_artifacts(step, evaluation, "artifacts")
    """
    step = step if provider is None else step.written_for(provider)
    assert step.layout is not None
    path = Path(folder)
    paths = places(path)
    forward = with_state_inputs(evaluation.model, step.layout)
    plain = without_loss(forward, step.layout)
    anywhere = None if provider is None else (plain or forward).clone()
    if provider is not None:
        for model in filter(None, (forward, plain)):
            write_file(provider, model)
    manifest = _manifest(step, step.layout, plain or forward, forward if plain else None)
    with _made(path):
        models = list(zip([step.model, plain or forward, step.initial_model], paths, strict=False))
        if plain is not None:
            models.append((forward, paths[4]))
        if anywhere is not None:
            manifest["files"]["eval_plain"] = EVALUATION_PLAIN
            models.append((anywhere, paths[5]))
        if (unread := _unread(evaluation.model, anywhere or plain or forward, step.layout)) is not None:
            manifest["files"]["unread"] = UNREAD
            models.append((unread, paths[6]))
        text = json.dumps(manifest, indent=1) + "\n"
        save_models(models, external_data=external_data, texts=[(text, paths[3])], check=check)
    if manifest["python"]:
        warn(
            f"{path} needs Python: the calls of {clean(', '.join(manifest['python']))} stay PythonOps, which run nowhere else; "
            "export with portable=True (--portable) for files that need none"
        )
    return manifest


def places(folder: Path, error: type[Exception] = ExportError, keep: Iterable[Path] = ()) -> list[Path]:
    """The paths of the artifacts: training, evaluation, initial state, manifest, evaluation with loss, evaluation for every runtime, what it does not read.

    Args:
        folder: Where they go; it may be missing.
        error, keep: As `exporter.files.save.writable`.

    Raises:
        error: One cannot be written there.
    """
    paths = files_of(folder)
    if folder.is_dir():
        for path in paths:
            writable(path, error, keep=keep)
    else:
        if os.path.lexists(folder):
            raise error(f"cannot write into {folder}: it is not a folder; nothing was written")
        writable(folder, error)  # there is a folder that it can be made in
    return paths


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder where it is missing; it goes again where the block fails."""
    missing = not folder.is_dir()
    try:
        if missing:
            folder.mkdir()
        yield
    except BaseException as error:
        if missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise ExportError(f"cannot write into {folder}: {error.strerror or error}; nothing was written") from error
        raise


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # not train(mode), which reaches into the modules below


def with_state_inputs(model: ir.Model, layout: StepLayout) -> ir.Model:
    """A copy of a forward; what a step changes are inputs of it, by the names that they have in the step.

    Raises:
        ExportError: The forward has no such parameter: it is that of another model.
    """
    entries = read_state(model.metadata_props) or {}
    given = {
        key: name for key, name in (*layout.parameters.items(), *layout.buffers.items()) if not key.startswith("loss.") or key in entries
    }
    if unknown := [key for key in given if key not in entries]:
        raise ExportError(f"the evaluation has no {clean(unknown[0])!r}, which the step trains: export both of one model")
    names = {entries[key].initializer: name for key, name in given.items()}
    # What no node reads any more is no input of the evaluation: counts of batches, parameters of the other branch.
    used = [name for name in names if name in model.graph.initializers and _is_read(model.graph.initializers[name])]
    forward = forward_part(model, used)
    forget_absent_changes(forward)
    for value in forward.graph.inputs:
        value.name = names.get(name_of(value), value.name) if name_of(value) in used else value.name
    transient = [key for key in read_transient(model.metadata_props) or () if key in given]
    forward.metadata_props.pop(TRANSIENT_KEY, None)
    if transient:
        forward.metadata_props[TRANSIENT_KEY] = write_transient(tuple(transient))
    known = forward.graph.initializers
    forward.metadata_props[STATE_KEY] = write_state({key: entry for key, entry in entries.items() if entry.initializer in known})
    return forward


def _unread(evaluation: ir.Model, read: ir.Model, layout: StepLayout) -> ir.Model | None:
    """What of the model's state_dict no node reads, as it is at the export: a model of outputs alone; None where all is read.

    It is apart, for what no node reads costs a device its room, and onnxruntime a warning each. What the step changes is here with its type.

    Args:
        evaluation: As it was exported.
        read: The evaluation that `trained` fills: what is in it is read.
        layout: Of the step.
    """
    given = {value.name for value in read.graph.inputs}
    held = {*read.graph.initializers}
    carried = {**layout.parameters, **layout.buffers}
    transient = frozenset(read_transient(evaluation.metadata_props) or ())
    state = read_state(evaluation.metadata_props) or {}
    held.update(entry.initializer for key, entry in state.items() if carried.get(key) in given)
    entries = {key: entry for key, entry in state.items() if key not in transient and entry.initializer not in held}
    if not entries:
        return None
    values = []
    for name in dict.fromkeys(entry.initializer for entry in entries.values()):
        old = evaluation.graph.initializers[name]
        values.append(ir.Value(name=name, type=old.type, shape=old.shape, const_value=old.const_value))
    graph = ir.Graph([], values, nodes=[], initializers=values, name="unread", opset_imports={"": evaluation.opset_imports[""]})
    model = ir.Model(graph, ir_version=evaluation.ir_version, producer_name="pythonop")
    model.metadata_props[STATE_KEY] = write_state(entries)
    return model


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _manifest(step: TrainingStep, layout: StepLayout, forward: ir.Model, with_loss: ir.Model | None) -> dict[str, Any]:
    """What the files are, for programs; see docs/training-elsewhere.md."""
    inputs = {name_of(value): value for value in step.model.graph.inputs}
    next_of = {name: output for output, name in layout.carried.items()}
    held = {**dict.fromkeys(layout.parameters.values(), "parameter"), **dict.fromkeys(layout.buffers.values(), "buffer")}
    kinds = {**held, **dict.fromkeys(layout.seeds, "seed")}
    return {
        "format": MANIFEST_FORMAT,
        "files": {"training": TRAINING, "eval": EVALUATION, "initial": INITIAL, **({"eval_loss": EVALUATION_LOSS} if with_loss else {})},
        "inputs": [_described(inputs[name]) for name in layout.inputs],
        "targets": [_described(inputs[name]) for name in layout.targets],
        "loss": layout.loss,
        "eval": {
            "inputs": [_described(value) for value in forward.graph.inputs if value.name not in held],
            "state": [value.name for value in forward.graph.inputs if value.name in held],
            "outputs": [_described(value) for value in forward.graph.outputs],
        },
        "state": [
            {
                "name": name, "next": next_of[name], "dtype": array.dtype.name, "shape": list(array.shape),
                "kind": kinds.get(name, "optimizer"),
            }
            for name, array in step.initial.items() if name in next_of
        ],
        "hyperparameters": [
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "default": array.tolist()}
            for name, array in step.initial.items() if name not in next_of
        ],
        "optimizer": layout.optimizer,
        "python": sorted({str(attr(node, "name")) for model in (step.model, with_loss or forward) for node in _nodes(model) if is_python_op(node)}),
    }  # fmt: skip


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _described(value: ir.Value) -> dict[str, Any]:
    """Name, type and sizes; an open size is its name, or null where it has none."""
    dims = None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return {"name": value.name, "dtype": dtype_of(value).numpy().name, "shape": dims}
