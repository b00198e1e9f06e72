"""What a training in any language has learned, as one model: its evaluation with the values of a saved state. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from exporter.errors import short
from exporter.files.program import Program
from exporter.files.proto import UnreadableFileError, check_plain
from exporter.files.read import open_model
from symbolics.errors import ArgumentError, FormatError
from symbolics.graph.values import dtype_of, name_of
from symbolics.node.metadata import (
    StateEntry,
    StepLayout,
    forget_absent_changes,
    read_state,
    read_transient,
    results_of,
    state_of,
    step_of,
    write_state,
)
from symbolics.node.names import OUTPUTS_KEY, STATE_KEY, TRANSIENT_KEY
from symbolics.node.result import count_tensors
from symbolics.text import reason, shown

__all__ = [
    "EVALUATION", "EVALUATION_LOSS", "EVALUATION_PLAIN", "INITIAL", "MANIFEST", "MANIFEST_FORMAT", "TRAINING", "UNREAD", "average_of", "check_same_state", "files_of", "listed", "saved_values", "trained"
]  # fmt: skip

#: The files of a folder of artifacts.
TRAINING, EVALUATION, INITIAL, MANIFEST = "training.onnx", "eval.onnx", "initial.onnx", "manifest.json"
#: What the manifest says of itself: programs refuse another one.
MANIFEST_FORMAT = 1
#: The evaluation once more, with targets and loss.
EVALUATION_LOSS = "eval_loss.onnx"
#: The evaluation as it is for every runtime, where the others are written for one provider.
EVALUATION_PLAIN = "eval_plain.onnx"
#: What of the model's state_dict no node of that evaluation reads.
UNREAD = "unread.onnx"

#: The longest line of names that a saved state may have.
_LONGEST = 1 << 26
_TYPES = frozenset(
    ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16")
    + ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
)


def average_of(parameter: str) -> str:
    """The input of a step that holds the moving average of a parameter, by the input that holds the parameter."""
    return f"state.{parameter.partition('.')[2]}.ema"


def listed(folder: Path, name: str) -> Path | None:
    """A file of a folder that not every folder has, where the manifest lists it: another training may have left one of this name.

    Raises:
        FormatError: The manifest cannot be read, or is of a format that this release does not know.
    """
    try:
        check_plain(folder / MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        written, known = manifest["format"], name in manifest["files"].values()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{folder / MANIFEST} is no manifest of a training: {reason(error)}") from error
    if written != MANIFEST_FORMAT:
        raise FormatError(
            f"{folder / MANIFEST} has format {shown(str(written))}, this release reads format {MANIFEST_FORMAT}: install a newer pythonop"
        )
    return folder / name if known else None


def files_of(folder: Path) -> list[Path]:
    """What belongs to a folder of artifacts, whether it is there or not: a trainer reads it."""
    return [folder / name for name in (TRAINING, EVALUATION, INITIAL, MANIFEST, EVALUATION_LOSS, EVALUATION_PLAIN, UNREAD)]


@short
def trained(folder: str | os.PathLike[str], saved: bytes | str | os.PathLike[str], *, ema: bool = False) -> Program:
    """Make one ONNX model in eval mode of what a training has learned, as `export` would after the training.

    Args:
        folder: The artifacts (of `write_artifacts`, or ``pythonop step --artifacts``).
        saved: What `Trainer.save`, or ``save()`` of a trainer in another language, returned: the bytes, or the file.
        ema: Whether to take the averages of the parameters. The step must have been exported with ``ema``.

    Returns:
        The model. Its parameters and buffers are initializers, by the keys of the model's own state_dict. Those that no step
        changes are as they were, also where nothing reads them. As an evaluation, it returns the model's results alone: a buffer that
        forward changes in eval mode, too, keeps the value that the training left.

    Raises:
        ArgumentError: The state is that of another model or optimizer, or keeps no averages.
        FormatError: A file is missing or damaged, or the state is cut off.

    Examples:
        >>> exporter.trained("artifacts", "after.state").save("model.onnx")
    """
    path = Path(folder)
    step = open_model(path / TRAINING, data=False)
    layout = step_of(step)
    if layout is None:
        raise FormatError(f"{shown(str(path / TRAINING))} is no training step: write_artifacts and `pythonop step --artifacts` write one")
    model = open_model(listed(path, EVALUATION_PLAIN) or path / EVALUATION)
    values = saved_values(saved, "trained")
    carried = [value for value in step.graph.inputs if value.name not in (*layout.inputs, *layout.targets)]
    check_same_state(values, {name_of(value): (dtype_of(value).numpy(), _sizes(value) or ()) for value in carried}, shown(str(path)))
    keys = _keys(layout)
    entries, transient = read_state(model.metadata_props) or {}, read_transient(model.metadata_props) or ()
    model.metadata_props.pop(TRANSIENT_KEY, None)
    # Folders of before, whose evaluation named what its loss alone read or changed.
    entries = {key: entry for key, entry in entries.items() if entry.initializer in model.graph.initializers}
    forget_absent_changes(model)
    _drop_a_foreign_structure(model)
    for value in [value for value in model.graph.inputs if value.name in keys]:
        name = name_of(value)
        first = keys[name][0]
        source = _source(name, first, layout, values, ema)
        _fill(model.graph, value, first, values.get(source), source)
        kind = "parameter" if name in layout.parameters.values() else "buffer"
        entries |= {
            key: StateEntry(first, kind, kind == "parameter", kind == "parameter" or key not in transient)  # type: ignore[arg-type]
            for key in keys[name]
        }
    if (file := listed(path, UNREAD)) is not None:
        entries |= _add_unread(model.graph, open_model(file), layout, values, ema)
        keys = {}
    given = {*entries, *(name_of(value) for value in model.graph.inputs), *model.graph.initializers}
    for name, (first, *more) in keys.items():  # folders of before: counts of batches
        if name in layout.buffers.values() and name in values and given.isdisjoint((first, *more)):
            model.graph.initializers[first] = ir.Value(
                name=first, const_value=ir.tensor(values[name], name=first), shape=ir.Shape(values[name].shape),
                type=ir.TensorType(ir.DataType.from_numpy(values[name].dtype)),
            )  # fmt: skip
            entries |= {key: StateEntry(first, "buffer", False, True) for key in (first, *more)}
    model.metadata_props[STATE_KEY] = write_state(entries)
    return Program(model)


def _source(name: str, key: str, layout: StepLayout, values: Mapping[str, np.ndarray], ema: bool) -> str:
    """What of a state goes where a step has this input: of a parameter the average, where that is asked for."""
    if not ema or name not in layout.parameters.values():
        return name
    if (source := average_of(name)) not in values:
        raise ArgumentError(f"the state keeps no average of {shown(key)}: export the step with ema=0.999")
    return source


def _add_unread(
    graph: ir.Graph, unread: ir.Model, layout: StepLayout, values: Mapping[str, np.ndarray], ema: bool
) -> dict[str, StateEntry]:
    """Make initializers of what no node reads, with what the training has made of it; their state_dict keys."""
    entries = state_of(unread) or {}
    carried = {**layout.parameters, **layout.buffers}
    taken = {*graph.initializers, *(value.name for value in graph.inputs)}
    owners: dict[str, str] = {}
    for key, entry in entries.items():
        owners.setdefault(entry.initializer, key)
    for name, key in owners.items():
        old = unread.graph.initializers[name]
        if name in taken:
            raise FormatError(f"the folder has {shown(name)} in the evaluation and in {UNREAD}: the file is damaged")
        tensor = old.const_value
        if key in carried:
            source = _source(carried[key], key, layout, values, ema)
            tensor = ir.tensor(_fitting(old, values.get(source), source), name=name)
        graph.initializers[name] = ir.Value(name=name, type=old.type, shape=old.shape, const_value=tensor)
    return entries


def _drop_a_foreign_structure(model: ir.Model) -> None:
    """Folders of 0.1.0 whose evaluation had its loss say what stood around loss and outputs."""
    structure = model.metadata_props.get(OUTPUTS_KEY)
    if structure is not None and count_tensors(structure) != len(results_of(model)):
        del model.metadata_props[OUTPUTS_KEY]


def _keys(layout: StepLayout) -> dict[str, list[str]]:
    """input of a step -> the state_dict keys of what it holds."""
    keys: dict[str, list[str]] = {}
    for key, name in (*layout.parameters.items(), *layout.buffers.items()):
        keys.setdefault(name, []).append(key)
    return keys


def _fill(graph: ir.Graph, value: ir.Value, key: str, array: np.ndarray | None, source: str) -> None:
    """Make an initializer of an input."""
    array = _fitting(value, array, source)
    if key in graph.initializers or any(other is not value and other.name == key for other in graph.inputs):
        raise FormatError(f"the evaluation has {shown(key)} twice: the file is damaged")
    graph.inputs.remove(value)
    value.name = key
    value.const_value = ir.tensor(array, name=key)
    graph.initializers[key] = value


def _fitting(value: ir.Value, array: np.ndarray | None, source: str) -> np.ndarray:
    """A value of the state as one of the model.

    Raises:
        ArgumentError: It has not its type and shape.
    """
    shape = _sizes(value)
    if array is None:
        raise ArgumentError(f"the state has no {shown(source)}, which the evaluation reads: it is that of another model")
    if array.dtype == np.int32 and dtype_of(value) is ir.DataType.INT64:  # of a step that was written for a provider without int64
        array = array.astype(np.int64)
    if array.dtype != dtype_of(value).numpy() or shape is None or list(array.shape) != shape:
        raise ArgumentError(
            f"{shown(source)} of the state has the type {array.dtype} and the shape {list(array.shape)}, and the evaluation takes {dtype_of(value).numpy()} {shape}: "
            "it is the state of another model"
        )
    return array


def _sizes(value: ir.Value) -> list[int | None] | None:
    """The shape of a value; None is what is open."""
    return None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape]


def check_same_state(values: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[Any, Sequence[int | None]]], taker: str) -> None:
    """That a saved state has the names, types and shapes of a training.

    Args:
        values: What `saved_values` returned.
        wanted: numpy's dtype and the shape of each value of the training, by name.
        taker: What has them, for the message.

    Raises:
        ArgumentError: It has others.
    """
    for name, (dtype, shape) in wanted.items():
        found = values.get(name)
        if found is None:
            what = f"it lacks {shown(name)}"
        elif found.dtype != dtype or list(found.shape) != list(shape):
            what = f"{shown(name)} is {found.dtype} {list(found.shape)} in it, and {np.dtype(dtype)} {list(shape)} in {taker}"
        else:
            continue
        break
    else:
        if not (more := [name for name in values if name not in wanted]):
            return
        what = f"it has {shown(more[0])}, which {taker} has not"
    raise ArgumentError(
        f"what was saved is the state of another model or optimizer: {what}. Give it to the folder or step that it was trained with"
    )


def _bytes(saved: Any, taker: str) -> bytes:
    """What save() of a trainer gave, of bytes or a file."""
    if isinstance(saved, (str, os.PathLike)):
        try:
            check_plain(saved)
            return Path(saved).read_bytes()
        except UnreadableFileError:
            raise
        except (OSError, ValueError) as error:
            raise FormatError(f"{shown(str(saved))} cannot be read: {reason(error)}") from error
    if not isinstance(saved, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"{taker} takes the bytes that save() gave, or their file, not {type(saved).__name__}")
    return bytes(saved)


def saved_values(saved: Any, taker: str, damaged: type[Exception] = FormatError) -> dict[str, np.ndarray]:
    """The values of a saved state by their names: a line of JSON, and their bytes one after the other. The arrays cannot be written to.

    Args:
        saved: The bytes that save() gave, or the file that holds them.
        taker: Who takes them, for the message.
        damaged: What is raised where the bytes are no state, or not a whole one.

    Raises:
        ArgumentError: It is neither.
        FormatError: The file cannot be read.
        damaged: The bytes are damaged.
    """
    data = _bytes(saved, taker)
    end = data.find(b"\n", 0, _LONGEST)
    try:
        described: Any = json.loads(data[:end]) if end >= 0 else None
        sizes = [(str(each["name"]), _dtype(each["type"]), tuple(map(int, each["dims"])), int(each["bytes"])) for each in described]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("what was saved does not begin with the names of its values: save() of a trainer writes it") from error
    found: dict[str, np.ndarray] = {}
    at = end + 1
    for name, dtype, dims, size in sizes:
        if name in found:
            raise damaged(f"what was saved has {shown(name)} twice, it is damaged: save it anew")
        if min(dims, default=0) < 0 or size != dtype.itemsize * int(np.prod([*map(int, dims)], dtype=object)) or at + size > len(data):
            raise damaged(f"what was saved is cut off at {shown(name)}, or damaged: save it anew")
        found[name] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(dims)
        at += size
    if at != len(data):
        raise damaged(f"what was saved has {len(data) - at} bytes behind its values: save it anew")
    return found


def _dtype(name: Any) -> np.dtype[Any]:
    """The dtype that a saved state calls so; numpy has no bfloat16."""
    if name not in _TYPES:
        raise ValueError(name)
    return np.dtype(getattr(ml_dtypes, name, name))
