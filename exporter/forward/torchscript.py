"""torch.onnx.export(dynamo=False) under a hook, and the two functions of torch that it replaces."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.files.program import Program
from exporter.forward.arguments import check_call, check_model, in_order, keywords_apart
from exporter.forward.eager_failure import eager_failure
from exporter.forward.failures import of_torch
from exporter.forward.finish import finish
from exporter.forward.inputs import (
    axes_by_name,
    check_asked_names,
    check_output_names,
    checked_axes,
    dynamic_sizes,
    input_names,
    without_numbers,
)
from exporter.forward.longer import Example
from exporter.forward.open_axes import say_of_open_axes
from exporter.forward.opset import check_asked
from exporter.forward.plain_tensors import held_plainly
from exporter.forward.session import Hook, capturing, check_place, judged, surroundings, translates, write
from exporter.forward.state import ModelState, all_buffers_named, names_in_trace
from exporter.forward.unchanged import Kept
from exporter.train_mode.buffers import warn_of_lost
from symbolics import torch_private as private
from symbolics.capture.buffers import Buffers
from symbolics.capture.marks import differentiable_inputs
from symbolics.capture.recorder import active_recorder
from symbolics.capture.torch_calls import holds_tensor
from symbolics.capture.trace.symbolics import symbolics_registered
from symbolics.errors import ArgumentError
from symbolics.graph.collector import without_gc
from symbolics.graph.pool_sizes import infer_proto
from symbolics.node.dtypes import onnx_type
from symbolics.node.names import UNCHECKED_KEY
from symbolics.quirks import open_sizes

__all__ = ["export_torchscript", "infer_node", "infer_shapes"]


@without_gc()
def export_torchscript(current: Hook, original: Any, model: Any, args: Any, f: Any = None, **options: Any) -> None:
    """What stands in for the exporter: the same options, the same file, finished.

    Raises:
        ExportError: The model cannot be exported with the backward of its Functions.
    """
    check_model(model, dynamo=False)
    check_call(() if args is None else args, options.get("kwargs"), dynamo=False)
    check_place(f)
    check_asked(options.get("opset_version"), dynamo=False)
    check_asked_names(options.get("output_names"))
    asked: dict[str, Any] = {
        key: options.pop(key) for key in ("export_params", "keep_initializers_as_inputs") if options.get(key) is not None
    }
    if options.get("training", torch.onnx.TrainingMode.EVAL) == torch.onnx.TrainingMode.EVAL:
        # torch's default, which nobody chose: the model's own mode counts, as with dynamo=True.
        options["training"] = torch.onnx.TrainingMode.PRESERVE
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    args, keywords = keywords_apart(model, args, options.pop("kwargs", None))
    keywords = in_order(model, keywords)
    with surroundings(current, options.get("verbose")), held_plainly(model):
        translates(None, options.get("opset_version"))
        if isinstance(model, torch.jit.ScriptModule):
            _translate_scripted(current, original, model, args, keywords, **options)
            return _handed_out(current, f, asked)
        names = options.get("input_names") or input_names(model, args, keywords)
        opened = axes_by_name(
            (args, keywords), names, checked_axes((args, keywords), names, options.get("dynamic_axes"), options.get("output_names"))
        )
        example = Example(args, keywords, ((tensor, dims) for _, tensor, dims in opened), fakes=False)
        judged(
            current,
            model,
            args,
            keywords,
            lambda: _translate_torchscript(current, original, model, example.args, example.kwargs, **options),
            example=example,
            training=True if options["training"] == torch.onnx.TrainingMode.TRAINING else None,
        )
    _handed_out(current, f, asked)


def _handed_out(current: Hook, f: Any, asked: dict[str, Any]) -> None:
    assert current.program is not None
    current.program.asked = asked
    if f is not None:
        write(current.program, f)


def _translate_scripted(
    current: Hook, original: Any, model: Any, args: Any, keywords: Any, do_constant_folding: bool = True, **options: Any
) -> None:
    """What was compiled before is translated as it is: no trace runs, and nothing in it is captured."""
    recorder, state = active_recorder(), ModelState.of(model)
    named = names_in_trace(state.entries, ())
    assert recorder is not None
    recorder.begin(None)
    trial = copy.deepcopy(model)
    buffers = Buffers(trial)
    try:
        trial(*copy.deepcopy(args), **copy.deepcopy(keywords))
    except Exception as error:
        raise eager_failure(error, "model(*args)") from error
    recorder.capture.missed = set(buffers.written())
    draft = io.BytesIO()
    options |= {"do_constant_folding": False, "export_params": False, "keep_initializers_as_inputs": True}
    options["input_names"] = options.get("input_names") or input_names(model, args, keywords)
    try:
        original(model, (*args, keywords) if keywords else args, draft, **options)
    except Exception as error:
        if (own := of_torch(error, dynamo=False)) is error:
            raise
        raise own from error
    translated = _read(draft, options)
    _parameters_to_initializers(translated.graph, named)
    finish(translated, recorder, state, optimize=bool(do_constant_folding))
    check_output_names(options.get("output_names"), translated, options.get("input_names") or ())
    translated.metadata_props[UNCHECKED_KEY] = "it is a ScriptModule"
    warn_of_lost(translated)
    current.program = Program(translated)


def _read(draft: io.BytesIO, options: dict[str, Any], examples: Collection[int] = ()) -> ir.Model:
    """The exporter writes no types of inner values; onnx infers them in C++, far faster than a pass over nodes does.

    Args:
        draft: What the exporter wrote.
        options: Those of torch.onnx.export.
        examples: The example's sizes of the open axes.
    """
    proto = onnx.load_from_string(draft.getvalue())
    _drop_invented_sizes(proto.graph, _names_of_sizes(options.get("dynamic_axes") or {}))
    for dim in (dim for value in proto.graph.output for dim in value.type.tensor_type.shape.dim if dim.dim_value in examples):
        dim.ClearField("dim_value")  # what squeeze() leaves has the example's sizes in a trace; onnx infers those that are always so
    return ir.from_proto(infer_proto(proto, forget_outputs=True, data_prop=True))


def _translate_torchscript(
    current: Hook, original: Any, model: Any, args: Any, keywords: Any, do_constant_folding: bool = True, **options: Any
) -> None:
    state, optimize = ModelState.of(model), do_constant_folding
    constants: dict[int, Any] = {}
    if not options.get("input_names"):
        options["input_names"] = input_names(model, args, keywords)
        args, constants = without_numbers(args)
    if not any(
        hasattr(module, "_packed_params") for module in model.modules()
    ):  # quantised: torch copies the arguments, which have to be leaves
        args, keywords = differentiable_inputs((args, keywords))
    args += tuple(value for value in keywords.values() if holds_tensor(value))
    if options["input_names"] is not None:  # more of them are names for parameters, which keep their own
        leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, (torch.Tensor, bool, int, float))]
        options["input_names"] = list(options["input_names"])[: len(leaves)]
    options["dynamic_axes"] = checked_axes(
        (args, keywords), options["input_names"], options.get("dynamic_axes"), options.get("output_names")
    )
    named = names_in_trace(state.entries, options["input_names"] or ())
    opset = options.get("opset_version")
    with (
        capturing(current, model, False, keywords, constants) as recorder,
        Kept(*(module._buffers for module in model.modules())) as kept,
    ):
        trace = recorder.capture.trace
        assert trace is not None
        examples = dynamic_sizes((args, keywords), options["input_names"], options.get("dynamic_axes"))
        trace.sizes.dynamic = set(examples.values())
        if current.portable and 1 in trace.sizes.dynamic:
            recorder.capture.ones = ["a trace cannot tell it from sizes that are always 1, which portable Functions may ask for"]
        trace.state = named
        with (
            all_buffers_named(model, named, trace.pairs if recorder.chosen.calls.items else None),
            symbolics_registered(opset or 9, trace),
            open_sizes(trace.sizes.dynamic),
        ):
            draft = _draft(original, model, args, options, named)
        recorder.capture.missed |= {name for name, buffer in model.named_buffers() if kept.has_changed(buffer)}
        translated = _read(draft, options, examples.values())
        say_of_open_axes(translated, trace, examples)
        recorder.capture.anchored, trace.anchors = len(trace.anchors), []
        _parameters_to_initializers(translated.graph, named)
        _keep_unread_inputs(translated.graph, options["input_names"], args, options.get("dynamic_axes") or {})
        finish(translated, recorder, state, optimize=bool(optimize))
        check_output_names(options.get("output_names"), translated, options["input_names"] or ())
        current.program = Program(translated, dict(recorder.capture.inlined))


def _draft(original: Any, model: Any, args: Any, options: dict[str, Any], state: Iterable[str]) -> io.BytesIO:
    """What torch's exporter writes, without the parameters' data: finish() has it at hand, and a large model would pass protobuf's 2 GiB for nothing."""
    draft = io.BytesIO()
    if args and isinstance(args[-1], dict):  # a value: torch's exporter takes the last dictionary for keyword arguments
        args = (*args, {})
    # Inputs of the graph are what torch's passes leave alone; finish() makes them initializers again.
    try:
        with warnings.catch_warnings():
            # Our own lines stand in the trace, too. Of what the model does there, `symbolics.capture` warns at the user's line.
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"(exporter|symbolics)\.")  # type: ignore[attr-defined]
            written = "|".join(map(re.escape, state))  # what the model writes into these, the file gives as outputs
            warnings.filterwarnings("ignore", rf"ONNX Preprocess - Removing mutation from node \S+ on block input: '({written})'")
            warnings.filterwarnings("ignore", "Constant folding - ")  # what torch leaves unfolded changes no number
            original(model, args, draft, do_constant_folding=False, export_params=False, keep_initializers_as_inputs=True, **options)
    except RuntimeError as error:
        if str(error).startswith("number of output names"):
            raise ArgumentError(f"output_names: {error}") from error
        raise
    return draft


