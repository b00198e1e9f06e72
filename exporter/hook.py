"""hook(): while it is open, torch.onnx.export keeps autograd Functions, in this thread.

Names of torch are replaced while at least one hook is open: ``apply`` on the base class of all Functions, the two
functions that torch.onnx.export hands over to, and three that these call. Each replacement acts only in a thread with an
open hook (or when `install` was called), so a training thread beside an export sees nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.shape_inference
import onnx_ir as ir
import torch

from exporter._batch_norm import warn_of_lost_changes
from exporter._draft import constants_to_initializers, read_draft
from exporter.inputs import check_dynamic, dynamic_sizes, input_names, without_numbers
from exporter.program import Program, save_model
from exporter.state import ModelState, all_buffers_named
from exporter.trust import name_of
from symbolics import _torch_private as private, torch_export
from symbolics.arguments import qualified_name
from symbolics.batch_norm import momentum_of_this_step
from symbolics.capture import Recorder, active_recorder, captured_apply, prove_capture, uncaught, wanted
from symbolics.errors import ExportError, PythonopWarning
from symbolics.interception import intercept
from symbolics.patterns import Patterns
from symbolics.stop_gradient import differentiable_inputs, holds_tensor, marking
from symbolics.torchscript import symbolics_registered

__all__ = ["Hook", "hook", "install", "uninstall"]

_thread = threading.local()
_lock = threading.RLock()
_open_hooks = 0
_restore: list[Any] = []
_installed: Hook | None = None


@dataclass
class Hook:
    """What an open hook knows.

    Attributes:
        inline: Which Functions are inlined.
        program: The last model that was exported under it, None before.
    """

    inline: Patterns
    program: Program | None = None


@contextlib.contextmanager
def hook(inline: Iterable[Any] = ()) -> Iterator[Hook]:
    """Keep each call of an autograd Function as one PythonOp in what torch.onnx.export makes in this block.

    Works for dynamo=True and dynamo=False, for torch.onnx.export called directly or by another library. The model is
    exported in the mode that it is in, with gradients enabled whatever surrounds the block.

    Args:
        inline: Functions to inline in place of a node: classes, ``module:qualname`` or globs over it.

    Yields:
        A Hook; its ``program`` is the last export.

    Example:
        >>> with exporter.hook():
        ...     program = torch.onnx.export(model, args, dynamo=True)
    """
    own = Hook(Patterns(inline))
    outer = getattr(_thread, "hook", None)
    _patch()
    try:
        prove_capture()
        _thread.hook = own
        # Open for the whole block: a graph captured by torch.export.export keeps its records until it is translated.
        with Recorder(inline=own.inline, names=name_of):
            yield own
    finally:
        _thread.hook = outer
        _unpatch()


def install(inline: Iterable[Any] = ()) -> None:
    """Open a hook in every thread, until `uninstall`. A second call replaces ``inline``."""
    global _installed
    with _lock:
        if _installed is None:
            _patch()
            try:
                prove_capture()
            except ExportError:
                _unpatch()
                raise
        _installed = Hook(Patterns(inline))


def uninstall() -> None:
    """Undo `install`; nothing happens where it was not called."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed = None
            _unpatch()


def _current() -> Hook | None:
    return getattr(_thread, "hook", None) or _installed


# ------------------------------------------------------------------------------------------------------- patches


def _patch() -> None:
    global _open_hooks
    with _lock:
        _open_hooks += 1
        if _open_hooks > 1:
            return
        try:
            _restore.append(intercept(captured_apply, wanted))
            _replace_all()
        except AttributeError as error:
            _unpatch()
            raise uncaught(str(error)) from error


def _replace_all() -> None:
    _replace(private.functions(), "custom_function_call", _refuse_transforms)
    _replace(private.dynamo_exporter(), "export_compat", _export_dynamo)
    _replace(private.translator(), "_exported_program_to_onnx_program", _anchor_translation)
    _replace(private.torchscript_exporter(), "export", _export_torchscript)
    _replace(private.torchscript_exporter(), "_decide_constant_folding", _decide_folding)
    _replace(private.torchscript_passes(), "_jit_pass_onnx_constant_fold", _fold_constants)
    _replace(private.torchscript_passes(), "_jit_pass_onnx_graph_shape_type_inference", _infer_shapes)


def _unpatch() -> None:
    global _open_hooks
    with _lock:
        _open_hooks -= 1
        if _open_hooks == 0:
            while _restore:
                _restore.pop()()


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, _guarded(original, stand_in))
    _restore.append(lambda: setattr(owner, name, original))


@functools.lru_cache(maxsize=32)  # every hook replaces the same few
def _guarded(original: Any, stand_in: Any) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        current = _current()
        return original(*args, **kwargs) if current is None else stand_in(current, original, *args, **kwargs)

    return patched


