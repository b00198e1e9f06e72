"""hook(): while it is open, torch.onnx.export keeps autograd Functions, in this thread.

Names of torch are replaced while at least one hook is open: those that calls of ``apply`` go through (symbolics/capture/interception.py), the two
functions that torch.onnx.export hands over to, those that these call, and what torch.func does its work with. Each replacement acts only in a thread with an
open hook (or when `install` was called), so a training thread beside an export sees nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from exporter.errors import short, short_block, shorten
from exporter.files.trust import name_of
from exporter.forward.dynamo import anchor_translation, decompose, export_dynamo
from exporter.forward.session import Hook
from exporter.forward.torchscript import export_torchscript, infer_node, infer_shapes
from exporter.forward.ways_out import or_a_way_out
from symbolics import torch_private as private
from symbolics.capture.interception import intercept, settled
from symbolics.capture.listener import captured_apply, captured_operator, wanted
from symbolics.capture.operator_calls import UNDER_TRANSFORMS, intercept_operators
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.transforms import STAND_INS
from symbolics.capture.tripwire import prove_capture, uncaught
from symbolics.errors import ExportError
from symbolics.node.names import qualified_name
from symbolics.node.opaque import Opaque
from symbolics.node.patterns import Patterns

__all__ = ["Hook", "hook", "install", "under", "uninstall"]

_thread = threading.local()
_lock = threading.RLock()
_open_hooks = 0
_restore: list[Any] = []
_installed: Hook | None = None

#: torch's exporters keep what they do in names of the process: while a hook is open, a thread that exports waits for the one that does.
_one_at_a_time = threading.RLock()


def _fresh() -> None:
    """In a process that was forked: the thread that was exporting is not there."""
    global _lock, _one_at_a_time
    _lock, _one_at_a_time = threading.RLock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh)


@short_block
@contextlib.contextmanager
def hook(
    inline: Iterable[Any] = (),
    *,
    portable: Any = False,
    opaque: Any = (),
    functions: Any = (),
    fallback: bool = False,
    eager_check: bool = True,
) -> Iterator[Hook]:
    """Within this block, torch.onnx.export keeps each call of an autograd Function as one PythonOp node.

    Use it where you, or a library, call torch.onnx.export directly. It works for dynamo=True and dynamo=False. The model is
    exported in its present mode, with gradients enabled. torch prints its progress only with ``verbose=True``.

    Args:
        inline: Functions whose own operations are written into the file in place of a node: classes, and patterns such as
            ``"mypkg.ops:*"``. Their gradient is then the derivative of forward; their own backward is not used.
        portable: Functions and operators that become ONNX functions, with their own backward, so that the file runs and
            trains without Python. True: all that can; a warning says which cannot, and why. Or a list, as for ``inline``; one
            that cannot is then an error. See docs/portable.md.
        opaque: What becomes a node that runs PyTorch, though it is not a Function. "missing": each operator of torch that
            torch.onnx cannot translate. Or a list of operators by name ("aten::unique_consecutive", "aten::linalg_*"),
            modules, classes of modules, and functions. See docs/opaque.md.
        functions: Modules whose calls become calls of ONNX functions: modules, classes, or text ("mypkg.blocks:Block").
            Calls that compute the same share one function. See docs/modules-as-functions.md.
        fallback: Whether to take the first way out that works, where torch's exporter cannot take the model. A warning says
            which way it was. See docs/opaque.md.
        eager_check: Whether to run the model once more in eager mode, to see that each Function that gradients flow through
            is in the file. False saves that run. The metadata of the file then says that this was not checked, and every
            tensor that forward writes counts as state.

    Yields:
        A Hook. Its ``program`` is the last export in the block, a `Program`.

    Raises:
        ExportError: This release of torch calls Functions in a way that pythonop cannot catch.
        ArgumentError: At the end of the block: an entry of ``inline``, ``portable``, ``opaque`` or ``functions`` names nothing
            in the exported models.

    Examples:
        >>> with exporter.hook():
        ...     program = torch.onnx.export(model, (x,), dynamo=True)
    """
    own = Hook(
        Patterns(inline),
        _wanted_portable(portable),
        Opaque(opaque),
        functions=Patterns(functions, "functions"),
        eager_check=eager_check,
        fallback=fallback,
    )
    _patch()
    try:
        prove_capture()
        # Open for the whole block: a graph captured by torch.export.export keeps its records until it is translated.
        with settled(), under(own):
            yield own
        if own.program is not None:
            own.inline.check_met()
            if isinstance(own.portable, Patterns):
                own.portable.check_met()
            own.opaque.check_met()
            own.functions.check_met()
    finally:
        _unpatch()


@contextlib.contextmanager
def under(own: Hook) -> Iterator[None]:
    """While the block runs, this thread exports as a hook says, whatever hook is open around it. One has to be."""
    outer = getattr(_thread, "hook", None)
    _thread.hook = own
    try:
        with Recorder(inline=own.inline, names=name_of, chosen=own.opaque):
            yield
    finally:
        _thread.hook = outer


@short
def install(
    inline: Iterable[Any] = (),
    *,
    portable: Any = False,
    opaque: Any = (),
    functions: Any = (),
    fallback: bool = False,
    eager_check: bool = True,
) -> None:
    """Make torch.onnx.export keep each call of an autograd Function as one PythonOp, in every thread, until `uninstall`.

    A second call replaces the options. `hook` does the same in a block.

    Args:
        inline, portable, opaque, functions, fallback, eager_check: As `hook` takes them.

    Raises:
        ExportError: This release of torch calls Functions in a way that pythonop cannot catch.
        ArgumentError: An entry is not a pattern.

    Examples:
        >>> exporter.install()
        >>> program = torch.onnx.export(model, (x,), dynamo=True)
        >>> exporter.uninstall()
    """
    global _installed
    # First: what is wrong with them must leave nothing patched.
    options = Hook(
        Patterns(inline),
        _wanted_portable(portable),
        Opaque(opaque),
        functions=Patterns(functions, "functions"),
        eager_check=eager_check,
        fallback=fallback,
    )
    with _lock:
        if _installed is None:
            _patch()
            try:
                prove_capture()
            except ExportError:
                _unpatch()
                raise
        _installed = options


def uninstall() -> None:
    """Undo `install`. Without an `install` before it, nothing happens."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed = None
            _unpatch()


