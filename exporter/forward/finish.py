"""finish(): a model as torch translated it becomes a file of docs/format.md; the same for both exporters."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer

import symbolics.node.schema  # noqa: F401  (the checker should know the operators of what we write)
from exporter.files.additions import ADDITIONS
from exporter.files.valid import check_halves
from exporter.forward.fold import fold, outputs_unsaid
from exporter.forward.state import ModelState, held_out
from exporter.train_mode.buffers import AVERAGED, UNSEEN, add_lost, carry, name_carried
from exporter.train_mode.stilled import stilled
from symbolics import quirks, torch_private
from symbolics.capture.recorder import Recorder
from symbolics.graph.boundaries import say_types
from symbolics.graph.values import is_mark, is_python_op
from symbolics.graph.walk import walk
from symbolics.node.attributes import ir_attributes, write_attributes
from symbolics.node.dtypes import onnx_type
from symbolics.node.metadata import BufferChanges, write_changes, write_cumulative, write_state, write_stilled
from symbolics.node.names import (
    BUFFERS_KEY,
    CALL_ATTRIBUTE,
    CUMULATIVE_KEY,
    FORMAT_VERSION,
    MARK_COUNT_KEY,
    MARK_DOMAIN,
    MARK_OP,
    MODULE_PROPERTY,
    OPAQUE_PROPERTY,
    ORT_DOMAIN,
    OUTPUTS_KEY,
    PYTHON_OP,
    SOURCE_PROPERTY,
    STATE_KEY,
    STILLED_KEY,
    VERSION_KEY,
)
from symbolics.node.result import count_tensors

__all__ = ["anchor_calls", "finish"]

#: The opset of torch.export's translation. In older ones operators have other inputs: rewrite rules fail there, or write what is not valid.
_RULES_FROM = 18


def finish(model: ir.Model, recorder: Recorder, state: ModelState, *, optimize: bool) -> None:
    """Make a translated model a file of docs/format.md, in place.

    Args:
        model: The translated model.
        recorder: Who captured its calls.
        state: The parameters and buffers as they were before the export.
        optimize: Fold constants, merge equal nodes, and apply onnxscript's rewrite rules, where the opset is one that these are written for.
    """
    graph = model.graph
    written = recorder.capture.written
    results = len(graph.outputs) - recorder.capture.anchored - len(written)
    say_types(walk(graph))
    parameters = state.adopt(graph)
    _keep_outputs(graph, results + len(written))
    carried, noted = carry(graph, results, written, state.entries, recorder.read)
    own_outputs = len(graph.outputs)
    if results == len(recorder.capture.results):
        _distrust_shapes(graph, recorder)
    quirks.apply(quirks.TRANSLATED, model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held_out(graph, parameters))
        stack.enter_context(outputs_unsaid())
        for apart in quirks.OPTIMIZING:
            stack.enter_context(apart(graph))
        anchor_calls(graph)
        if optimize and model.opset_imports[""] < _RULES_FROM:
            fold(model)
        elif optimize:
            with torch_private.rules_by_operator():
                onnxscript.optimizer.optimize(model)
        else:
            passes.InlinePass()(model)
            passes.RemoveUnusedNodesPass()(model)
    _keep_outputs(graph, own_outputs)
    if results == len(recorder.capture.results):
        _give_types(graph, recorder)
    nodes = quirks.apply((*quirks.OPTIMIZED, _name_everything), model)
    _describe_calls(graph, nodes, recorder)
    _write_metadata(model, nodes, recorder, state, results)
    if carried:
        model.metadata_props[BUFFERS_KEY] = write_changes(
            BufferChanges(name_carried(graph, carried, results), {}, recorder.capture.evaluated)
        )
    averages = dict.fromkeys((name for name in state.cumulative if name in carried), AVERAGED)
    unseen = [name for name in recorder.capture.missed if recorder.read is None or name in recorder.read]
    add_lost(model, {**dict.fromkeys((*(name for name in written if name not in noted), *unseen), UNSEEN), **averages})
    _import_domains(model, nodes)
    check_halves(model)
    for add in ADDITIONS:
        add(model)


def anchor_calls(graph: ir.Graph) -> int:
    """Make an output of the graph of each call, so that no pass removes it; eager makes a call whether or not its result is read.

    Returns:
        How many outputs came in.
    """
    count, known = len(graph.outputs), set(map(id, graph.outputs))
    for node in graph:
        if is_python_op(node) and not any(id(value) in known for value in node.outputs):
            graph.outputs.append(node.outputs[1 if len(node.outputs) > 1 else 0])
    return len(graph.outputs) - count


def _keep_outputs(graph: ir.Graph, count: int) -> None:
    """Take back what `anchor_calls` or a trace made outputs, by `symbolics.quirks.elsewhere.DELETED_SLICES` one by one."""
    while len(graph.outputs) > count:
        graph.outputs.pop()


def _distrust_shapes(graph: ir.Graph, recorder: Recorder) -> None:
    """Drop what torch declares of the shapes of results, where the capture knows otherwise."""
    for value, (_, dims) in zip(graph.outputs, recorder.capture.results):
        if value.shape is None:
            continue
        if len(value.shape) != len(dims):
            value.shape = ir.Shape([None] * len(dims))
        elif any(isinstance(old, int) and new is not None and old != new for old, new in zip(value.shape, dims)):
            value.shape = ir.Shape([None if isinstance(old, int) and old != new else old for old, new in zip(value.shape, dims)])


def _give_types(graph: ir.Graph, recorder: Recorder) -> None:
    """Cast the results that torch's translation leaves in another type than they have in eager mode."""
    for index, (value, (dtype, _)) in enumerate(zip(list(graph.outputs), recorder.capture.results)):
        wanted = ir.DataType(onnx_type(dtype)) if value.dtype is not None and not dtype.is_complex else value.dtype
        if value.dtype != wanted and wanted is not None:
            cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", wanted)], name=f"{value.name}/cast")
            graph.append(cast)
            output = graph.outputs[index] = cast.outputs[0]
            output.name, value.name = value.name, cast.name
            output.type, output.shape = ir.TensorType(wanted), value.shape


