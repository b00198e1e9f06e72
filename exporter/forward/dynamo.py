"""torch.onnx.export(dynamo=True) under a hook."""

from __future__ import annotations

import contextlib
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.errors import is_full
from exporter.files.program import Program
from exporter.forward.arguments import check_call, check_model, check_shapes, keywords_apart
from exporter.forward.failures import untranslated
from exporter.forward.finish import anchor_calls, finish
from exporter.forward.inputs import (
    check_asked_names,
    check_dynamic,
    check_output_names,
    checked_axes,
    input_names,
    open_axes,
    shapes_by_axes,
)
from exporter.forward.longer import Example
from exporter.forward.onnx_program import check_outputs, make_runnable
from exporter.forward.opset import check_asked, check_opset
from exporter.forward.plain_tensors import held_plainly
from exporter.forward.session import Hook, capturing, check_place, judged, surroundings, translates, write
from exporter.forward.state import ModelState
from exporter.forward.translations import check_table, name_untranslated
from symbolics import quirks, torch_private as private
from symbolics.capture.captured_program import place_operators
from symbolics.capture.gradient_hooks import read_through_hooks
from symbolics.capture.marks import differentiable_inputs
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.translate import translations
from symbolics.errors import ExportError
from symbolics.graph.boundaries import is_boundary
from symbolics.graph.collector import without_gc
from symbolics.graph.shapes import write_sizes
from symbolics.graph.values import is_mark, name_of
from symbolics.users import warn

__all__ = ["anchor_translation", "decompose", "export_dynamo"]


def export_dynamo(current: Hook, original: Any, model: Any, args: Any, f: Any = None, **options: Any) -> Any:
    """What stands in for the exporter: the same options, the same ONNXProgram, finished.

    Raises:
        ExportError: The model cannot be exported with the backward of its Functions.
    """
    verify = options.pop("verify", False)
    check_place(f)
    check_asked(options.get("opset_version"), dynamo=True)
    check_asked_names(options.get("output_names"))
    asked: dict[str, Any] = {key: options.pop(key) for key in ("export_params", "keep_initializers_as_inputs") if key in options}
    external_data = options.pop("external_data", None)
    if isinstance(model, torch.export.ExportedProgram):
        warn(
            "the ExportedProgram was captured before torch.onnx.export saw it: detach() and no_grad() in it are not marked, "
            "so gradients of the file may flow where PyTorch stops them: pass the module to torch.onnx.export."
        )
    else:
        check_model(model, dynamo=True)
        check_call(() if args is None else args, options.get("kwargs"), dynamo=True)
    verbose = options.get("verbose")
    if verbose is None and not is_full():
        options["verbose"] = False
    given = () if args is None else (args,) if isinstance(args, torch.Tensor) else tuple(args)
    called = (given, options.get("kwargs") or {})
    if not isinstance(model, torch.export.ExportedProgram):
        called = args, options["kwargs"] = keywords_apart(model, *called)
        _settle_inputs(model, *called, options)
    opened = open_axes(model, *called, options.get("dynamic_shapes")) if isinstance(model, torch.nn.Module) else ()
    example = Example(args, options.get("kwargs"), opened, fakes=True)
    with surroundings(current, verbose), held_plainly(model):
        translates(check_table(options.get("custom_translation_table")), None)
        program = judged(
            current,
            model,
            *called,
            lambda: _translate_dynamo(current, original, model, example.args, **options | {"kwargs": example.kwargs}),
            example=example,
        )
    assert current.program is not None
    current.program.asked = asked
    if f is not None:
        write(current.program, f, external_data)
    if verify:
        check_outputs(program, model, args, options.get("kwargs"))
    return program