def _refuse_transforms(current: Hook, original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Function.apply inside torch.func: there is no one call that a node could stand for."""
    recorder = active_recorder()
    if recorder is not None and recorder.listening() and not recorder.inline.matches(cls):
        recorder.refuse(
            qualified_name(cls),
            "it is called under torch.func (vmap, grad, jvp), where there is no single call to keep: call it outside, on the whole batch, or name it in inline=",
        )
    return original(cls, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------- exports


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Thousands of new objects, none of them garbage, make Python search its whole heap again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _capturing(
    current: Hook, model: Any, dynamo: bool, keywords: dict[str, Any] | None = None, constants: dict[int, Any] | None = None
) -> Iterator[Recorder]:
    """The surroundings of one export; errors of ours come out as they were raised."""
    recorder = active_recorder()
    with contextlib.ExitStack() as stack:
        if recorder is None:  # installed, not hooked
            recorder = stack.enter_context(Recorder(inline=current.inline, names=name_of))
        recorder.error = None
        recorder.inlined = {}
        recorder.outputs = None
        recorder.anchors, recorder.anchored = [], 0
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if isinstance(model, torch.nn.Module):
            recorder.watch(model)
            stack.enter_context(marking(model, keywords, constants))
            stack.enter_context(momentum_of_this_step(model))
        if dynamo:
            stack.enter_context(private.allow_in_dynamo(_all_functions(torch.autograd.Function)))
            stack.enter_context(private.quiet_registration(torch_export.translations().values()))
        try:
            yield recorder
            if recorder.error is not None:  # torch found another way, which went around what we refused
                raise recorder.error
        except Exception as error:
            if recorder.error is not None and error is not recorder.error:
                raise recorder.error from (recorder.error.__cause__ or error)
            raise


def _all_functions(base: type) -> list[type]:
    """Every Function class of user code that exists now."""
    found: list[type] = []
    cls: type
    for cls in base.__subclasses__():
        if cls.__module__.split(".")[0] != "torch":
            found.append(cls)
        found += _all_functions(cls)
    return found


def _export_dynamo(current: Hook, original: Any, model: Any, args: Any, f: Any = None, **options: Any) -> Any:
    from exporter.export import finish, refuse_scripted

    optimize, verify = options.pop("optimize", True), options.pop("verify", False)
    saving = {key: options.pop(key) for key in ("export_params", "keep_initializers_as_inputs", "external_data") if key in options}
    table = {**torch_export.translations(), **(options.pop("custom_translation_table", None) or {})}
    if isinstance(model, torch.export.ExportedProgram):
        captured = model.module()
        state = ModelState.of(captured)
        warnings.warn(
            "the ExportedProgram was captured before torch.onnx.export saw it: detach() and no_grad() in it are not marked, "
            "so gradients of the file may flow where PyTorch stops them: pass the module to torch.onnx.export.",
            PythonopWarning,
            stacklevel=4,
        )
    else:
        refuse_scripted(model)
        state = ModelState.of(model)
        if args is not None:
            args = differentiable_inputs(args)
        if options.get("kwargs"):
            options["kwargs"] = differentiable_inputs(options["kwargs"])
    with _capturing(current, model, True) as recorder:
        program = original(model, args, None, optimize=False, verify=False, custom_translation_table=table, **options)
        if options.get("dynamic_shapes") and isinstance(model, torch.nn.Module):
            check_dynamic(model, args, options.get("kwargs") or {}, options["dynamic_shapes"], program.model.graph)
        if private.captured_by_dynamo(program):
            warnings.warn(
                "torch could capture the model only with Dynamo (strict=True): detach() and no_grad() in it are not marked, so gradients of the file "
                "may flow where PyTorch stops them: run torch.export.export(model, args, strict=False) to see why, and mend that.",
                PythonopWarning,
                stacklevel=4,
            )
        with _without_gc():
            finish(program.model, recorder, state, optimize=optimize)
        if program.exported_program is not None:
            warn_of_lost_changes(program.model.graph, set(program.exported_program.graph_signature.buffers_to_mutate.values()))
        inlined = dict(recorder.inlined)
    current.program = Program(program.model, inlined, program)
    if verify:
        onnx.checker.check_model(current.program.model_proto, full_check=True)
    if f is not None:
        _write(current.program, f, **saving)
    return program


def _anchor_translation(current: Hook, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls whose results nobody reads stay: until finish() they give outputs of the graph."""
    from exporter.export import anchor_calls

    program = original(*args, **kwargs)
    recorder = active_recorder()
    if recorder is not None:
        recorder.anchored = anchor_calls(program.model.graph)
    return program


@_without_gc()
def _export_torchscript(current: Hook, original: Any, model: Any, args: Any, f: Any = None, **options: Any) -> None:
    from exporter.export import finish, refuse_scripted

    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ExportError("the model is scripted: its Functions cannot be seen. Export the Python module that it was made from")
    refuse_scripted(model)
    state = ModelState.of(model)
    optimize = options.pop("do_constant_folding", True)
    saving = {key: options.pop(key) for key in ("export_params", "keep_initializers_as_inputs") if options.get(key) is not None}
    training = options.pop("training", torch.onnx.TrainingMode.PRESERVE)
    if training == torch.onnx.TrainingMode.EVAL:
        # torch's default, which nobody chose: the model's own mode counts, as with dynamo=True.
        training = torch.onnx.TrainingMode.PRESERVE
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = options.pop("kwargs", None) or {}
    if not keywords and args and isinstance(args[-1], dict):  # how torch's older exporter takes keyword arguments
        *rest, keywords = args
        args = tuple(rest)
    order = list(inspect.signature(model.forward).parameters)
    keywords = dict(sorted(keywords.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    constants: dict[int, Any] = {}
    if options.get("input_names") is None:
        options["input_names"] = input_names(model, args, keywords)
        args, constants = without_numbers(args)
    args, keywords = differentiable_inputs((args, keywords))
    args += tuple(value for value in keywords.values() if holds_tensor(value))
    opset = options.get("opset_version")
    with (
        _capturing(current, model, False, keywords, constants) as recorder,
        state.restored(model),
        all_buffers_named(model),
        symbolics_registered(opset or 9),
    ):
        recorder.dynamic = dynamic_sizes((args, keywords), options["input_names"], options.get("dynamic_axes"))
        recorder.frozen, recorder.state = set(), state.entries
        # No parameter data: finish() has it at hand. A large model would pass protobuf's 2 GiB for nothing.
        draft = io.BytesIO()
        # Inputs of the graph are what torch's passes leave alone; finish() makes them initializers again.
        with _drafting(folds=bool(optimize)):
            original(
                model,
                args,
                draft,
                training=training,
                do_constant_folding=False,
                export_params=False,
                keep_initializers_as_inputs=True,
                **options,
            )
        changed = state.changed(model, recorder.dirtied)
        # The exporter writes no types of inner values; onnx infers them in C++, far faster than a pass over nodes does.
        proto = onnx.load_from_string(draft.getvalue())
        constants_to_initializers(proto.graph, merge=bool(optimize))
        translated = read_draft(onnx.shape_inference.infer_shapes(proto, data_prop=True))
        recorder.anchored, recorder.anchors = len(recorder.anchors), []
        _parameters_to_initializers(translated.graph, state)
        finish(translated, recorder, state, optimize=optimize, rewrite=False)
        warn_of_lost_changes(translated.graph, changed)
        current.program = Program(translated, dict(recorder.inlined))
    if f is not None:
        _write(current.program, f, **saving)


@contextlib.contextmanager
def _drafting(folds: bool) -> Iterator[None]:
    """While the block runs, torch's exporter writes a draft for us in this thread: it leaves out what finish() does anyway.

    Args:
        folds: Fold constants, and constants alone. torch's pass is written in C++ and folds before anything is written: a
            node that goes here costs nothing later.
    """
    _thread.drafts, _thread.folds = True, folds
    try:
        yield
    finally:
        _thread.drafts = _thread.folds = False


def _decide_folding(current: Hook, original: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
    """Without the warning that folding mutates parameters, which is not so here."""
    return True if getattr(_thread, "folds", False) else original(choice, *args, **kwargs)


def _fold_constants(current: Hook, original: Any, graph: Any, parameters: dict[str, Any], opset: int) -> Any:
    """torch folds operators on constants and on the parameters that it is given: here it is given none."""
    if not getattr(_thread, "folds", False):
        return original(graph, parameters, opset)
    original(graph, {}, opset)
    return parameters


def _infer_shapes(current: Hook, original: Any, graph: Any, *args: Any) -> None:
    """torch infers the shapes of each node as it is made, and then twice those of the whole graph.

    That finds more only where nodes have bodies; the types of inner values are written nowhere, and onnx infers those of
    the draft.
    """
    if not getattr(_thread, "drafts", False) or private.has_bodies(graph):
        original(graph, *args)


def _parameters_to_initializers(graph: ir.Graph, state: ModelState) -> None:
    """Inputs that torch named after parameters and buffers become initializers; their tensors come with ModelState.adopt."""
    inputs = list(graph.inputs)
    graph.inputs.clear()
    for value in inputs:
        if value.name in state.entries:
            graph.initializers[value.name] = value
        else:
            graph.inputs.append(value)


def _write(
    program: Program, f: Any, *, export_params: bool = True, keep_initializers_as_inputs: bool = False, external_data: bool | None = None
) -> None:
    """What torch.onnx.export does with ``f``, finished and whole."""
    model = program.model
    if keep_initializers_as_inputs or not export_params:
        model = model.clone()
        if keep_initializers_as_inputs:
            model.graph.inputs.extend(model.graph.initializers.values())
        if not export_params:
            model.graph.initializers.clear()
    with _without_gc():
        if isinstance(f, io.IOBase) or hasattr(f, "write"):
            f.write(ir.to_proto(model).SerializeToString())
        else:
            save_model(model, os.fspath(f), external_data=external_data)