def infer_node(current: Hook, original: Any, node: Any, *args: Any) -> None:
    """torch infers the shape of a Reshape by a division by the elements of its input; where there are none, that ends the process."""
    sizes = node.inputsAt(0).type() if node.kind() == "onnx::Reshape" else None
    known = sizes.sizes() if sizes is not None and sizes.kind() == "TensorType" else None
    if not known or 0 not in known:
        original(node, *args)


def infer_shapes(current: Hook, original: Any, graph: Any, *args: Any) -> None:
    """torch infers the shapes of each node as it is made, and then twice those of the whole graph.

    That finds more only where nodes have bodies, and invents sizes of calls; onnx infers the types of inner values afterwards.
    """
    if private.has_bodies(graph):
        original(graph, *args)


def _names_of_sizes(axes: Any) -> set[str]:
    """The names in ``dynamic_axes``, as torch.onnx.export takes them; torch has put its own in the place of lists."""
    return {name for sizes in axes.values() if isinstance(sizes, dict) for name in sizes.values()}


def _drop_invented_sizes(graph: onnx.GraphProto, declared: Collection[str]) -> None:
    """Take away the names that TorchScript invents for open sizes: it gives one name to sizes that differ, and onnxruntime then uses the buffers of one for the other.

    Args:
        graph: The main graph, of whose inner values none has a type yet.
        declared: The names that the user gave; those of inputs stay, too. What follows from them, onnx infers.
    """
    kept = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim} | set(declared)
    bodies = [graph]
    while bodies:
        body = bodies.pop()
        values = body.output if body is graph else (*body.input, *body.output, *body.value_info)
        for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
            if dim.dim_param and dim.dim_param not in kept:
                dim.ClearField("dim_param")
        bodies += [attribute.g for node in body.node for attribute in node.attribute if attribute.HasField("g")]