def _wanted_portable(portable: Any) -> Patterns | bool:
    """What ``portable=`` says: True, False, or which Functions."""
    return portable if isinstance(portable, bool) else Patterns(portable, "portable")


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
            _restore.append(intercept_operators(captured_operator, wanted))
            _replace_all()
        except AttributeError as error:
            _unpatch()
            raise uncaught(str(error)) from error


def _replace_all() -> None:
    _replace(private.functions(), "custom_function_call", _refuse_transforms)
    for name, transform in _TRANSFORMS.items():
        _replace(private.functional_transforms(), name, transform)
    _replace(private.stateless(), "_functional_call", _functional_call)
    _replace(private.dynamo_exporter(), "export_compat", export_dynamo)
    _replace(torch.export.ExportedProgram, "run_decompositions", decompose)
    _replace(private.translator(), "_exported_program_to_onnx_program", anchor_translation)
    _replace(private.torchscript_exporter(), "export", export_torchscript)
    _replace(private.torchscript_passes(), "_jit_pass_onnx_graph_shape_type_inference", infer_shapes)
    _replace(private.torchscript_passes(), "_jit_pass_onnx_node_shape_type_inference", infer_node)


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


@functools.lru_cache(maxsize=64)  # every hook replaces the same few
def _guarded(original: Any, stand_in: Any) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        current = _current()
        call = original if current is None else functools.partial(stand_in, current, original)
        if stand_in not in (export_dynamo, export_torchscript):
            return call(*args, **kwargs)
        with _one_at_a_time:
            try:
                return call(*args, **kwargs) if current is None else or_a_way_out(current, stand_in is export_dynamo, call, args, kwargs)
            except Exception as error:
                if current is not None:
                    shorten(error)
                raise

    return patched


def _transformed(stand_in: Any, current: Hook, original: Any, *args: Any, **kwargs: Any) -> Any:
    """A derivative that a forward takes by torch.func, while it is exported."""
    recorder = active_recorder()
    return original(*args, **kwargs) if recorder is None or not recorder.listening() else stand_in(recorder, *args, **kwargs)


_TRANSFORMS = {name: functools.partial(_transformed, stand_in) for name, stand_in in STAND_INS.items()}


def _functional_call(
    current: Hook,
    original: Any,
    module: Any,
    tensors: Any,
    args: Any = None,
    kwargs: Any = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """torch.func.functional_call, also in a TorchScript trace: what torch refuses there are modules that were traced before."""
    recorder = active_recorder()
    if recorder is None or not recorder.listening() or not private.is_tracing():
        return original(module, tensors, args, kwargs, tie_weights=tie_weights, strict=strict)
    with private.reparametrized(module, tensors, tie_weights=tie_weights, strict=strict):
        return module(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))


def _refuse_transforms(current: Hook, original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Function.apply inside torch.func: there is no one call that a node could stand for; what its forward does is transformed as anything else."""
    recorder = active_recorder()
    if recorder is not None and recorder.listening():
        if recorder.inline.matches(cls):
            return recorder.run_inline(cls, args, kwargs)
        recorder.refuse(
            qualified_name(cls),
            UNDER_TRANSFORMS,
        )
    return original(cls, *args, **kwargs)
