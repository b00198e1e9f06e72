"""finish(): a model as torch translated it becomes a file of docs/format.md; the same for both exporters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
import torch

import symbolics.node.schema  # noqa: F401  (the checker should know the operators of what we write)
from exporter.forward.fold import fold
from exporter.forward.state import ModelState, held_out
from symbolics.capture.recorder import Recorder
from symbolics.errors import ExportError
from symbolics.graph.values import RANDOM
from symbolics.graph.walk import walk
from symbolics.node.attributes import encode, ir_attributes
from symbolics.node.metadata import write_cumulative, write_state
from symbolics.node.names import (
    CALL_ATTRIBUTE,
    CUMULATIVE_KEY,
    FORMAT_VERSION,
    MARK_COUNT_KEY,
    MARK_DOMAIN,
    MARK_OP,
    MODULE_PROPERTY,
    ORT_DOMAIN,
    OUTPUTS_KEY,
    PYTHON_OP,
    SOURCE_PROPERTY,
    STATE_KEY,
    VERSION_KEY,
)
from symbolics.node.result import count_tensors
from symbolics.quirks.batch_norm import pin_running_statistics
from symbolics.quirks.matrix_vector import turn_products_with_vectors

__all__ = ["anchor_calls", "drop_outputs", "finish", "refuse_scripted"]


def finish(model: ir.Model, recorder: Recorder, state: ModelState, *, optimize: bool, rewrite: bool = True) -> None:
    """Make a translated model a file of docs/format.md, in place.

    Inlines model-local functions, optimizes (parameters held out), numbers the calls, writes module paths and source
    lines, frees unused context outputs, writes the metadata, and last gives the stop-gradient mark its body.

    Args:
        model: The translated model.
        recorder: Who captured its calls.
        state: The parameters and buffers as they were before the export.
        optimize: Fold constants, merge equal nodes.
        rewrite: When optimizing, also apply onnxscript's rewrite rules, as torch.export's translation does. The TorchScript
            exporter folds constants alone; the rules would take longer than its whole export.

    Raises:
        ExportError: A PythonOp of this capture was lost on the way.
    """
    graph = model.graph
    parameters = state.adopt(graph)
    _keep_dropping(graph)
    drop_outputs(graph, recorder.anchored)
    with held_out(graph, parameters), _kept_apart(graph):
        anchored = anchor_calls(graph)
        if optimize and rewrite:
            onnxscript.optimizer.optimize(model)
        elif optimize:
            fold(model)
        else:
            passes.InlinePass()(model)
            passes.RemoveUnusedNodesPass()(model)
    drop_outputs(graph, anchored)
    nodes = list(_all_nodes(graph))  # walks over large graphs are what finishing costs: one serves all that follows
    if any(node.op_type == "BatchNormalization" for node in nodes):
        pin_running_statistics(graph)
        nodes = list(_all_nodes(graph))
    _adopt_orphans(graph, nodes)
    if turn_products_with_vectors(nodes):
        nodes = list(_all_nodes(graph))
    if not _well_named(graph, nodes):
        passes.NameFixPass()(model)
    _finish_calls(graph, nodes, recorder)
    marks = sum((node.domain, node.op_type) == (MARK_DOMAIN, MARK_OP) for node in nodes)
    model.metadata_props[VERSION_KEY] = str(FORMAT_VERSION)
    model.metadata_props[STATE_KEY] = write_state(state.entries)
    model.metadata_props[MARK_COUNT_KEY] = str(marks)
    if state.cumulative:
        model.metadata_props[CUMULATIVE_KEY] = write_cumulative(state.cumulative)
    if recorder.outputs is not None and count_tensors(recorder.outputs) == len(graph.outputs):
        model.metadata_props[OUTPUTS_KEY] = recorder.outputs
    if any(node.domain == ORT_DOMAIN for node in nodes):
        model.opset_imports[ORT_DOMAIN] = 1
    model.opset_imports.pop(MARK_DOMAIN, None)
    if marks:
        # An optimizer that runs later would inline the body, and the mark would be gone: now is the end.
        model.opset_imports[MARK_DOMAIN] = 1
        mark = _mark_function(model.opset_imports[""])
        model.functions[mark.identifier()] = mark


def _keep_dropping(graph: ir.Graph) -> None:
    """Say of each Dropout that it drops, where torch's translation does not.

    Neither exporter writes the dropout of a model in eval mode, but that of scaled_dot_product_attention(dropout_p=...) both
    write without training_mode: as a node that passes everything on.
    """
    for node in list(_all_nodes(graph)):
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx") and len(node.inputs) == 2:
            drops = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(True)))])
            drops.outputs[0].type, drops.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
            assert node.graph is not None
            node.graph.insert_before(node, drops)
            node.resize_inputs(3)
            node.replace_input_with(2, drops.outputs[0])


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return walk(graph)


def _well_named(graph: ir.Graph, nodes: list[ir.Node]) -> bool:
    """Whether every node and value has a name of its own, as in a graph without bodies that TorchScript made."""
    if any(node.graph is not graph for node in nodes):
        return False
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
    # An initializer may be an input, too.
    value_names, node_names = {value.name: value for value in values}, {node.name for node in nodes}
    complete = all(value_names) and all(node_names) and len(node_names) == len(nodes)
    return complete and all(value_names[value.name] is value for value in values)


_NUMBER = "pythonop_number"


@contextlib.contextmanager
def _kept_apart(graph: ir.Graph) -> Iterator[None]:
    """While the block runs, no two random draws are equal: the optimizer would make one of two dropouts of one value."""
    draws = [node for node in _all_nodes(graph) if node.op_type in RANDOM]
    for number, node in enumerate(draws):
        node.attributes[_NUMBER] = ir.AttrInt64(_NUMBER, number)
    try:
        yield
    finally:
        # A pass that inlines or rewrites may have copied the nodes.
        for node in _all_nodes(graph) if draws else ():
            node.attributes.pop(_NUMBER, None)


def anchor_calls(graph: ir.Graph) -> int:
    """Make an output of the graph of each call, so that no pass removes it; eager makes a call whether or not its result is read.

    Returns:
        How many outputs came in.
    """
    count, known = len(graph.outputs), set(map(id, graph.outputs))
    for node in graph:
        if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP) and not any(id(value) in known for value in node.outputs):
            graph.outputs.append(node.outputs[1 if len(node.outputs) > 1 else 0])
    return len(graph.outputs) - count


def drop_outputs(graph: ir.Graph, count: int) -> None:
    """Take back the last outputs of a graph."""
    for _ in range(count):  # one by one: onnx_ir does not see a deleted slice, the values would still count as outputs
        graph.outputs.pop()


def _adopt_orphans(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    """Make initializers of constants that belong to no graph.

    onnxscript's rewriter names new initializers after their node's input: the second Clip of one value takes the name
    of the first one's bound, which then stands nowhere. A parameter of that name would lose it in the same way.
    """
    taken: set[str | None] = set()
    for node in nodes:
        for value in node.inputs:
            if (
                value is None
                or value.const_value is None
                or value.producer() is not None
                or value.is_graph_input()
                or value.is_initializer()
            ):
                continue
            taken = taken or {value.name for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
            base, count = value.name or "constant", 0
            while value.name is None or value.name in graph.initializers:
                count += 1
                if f"{base}_{count}" not in taken:
                    value.name = f"{base}_{count}"
            taken.add(value.name)
            graph.initializers[value.name] = value


def _finish_calls(graph: ir.Graph, nodes: list[ir.Node], recorder: Recorder) -> None:
    outputs_of_graphs = {id(value) for value in graph.outputs}
    count = 0
    for node in nodes:
        if (node.domain, node.op_type) != (ORT_DOMAIN, PYTHON_OP) or CALL_ATTRIBUTE not in node.attributes:
            continue
        record = recorder.records.get(_key_of(node))
        if record is None:
            continue  # a PythonOp of somebody else's making
        call = replace(record.call, id=str(count))
        count += 1
        for attribute in ir_attributes(encode(call, recorder.names)):
            node.attributes[attribute.name] = attribute
        node.metadata_props.pop("pkg.torch.onnx.fx_node", None)  # it shows the number of the capture, another one each time
        for key, text in ((MODULE_PROPERTY, record.module), (SOURCE_PROPERTY, record.source)):
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


def _key_of(node: ir.Node) -> str:
    import json

    return str(json.loads(node.attributes[CALL_ATTRIBUTE].as_string()).get("id"))


def _mark_function(opset: int) -> ir.Function:
    """The body of the stop-gradient mark: Identity, so that every runtime can run the file."""
    x = ir.Value(name="x")
    node = ir.Node("", "Identity", [x], name="identity")
    node.outputs[0].name = "y"
    body = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": opset}, name=MARK_OP)
    return ir.Function(MARK_DOMAIN, MARK_OP, graph=body, attributes=[])


def refuse_scripted(model: torch.nn.Module) -> None:
    """ScriptModules hide dtypes, flags and Functions from both exporters.

    Raises:
        ExportError: The model is, or contains, a ScriptModule.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ExportError(
                f"module {name or '<root>'} ({module.original_name}) is a ScriptModule: its Functions cannot be seen. "
                "Export the Python module that it was made from (leave out torch.jit.script / torch.jit.trace)"
            )
