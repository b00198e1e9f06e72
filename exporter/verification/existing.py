"""A file that is there already, held against the model of today: what it may name, and its weights beside the model's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import onnx_ir as ir
import torch

from exporter.files.named import functions_in, names_in
from exporter.files.read import open_model
from exporter.files.trust import Gate
from exporter.files.weights import lift_weights
from exporter.forward.case import Case
from exporter.forward.export import export
from exporter.module.state import entries_of
from exporter.runtime.changed import changed_functions, named
from exporter.runtime.tensors import to_tensor
from exporter.verification.compare import difference, largest
from exporter.verification.notes import CHANGED, Note
from exporter.verification.rows import GRADIENTS, NOT_COMPARED, Row
from exporter.verification.steps import copy_of, entries_of_copy
from symbolics.errors import FormatError, PythonopError, TrustError
from symbolics.graph.walk import walk
from symbolics.node.names import STATE_KEY, STEP_KEY
from symbolics.text import shown

__all__ = ["lost_gradients", "names_allowed", "note_on_values", "note_on_weights", "open_existing", "weight_rows"]

_LACKING = "the file has no such weight"


def open_existing(file: Any) -> ir.Model:
    """The file, as its weights are compared.

    Raises:
        FormatError: It cannot be read, is damaged, or is a training step.
    """
    model = open_model(file)
    if STEP_KEY in model.metadata_props:
        raise FormatError("the file is a training step, which has no weights of its own: give the file of the model's forward")
    lift_weights(model)
    return model


def names_allowed(file: ir.Model, case: Case, **options: Any) -> list[Any]:
    """What a file may name if nobody says so: what an export of the model of today names. The file itself is not asked."""
    if not functions_in(file):
        return list(case.allow)
    try:
        copied = copy_of(case.model)
        today = export(copied, case.args, case.kwargs, **{**options, **entries_of_copy(case, copied)})
    except PythonopError as error:
        raise type(error)(
            f"which Functions the file may name is what an export of the model names, and there is none (allow= says it, too): {error}"
        ) from error
    return [*names_in(today.model), *case.allow]


def note_on_values(file: ir.Model, allowed: Sequence[Any]) -> Iterator[Note]:
    """The values that Functions of the file read, where eager's process has others: the fresh process says only what differs there."""
    gate = Gate(allowed)
    for name in functions_in(file):
        with suppress(TrustError):
            gate("function", name)
    _, values = named(changed_functions(file.metadata_props, gate.functions))
    if values:
        yield Note(CHANGED, f"In this process, whose model is run in eager mode, {', '.join(values)} when the file was exported.")


def weight_rows(file: ir.Model, model: torch.nn.Module) -> list[Row]:
    """A row for each parameter and buffer: in the file as it is, against the model's; of a foreign file for those that both have."""
    entries = entries_of(file)
    ours = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    complete = STATE_KEY in file.metadata_props
    names = dict.fromkeys((*ours, *entries)) if complete else [name for name in ours if name in entries]
    return [_row(name, ours.get(name), file.graph.initializers[entries[name].initializer] if name in entries else None) for name in names]


def _row(name: str, ours: torch.Tensor | None, value: ir.Value | None) -> Row:
    array = None if value is None else value.const_value
    theirs = None if array is None else to_tensor(array.numpy())
    known = ours if ours is not None else theirs
    if not isinstance(known, torch.Tensor) or torch.nn.parameter.is_lazy(known):
        return Row(name, "weight", (), "", float("nan"), None, 0.0, "", False, "it has no values")
    about = (name, "weight", tuple(known.shape), str(known.dtype).removeprefix("torch."))
    missing = _LACKING if theirs is None else "the model has no such weight" if ours is None else ""
    if not missing and ours is not None and isinstance(theirs, torch.Tensor) and (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        missing = f"in the file it is {str(theirs.dtype).removeprefix('torch.')} of shape {list(theirs.shape)}"
    if missing or ours is None or not isinstance(theirs, torch.Tensor):
        return Row(*about, float("nan"), None, 0.0, "", False, missing or "it has no values")
    ours = ours.detach().cpu()
    if torch.equal(ours, theirs):
        return Row(*about, 0.0, None, 0.0, about[3], True)
    count = int(((ours != theirs) & ~((ours != ours) & (theirs != theirs))).sum())
    problem = f"{count} of {ours.numel()} elements differ" if count else ""
    gap = difference(theirs, ours) / (largest(ours) or 1.0) if ours.is_floating_point() else float(count)
    return Row(*about, gap, None, 0.0, about[3], not count, problem)


def lost_gradients(lost: Iterable[str]) -> Iterator[tuple[Row, Note]]:
    """For each thing that a file has lost and that gradients depend on, as `lost_counts` says it: a row that is not equal, and what to do."""
    for message in lost:
        row = Row("all gradients", GRADIENTS, (), "", float("nan"), None, 0.0, "", False, NOT_COMPARED)
        yield (
            row,
            Note(
                "Gradients not compared",
                f"{message} Outputs and buffers were compared. Way out: verify the file as the exporter saved it (so does --bisect), before its functions are inlined.",
            ),
        )


def _is_in_integers(file: ir.Model) -> bool:
    """Whether a file has weights in integers: a DequantizeLinear of its graph reads one that is constant."""
    nodes = (node for node in walk(file.graph) if node.op_type == "DequantizeLinear" and not node.domain and node.inputs)
    return any(node.inputs[0] is not None and node.inputs[0].const_value is not None for node in nodes)


def note_on_weights(rows: list[Row], model: ir.Model, file: str) -> Iterator[Note]:
    """What to do where the weights are others: the code can be compared all the same.

    Args:
        rows: Of `weight_rows`.
        model, file: The file, and what to call it.
    """
    bad = [row for row in rows if not row.ok]
    other = [row for row in bad if not row.reference]  # where there is one, elements were compared
    if any(row.problem == _LACKING for row in other) and _is_in_integers(model):
        yield Note(
            "A file in integers",
            f"{len(bad)} of {len(rows)} weights of the model are not in the file as they are, as it computes in integers (exporter.quantize writes such files): "
            f"compare it with its fake-quantised model by pythonop verify --quantized {shown(file)} TARGET, or exporter.verify_quantized.",
        )
    elif other:
        yield Note(
            "Other weights",
            f"{len(other)} of {len(rows)} weights are of another shape or type, or on one side alone (the first is {other[0].name}: {other[0].problem}), so that "
            "outputs and gradients cannot be equal: this is the file of another model. Way out: export this model again, or give verify the TARGET that the "
            "file was exported from.",
        )
    elif bad:
        yield Note(
            "Other weights",
            f"{len(bad)} of {len(rows)} weights of the file are not the model's, so that outputs and gradients differ, too. To compare the code alone, give the "
            f"model those of the file: model.load_state_dict(exporter.load({shown(file)!r}, allow=...).state_dict(), strict=False); to compare the weights, let "
            "the factory load the checkpoint that the file was exported from.",
        )
