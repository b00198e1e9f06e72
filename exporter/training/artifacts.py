"""A folder that holds a training: the step, an evaluation, the initial state, and a manifest that says what each input is.

A program in another language needs nothing else: ``manifest.json`` has the names, shapes and types, and the evaluation
takes the very state that goes round from step to step. docs/training.md shows the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from exporter.files.program import Program, save_models
from exporter.files.save import writable
from exporter.gradient_graph.partition import forward_part
from exporter.training.objective import Objective
from exporter.training.step import TrainingStep
from symbolics.errors import ExportError, PythonopWarning
from symbolics.graph.values import attr, dtype_of, is_python_op, name_of
from symbolics.node.metadata import StepLayout, read_state, write_state
from symbolics.node.names import STATE_KEY
from symbolics.text import clean

__all__ = ["EVALUATION", "INITIAL", "MANIFEST", "TRAINING", "export_evaluation", "places", "with_state_inputs", "write_artifacts"]

TRAINING, EVALUATION, INITIAL, MANIFEST = "training.onnx", "eval.onnx", "initial.onnx", "manifest.json"
_VERSION = 1


def export_evaluation(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    targets: tuple[Any, ...] | torch.Tensor = (),
    precision: str | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Program:
    """Export the forward of a model in eval mode; its inputs are called as those of the model's training step.

    Args:
        model: The model; it has its own mode again afterwards.
        args, kwargs, targets, precision, dynamic_shapes: As the step got them; sizes of targets are left out.
        **options: dynamo, opset_version, inline, portable, ...: as `exporter.export`.

    Raises:
        ExportError, ArgumentError: As `exporter.export`.
    """
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    targets = (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    with _evaluating(model):
        objective = Objective(model, args, dict(kwargs or {}), None, targets, precision, evaluates=True)
        return objective.export(dynamic_shapes=dynamic_shapes, **options)


def write_artifacts(
    step: TrainingStep, evaluation: Program, folder: str | os.PathLike[str], *, external_data: bool | None = None, check: bool = True
) -> dict[str, Any]:
    """Write training.onnx, eval.onnx, initial.onnx and manifest.json: all of them or none.

    Args:
        step: What `exporter.export_training_step` returned.
        evaluation: What `export_evaluation` returned for the same model. In the file the state of the step is an input of it.
        folder: Where to; it is made where it is missing. Files of these names are replaced, others stay.
        external_data, check: As `Program.save`.

    Returns:
        The manifest.

    Raises:
        ExportError: A file cannot be written, a model is not valid ONNX, or the evaluation is of another model.
    """
    assert step.layout is not None
    path = Path(folder)
    paths = places(path)
    forward = with_state_inputs(evaluation.model, step.layout)
    manifest = _manifest(step, step.layout, forward)
    with _made(path):
        models = [step.model, forward, step.initial_model]
        text = json.dumps(manifest, indent=1) + "\n"
        save_models(list(zip(models, paths[:3], strict=True)), external_data=external_data, texts=[(text, paths[3])], check=check)
    if manifest["python"]:
        warnings.warn(
            f"{path} needs Python: the calls of {clean(', '.join(manifest['python']))} stay PythonOps, which run nowhere else; "
            "export with portable=True (--portable) for files that need none",
            PythonopWarning,
            stacklevel=2,
        )
    return manifest


def places(folder: Path, error: type[Exception] = ExportError, keep: Iterable[Path] = ()) -> list[Path]:
    """The paths of the artifacts, in the order training, evaluation, initial state, manifest.

    Args:
        folder: Where they go; it may be missing.
        error, keep: As `exporter.files.save.writable`.

    Raises:
        error: One cannot be written there.
    """
    paths = [folder / name for name in (TRAINING, EVALUATION, INITIAL, MANIFEST)]
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
    for value in forward.graph.inputs:
        value.name = names.get(name_of(value), value.name) if name_of(value) in used else value.name
    known = forward.graph.initializers
    forward.metadata_props[STATE_KEY] = write_state({key: entry for key, entry in entries.items() if entry.initializer in known})
    return forward


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _manifest(step: TrainingStep, layout: StepLayout, forward: ir.Model) -> dict[str, Any]:
    """What the files are, for programs; see docs/training.md."""
    inputs = {name_of(value): value for value in step.model.graph.inputs}
    next_of = {name: output for output, name in layout.carried.items()}
    kinds = {**dict.fromkeys(layout.parameters.values(), "parameter"), **dict.fromkeys(layout.buffers.values(), "buffer")}
    return {
        "format": _VERSION,
        "files": {"training": TRAINING, "eval": EVALUATION, "initial": INITIAL},
        "inputs": [_described(inputs[name]) for name in layout.inputs],
        "targets": [_described(inputs[name]) for name in layout.targets],
        "loss": layout.loss,
        "eval": {
            "inputs": [_described(value) for value in forward.graph.inputs if value.name not in kinds],
            "state": [value.name for value in forward.graph.inputs if value.name in kinds],
            "outputs": [_described(value) for value in forward.graph.outputs],
        },
        "state": [
            {
                "name": name, "next": next_of[name], "dtype": array.dtype.name, "shape": list(array.shape),
                "kind": kinds.get(name, "optimizer" if name.startswith("state.") else "seed"),
            }
            for name, array in step.initial.items() if name in next_of
        ],
        "hyperparameters": [
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "default": array.tolist()}
            for name, array in step.initial.items() if name not in next_of
        ],
        "optimizer": layout.optimizer,
        "python": sorted({str(attr(node, "name")) for model in (step.model, forward) for node in _nodes(model) if is_python_op(node)}),
    }  # fmt: skip


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _described(value: ir.Value) -> dict[str, Any]:
    """Name, type and sizes; an open size is its name, or null where it has none."""
    dims = None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return {"name": value.name, "dtype": dtype_of(value).numpy().name, "shape": dims}