def _name_everything(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Give every node and value a name of its own; a graph without bodies that TorchScript made has them."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
    # An initializer may be an input, too.
    value_names, node_names = {value.name: value for value in values}, {node.name for node in nodes}
    named = all(node.graph is graph for node in nodes) and all(value_names) and all(node_names) and len(node_names) == len(nodes)
    if not (named and all(value_names[value.name] is value for value in values)):
        passes.NameFixPass()(model)
    return False


def _describe_calls(graph: ir.Graph, nodes: list[ir.Node], recorder: Recorder) -> None:
    outputs_of_graphs = {id(value) for value in graph.outputs}
    count = 0
    for node in nodes:
        if not is_python_op(node) or CALL_ATTRIBUTE not in node.attributes:
            continue
        record = recorder.records.get(str(json.loads(node.attributes[CALL_ATTRIBUTE].as_string()).get("id")))
        if record is None:
            continue  # a PythonOp of somebody else's making
        call = replace(record.call, id=str(count))
        count += 1
        for attribute in ir_attributes(write_attributes(call, recorder.names)):
            node.attributes[attribute.name] = attribute
        node.metadata_props.pop("pkg.torch.onnx.fx_node", None)  # it shows the number of the capture, another one each time
        recorder.capture.placed[node] = record
        for key, text in ((MODULE_PROPERTY, record.module), (SOURCE_PROPERTY, record.source), (OPAQUE_PROPERTY, record.chosen)):
            if text:
                node.metadata_props[key] = text
        context, *outputs = node.outputs
        context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        if not context.uses() and id(context) not in outputs_of_graphs:
            context.name = ""  # nobody asks for a context: a run makes none
        for value, kind, rank in zip(outputs, call.output_types, call.output_ranks, strict=True):
            value.type = ir.TensorType(ir.DataType(kind))
            if value.shape is None or len(value.shape) != rank:
                value.shape = ir.Shape([None] * rank)
            if not value.name:
                value.name = f"{node.name or PYTHON_OP}_{value.index()}"


def _write_metadata(model: ir.Model, nodes: list[ir.Node], recorder: Recorder, state: ModelState, results: int) -> None:
    model.metadata_props[VERSION_KEY] = str(FORMAT_VERSION)
    model.metadata_props[STATE_KEY] = write_state(state.entries)
    model.metadata_props[MARK_COUNT_KEY] = str(sum(map(is_mark, nodes)))
    if state.cumulative:
        model.metadata_props[CUMULATIVE_KEY] = write_cumulative(state.cumulative)
    if names := stilled(recorder.capture.model, recorder.capture.evaluated):
        model.metadata_props[STILLED_KEY] = write_stilled(names)
    if recorder.capture.outputs is not None and count_tensors(recorder.capture.outputs) == results:
        model.metadata_props[OUTPUTS_KEY] = recorder.capture.outputs


def _import_domains(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Import what the nodes are of, and last give the stop-gradient mark its body: an optimizer would inline it, and the mark be gone."""
    domains = {node.domain for node in nodes}
    if ORT_DOMAIN in domains:
        model.opset_imports[ORT_DOMAIN] = 1
    model.opset_imports.pop(MARK_DOMAIN, None)
    if MARK_DOMAIN in domains:
        model.opset_imports[MARK_DOMAIN] = 1
        mark = _mark_function(model.opset_imports[""])
        model.functions[mark.identifier()] = mark


def _mark_function(opset: int) -> ir.Function:
    """The body of the stop-gradient mark: Identity, so that every runtime can run the file."""
    x = ir.Value(name="x")
    node = ir.Node("", "Identity", [x], name="identity")
    node.outputs[0].name = "y"
    body = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": opset}, name=MARK_OP)
    return ir.Function(MARK_DOMAIN, MARK_OP, graph=body, attributes=[])