def _settle_inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> None:
    """Check what the options say of the inputs, and write it as torch.export takes it.

    Args:
        model, args, kwargs: The model and its example arguments, keywords apart.
        options: ``dynamic_shapes``, ``dynamic_axes`` and ``input_names``; changed.

    Raises:
        ArgumentError: They do not fit the arguments.
    """
    called, names = (args, kwargs), options.get("input_names") or input_names(model, args, kwargs)
    options["dynamic_shapes"] = check_shapes(model, args, kwargs, options.get("dynamic_shapes"))
    if options.get("dynamic_axes"):
        options["dynamic_axes"] = checked_axes(called, names, options["dynamic_axes"], options.get("output_names"))
        all_tensors = all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(called))
        if names and options["dynamic_shapes"] is None and (kwargs or not all_tensors):
            # torch makes shapes of them, too: it fails at arguments that are no tensors, and takes keywords for positional ones.
            options["dynamic_shapes"] = shapes_by_axes(model, args, kwargs, names, options.pop("dynamic_axes"))
    taken = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    if names and any(name != name.lower() for name in names) and taken.isdisjoint(names):
        options["input_names"] = names  # torch.export calls them in small letters


def _translate_dynamo(current: Hook, original: Any, model: Any, args: Any, optimize: bool = True, **options: Any) -> Any:
    given = options.pop("custom_translation_table", None) or {}
    table = {**translations(), **given}
    if isinstance(model, torch.export.ExportedProgram):
        state = ModelState.of(model.module())
    else:
        state = ModelState.of(model)
        if args is not None:
            args = differentiable_inputs(args)
        if options.get("kwargs"):
            options["kwargs"] = differentiable_inputs(options["kwargs"])
    with capturing(current, model, True) as recorder:
        if isinstance(model, torch.export.ExportedProgram):
            model = place_operators(model, recorder)
        axes = _unnamed_axes(model, args, options)
        try:
            with private.quiet_of_axes() if axes else contextlib.nullcontext():
                program = original(model, args, None, optimize=False, verify=False, custom_translation_table=table, **options)
        except Exception as error:
            if recorder.capture.error is None:
                name_untranslated(error, recorder, given)
            raise
        _name_axes(program, axes)
        check_opset(program.model, options.get("opset_version"))
        if options.get("dynamic_shapes") and isinstance(model, torch.nn.Module):
            check_dynamic(model, args, options["kwargs"], options["dynamic_shapes"], program.model.graph)
        recorder.capture.strict = private.captured_by_dynamo(program)
        quirks.give_digits(program.model, program.exported_program.graph_module)
        with without_gc():
            finish(program.model, recorder, state, optimize=optimize)
        check_output_names(options.get("output_names"), program.model)
        inlined = dict(recorder.capture.inlined)
        make_runnable(program, {record.function for record in recorder.records.values() if isinstance(record.function, type)})
    current.program = Program(program.model, inlined, program)
    return program


def _unnamed_axes(model: Any, args: Any, options: dict[str, Any]) -> list[dict[int, Any] | None]:
    """The open axes of each tensor, where some arguments are no tensors: torch then gives the axes no names, as it counts those arguments otherwise."""
    if not options.get("dynamic_shapes") or not isinstance(model, torch.nn.Module):
        return []
    if all(isinstance(value, torch.Tensor) for value in (*args, *options["kwargs"].values())):
        return []
    return [dims or None for _, dims in open_axes(model, args, options["kwargs"], options["dynamic_shapes"])]


def _name_axes(program: Any, axes: list[dict[int, Any] | None]) -> None:
    """Give the axes of `_unnamed_axes` their names, unless torch has."""
    inputs = program.model.graph.inputs
    if len(axes) == len(inputs) and any(
        str(value.shape[axis]) != getattr(dim, "__name__", dim)
        for value, dims in zip(inputs, axes, strict=True)
        for axis, dim in (dims or {}).items()
        if value.shape is not None
    ):
        private.name_axes(program, axes)


