"""A fake-quantised model in the form in which quantisers are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from exporter.files.read import open_model
from exporter.files.tensors import check_data
from exporter.gradient_graph.inference import infer_shapes
from exporter.gradient_graph.model import lost_counts, own_copy, remove_marks
from exporter.quantization.decided import decide, drop_settled_buffers
from exporter.quantization.declared import declare
from exporter.quantization.evaluation import nodes_between
from exporter.quantization.qonnx_nodes import from_qonnx_nodes
from exporter.quantization.quantizers import Quantizer
from exporter.quantization.records import Record, lower
from exporter.quantization.straight_through import drop_straight_through
from symbolics.errors import FormatError
from symbolics.graph.walk import name_nodes, remove_unread, unread, walk
from symbolics.node.metadata import read_state, write_state
from symbolics.node.names import LINKS_KEY, STATE_KEY
from symbolics.text import reason

__all__ = ["Prepared", "count_declared", "forget", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A model of standard operators, its functions inlined.

    Attributes:
        model: The model.
        declared: What a declared Function gives -> its record.
        kept: Initializers that the forward does not read.
    """

    model: ir.Model
    declared: dict[ir.Value, Record]
    kept: Any


def in_memory(model: Any) -> ir.Model:
    """A copy of a model with all its weights in memory: parts of it are run, and onnxruntime looks for files beside the process.

    Raises:
        FormatError: The model is not valid, or the data of its weights is not there.
    """
    copy = own_copy(model, forward=True)
    check_data(copy)
    ir.external_data.load_to_model(copy)
    return copy


def prepare(model: Any) -> Prepared:
    """A copy of a model in which quantisers can be found.

    Raises:
        FormatError: The model is not valid.
        ExportError: A Function computes something else than what `exporter.quantizer` declared.
    """
    source = open_model(model)
    # The counts of what it has lost stay: a gradient of what comes of it is refused as one of the model itself is.
    lost = {key: source.metadata_props[key] for key in lost_counts(source)}
    copy = in_memory(source)
    kept = unread(copy.graph)  # parameters that the forward does not read are the model's, all the same
    from_qonnx_nodes(copy)
    declare(copy)
    declared = lower(copy)
    drop_straight_through(copy)
    remove_marks(copy)
    copy.metadata_props.pop(LINKS_KEY, None)
    copy.metadata_props.update(lost)
    for function in copy.functions.values():
        _forget_open_sizes(function)
    try:
        passes.InlinePass()(copy)
    except ValueError as error:  # functions of another opset
        raise FormatError(f"the functions of the model cannot be put in the place of their calls: {reason(error)}") from error
    copy.functions.clear()
    decide(copy)
    drop_settled_buffers(copy)
    remove_unread(copy.graph, kept)
    infer_shapes(copy, only_where_missing=True)
    name_nodes(copy)  # files of others have nodes without one
    return Prepared(copy, declared, kept)


def _forget_open_sizes(function: ir.Function) -> None:
    """Take out the names of open sizes: each call may have others, and onnxruntime takes values whose sizes have one name for equally large."""
    for node in walk(function):
        for value in node.outputs:
            if value.shape is not None and not all(isinstance(size, int) for size in value.shape):
                value.shape = ir.Shape([size if isinstance(size, int) else None for size in value.shape])


def count_declared(quantizer: Quantizer, declared: Mapping[ir.Value, Record]) -> None:
    """Count the thresholds that a declared Function has elsewhere than what stands for it."""
    for node in nodes_between([quantizer.source], [quantizer.result]):
        record = next((declared[value] for value in node.outputs if value in declared), None)
        if record is not None:
            grid = quantizer.grid
            moved = min(grid.moved + record.moved, grid.high - grid.low)
            quantizer.grid = replace(grid, floats=grid.floats + record.floats, moved=moved)


def forget(model: ir.Model) -> None:
    """Take from the table of the state what the file holds no more: weights and biases that are integers now."""
    used = {node.domain for node in walk(model.graph)}
    for domain in [domain for domain in model.opset_imports if domain and domain not in used]:
        del model.opset_imports[domain]
    state = read_state(model.metadata_props)
    if state is not None:
        held = model.graph.initializers
        model.metadata_props[STATE_KEY] = write_state({name: entry for name, entry in state.items() if entry.initializer in held})