def _parameters_to_initializers(graph: ir.Graph, named: dict[str, str]) -> None:
    """Inputs that torch named after parameters and buffers become initializers; their tensors come with ModelState.adopt."""
    inputs = list(graph.inputs)
    graph.inputs.clear()
    for value in inputs:
        if value.name in named:
            value.name = named[value.name]
            graph.initializers[value.name] = value
        else:
            graph.inputs.append(value)


def _keep_unread_inputs(graph: ir.Graph, names: list[str] | None, args: Any, axes: Any) -> None:
    """Give the graph the inputs that forward does not read, which torch's trace drops: a caller passes them.

    Args:
        graph: The graph.
        names: The names of all inputs, None where they are not known.
        args: The example arguments.
        axes: The dynamic axes by name, as torch.onnx.export takes them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    found = {value.name: value for value in graph.inputs}
    if names is None or len(names) != len(tensors) or not found.keys() <= set(names):
        return
    graph.inputs.clear()
    for name, tensor in zip(names, tensors, strict=True):
        value = found.get(name)
        if value is None:
            open_ = axes.get(name, {})
            dims = [
                (open_[axis] if isinstance(open_, dict) else f"{name}_{axis}") if axis in open_ else size
                for axis, size in enumerate(tensor.shape)
            ]
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType(onnx_type(tensor.dtype))), shape=ir.Shape(dims))
        graph.inputs.append(value)