def decompose(current: Hook, original: Any, program: torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> Any:
    """What stands in for torch's decompositions of a captured program, which end the process where Dynamo has captured ``parameter.data = value``.

    Raises:
        ExportError: It has.
    """
    recorder = active_recorder()
    if recorder is not None and (names := private.given_data(program)):
        recorder.capture.error = recorder.capture.error or ExportError(
            f"the model assigns `.data` of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, in a forward that torch.export captures with Dynamo alone.\n"
            "  why: torch's decompositions of such a program end the process with a segmentation fault\n"
            "  way out: write with parameter.copy_(value) under torch.no_grad(); or export with dynamo=False"
        )
        raise recorder.capture.error
    return original(program, *args, **kwargs)


def anchor_translation(current: Hook, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls whose results nobody reads stay: until finish() they give outputs of the graph.

    Raises:
        Untranslated: Operators of torch have no translation, or make complex numbers that have none.
    """
    read_through_hooks(args[0])
    recorder = active_recorder()
    translating = recorder is not None and not recorder.capture.placed  # and no function that is to stand for a call of the finished model
    if translating and (nodes := private.untranslated_nodes(args[0], kwargs["registry"])):
        raise untranslated(nodes, dynamo=True, why="there is no translation of it")
    if translating and (nodes := private.invented_complex_nodes(args[0])):
        raise untranslated(nodes, dynamo=True, why="its translation takes complex numbers for real ones", has_one=True)
    if translating:
        recorder.capture.ones = private.sizes_taken_for_one(args[0])  # type: ignore[union-attr]
    program = original(*args, **kwargs)
    quirks.apply(quirks.WITH_BODIES, program.model)
    if translating:
        recorder.capture.axes = [(value, [str(size) for size in value.shape or ()]) for value in program.model.graph.inputs]  # type: ignore[union-attr]
        recorder.capture.equal = private.found_equal(args[0])  # type: ignore[union-attr]
        write_sizes(program.model.graph, private.settled_sizes(args[0]))
    if recorder is not None:
        _copy_returned(program.model.graph, program.model.opset_imports.setdefault("", kwargs["registry"].opset_version))
        if program.exported_program is not None:
            _give_out_buffers(program.model.graph, program.exported_program.graph_signature, recorder)
        _name_marked(program.model.graph)
        recorder.capture.anchored = anchor_calls(program.model.graph)
    return program


def _copy_returned(graph: ir.Graph, opset: int) -> None:
    """An input, parameter, buffer or constant that the model returns is an output by a node of its own: a name for each."""
    for index, value in enumerate(list(graph.outputs)):
        if value.is_initializer() or value.is_graph_input():
            node = ir.Node("", "Identity", [value], name=f"{value.name}/returned", version=opset)
            node.outputs[0].name = f"{value.name}/returned"
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]


def _name_marked(graph: ir.Graph) -> None:
    """A result that is marked as one without a gradient, or as what a module gives, keeps the name of what makes it."""
    for value in graph.outputs:
        node = value.producer()
        made = node.inputs[0] if node is not None and (is_mark(node) or is_boundary(node)) else None
        if made is not None and made.producer() is not None and not made.is_graph_output() and len(made.uses()) == 1:
            value.name, made.name = made.name, f"{made.name}/unmarked"


def _give_out_buffers(graph: ir.Graph, signature: Any, recorder: Recorder) -> None:
    """Make outputs of the graph of the values that forward writes into buffers, which torch's translation drops."""
    # Of a parameter whose new value hides what it was from autograd, the graph would give the gradient of the old one.
    passed = {name: owner for name, owner in signature.parameters_to_mutate.items() if owner in recorder.capture.passed}
    recorder.capture.missed.update(owner for owner in signature.parameters_to_mutate.values() if owner not in recorder.capture.passed)
    buffers = {**signature.buffers_to_mutate, **passed}
    if not buffers:
        return
    values = {name_of(value): value for value in (*graph.inputs, *(v for node in graph for v in node.outputs))}
    values.update(
        (value.metadata_props.get("pkg.torch.onnx.original_node_name", name), value) for name, value in graph.initializers.items()
    )
    for name, buffer in buffers.items():
        if name in values:
            recorder.capture.written.append(buffer)
            graph.outputs.append(values[name])
        else:
            recorder.capture.missed.add(buffer)
