"""Sees every torch call of a model's own code during a capture, and answers those that a graph cannot take as they are.

`TorchCalls` is the mode. A call goes down `_ANSWERS`, a list of functions: the first one that answers ends it. What none answers is made,
and gets a mark where gradients stop (`symbolics.capture.stops`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture import gradients_in_forward
from symbolics.capture.accumulation import ACCUMULATING, accumulate
from symbolics.capture.aliases import is_whole
from symbolics.capture.branches import note_refusal, notice_branch, notice_parts
from symbolics.capture.buffers import is_alike
from symbolics.capture.checks import passed
from symbolics.capture.chosen_operators import called_operator, stand_in
from symbolics.capture.composites import body_of, inner_body_of
from symbolics.capture.flags import Flags, is_inplace
from symbolics.capture.held import Held
from symbolics.capture.inlining import stands_in_inlined
from symbolics.capture.other_hooks import GradFn
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.stops import SHAPE_ONLY, marked, sources, stops
from symbolics.capture.taken_values import TAKING, take
from symbolics.capture.undifferentiable import called
from symbolics.capture.writes import SAME_VALUES, change, check_unread, hide_change, is_computed, refuse, rewritten, write_out
from symbolics.errors import ExportError
from symbolics.quirks import REWRITES, SPELLINGS, spelled

__all__ = ["TorchCalls", "holds_tensor", "watch_reads"]

_OPERATORS = (
    torch.ops.pythonop.call, torch.ops.pythonop.call.default, torch.ops.pythonop.stop_gradient, torch.ops.pythonop.stop_gradient.default,
    torch.ops.pythonop.gradient, torch.ops.pythonop.gradient.default, torch.ops.pythonop.variable, torch.ops.pythonop.variable.default,
)  # fmt: skip
_GETTER_OF_GRAD_FN = torch.Tensor.grad_fn
_PROPERTIES = {"__get__", "size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_complex", "type", "__repr__"}


class _Call(NamedTuple):
    """A call of torch.

    Attributes:
        mode: Who sees it.
        func, name: The function, and its name.
        types: The types of the arguments that take part in dispatch.
        args, kwargs: The arguments.
        recorder: What records the capture; None where there is none.
    """

    mode: TorchCalls
    func: Any
    name: str
    types: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recorder: Recorder | None

    def make(self) -> Any:
        return self.func(*self.args, **self.kwargs)


#: The result of a call, in a tuple of one; None for a call that is not answered.
_Answer = tuple[Any] | None


class TorchCalls(TorchFunctionMode):
    """Enter it around a model's own forward.

    Args:
        flags: The ``requires_grad`` flags of that forward.
        held: The state that it reads, wherever it is held.
    """

    def __init__(self, flags: Flags, held: Held | None = None) -> None:
        super().__init__()
        self._flags = flags
        self._held = held or Held()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # By identity: Dynamo of torch 2.14, which traces this for torch.cond, fails at an operator's property.
        if any(func is own for own in _OPERATORS):
            return func(*args, **kwargs)
        args, kwargs = spelled(SPELLINGS, func, args, kwargs)
        if not torch.compiler.is_dynamo_compiling():  # in a body of torch.cond Dynamo knows its tensors by their names
            args, kwargs = self._held.call(args, kwargs)
        if (done := self._flags.change(func, args, kwargs)) is not None:
            return done[0]
        read = self._flags.read(func, args, kwargs)
        if read.copies:
            result = self.__torch_function__(func, types, read.args, read.kwargs)
            self._flags.note(read, result)
            return read.result(result)
        if private.transforms_active() and holds_tensor((args, kwargs)):  # what leaves a transform takes its number
            _check_transforms()
        call = _Call(self, func, getattr(func, "__name__", ""), types, args, kwargs, active_recorder())
        traced = not torch.compiler.is_dynamo_compiling() and private.is_tracing()
        with _going_on(call) if traced else contextlib.nullcontext():
            for answer in _ANSWERS:  # called from here: some look at the frame that called this one
                if (answered := answer(call)) is not None:
                    return answered[0]
            return _made(call)


@contextlib.contextmanager
def _going_on(call: _Call) -> Iterator[None]:
    """A call in a trace of torch.jit, which goes on where the caller catches what the call raises: that is noted."""
    with (
        contextlib.nullcontext() if call.recorder is None else call.recorder.capture.caught.around(call.func, call.args),
        private.trace_kept(),
    ):
        yield


def _gradient(call: _Call) -> _Answer:
    """A gradient that the forward itself asks for."""
    if call.recorder is None:
        return None
    if call.func is torch.autograd.grad:
        return (gradients_in_forward.grad(call.recorder, *call.args, **call.kwargs),)
    if call.func in ACCUMULATING:
        return (ACCUMULATING[call.func](call.recorder, *call.args, **call.kwargs),)
    return accumulate(call.recorder, call.func, call.args)


def _hook(call: _Call) -> _Answer:
    """A hook on a tensor's gradient."""
    if call.func is torch.Tensor.register_hook:
        return (_registered(call.recorder, *call.args, **call.kwargs),)
    if call.func is torch.Tensor.register_post_accumulate_grad_hook:
        refuse(
            "register_post_accumulate_grad_hook",
            "it runs on .grad, which is the training loop's and in no file: call it there, after backward()",
        )
    return None


def _grad_fn(call: _Call) -> _Answer:
    """The autograd node of a tensor, where the model asks for it and not torch (the frames: this one, the mode's, the asker's)."""
    if getattr(call.func, "__self__", None) is not _GETTER_OF_GRAD_FN or sys._getframe(2).f_globals.get("__name__", "").startswith(
        "torch."
    ):
        return None
    node = call.make()
    return (None if node is None else GradFn(node, refuse),)


def _of_a_class(call: _Call) -> _Answer:
    """A call that a tensor class answers by a ``__torch_function__`` of its own: what that calls is the model's code, and has to be seen."""
    if torch.compiler.is_dynamo_compiling() or not private.classes_are_asked():
        return None
    for kind in call.types:
        if private.has_own_torch_function(kind):
            with call.mode:
                result = kind.__torch_function__(call.func, call.types, call.args, call.kwargs)
            if result is not NotImplemented:
                return (result,)
    return None


def _composite(call: _Call) -> _Answer:
    """A function written in Python: what it calls inside may stop gradients too (F.gumbel_softmax)."""
    if not isinstance(call.func, types.FunctionType):  # asked before the caches below, of which Dynamo warns in a body of torch.cond
        return None
    choosing = call.recorder is not None and call.recorder.choosing
    if call.name in TAKING or (call.func in REWRITES and not (choosing and _ends_in_chosen(call))):
        return None
    body = (inner_body_of if choosing else body_of)(call.func)
    if body is None:
        return None
    with call.mode:
        return (rewritten(body, None, *call.args, **call.kwargs),)


def _ends_in_chosen(call: _Call) -> bool:
    """Whether a function written in Python only hands on to an operator that ``opaque=`` makes a node of: no formula stands in for it."""
    found = None if torch.compiler.is_dynamo_compiling() else private.first_operator(call.func, call.args, call.kwargs)
    return found is not None and bool(call.recorder.chooses(found[0]))  # type: ignore[union-attr]


def _stop_in_an_inlined_forward(call: _Call) -> _Answer:
    """detach and no_grad in the forward of an inlined Function: its backward says what flows, so they stop nothing."""
    given = None if call.recorder is None else call.recorder.capture.given
    if given is None or not call.args or not stops(call.func) or not stands_in_inlined(sys._getframe(2), given):
        return None
    if call.func is private.set_grad_enabled:
        return (None,)
    target = call.args[0]
    return (target if call.func in (torch.Tensor.detach_, torch.detach_) else target.view_as(target),)


def _check(call: _Call) -> _Answer:
    """A condition on values that no tensor of a capture has, where all that hangs on it is an error."""
    if call.name != "__bool__" or call.recorder is None or not private.has_no_value(call.args[0]):
        return None
    verdict = passed(sys._getframe(2), *call.recorder.capture.sites.here())
    return None if verdict is None else (verdict,)


def _taken(call: _Call) -> _Answer:
    """A value that leaves torch."""
    if call.recorder is None:
        return None
    watch_reads(call.recorder, call.name, call.args, call.kwargs)
    trace = call.recorder.capture.trace
    if trace is not None and call.name not in _PROPERTIES:
        trace.calling(call.func, call.args, call.kwargs)
    if call.name not in TAKING or not call.args:
        return None
    sites = call.recorder.capture.sites
    told = set() if trace is None else trace.told
    if torch.compiler.is_dynamo_compiling() or private.is_tracing():
        return (take(call.func, call.name, call.args, call.kwargs, told, lambda: sites.here()[0]),)
    try:
        return (take(call.func, call.name, call.args, call.kwargs, told),)
    except Exception as error:
        note_refusal(TAKING[call.name], error)
        raise


def _chosen(call: _Call) -> _Answer:
    """An operator of torch's own that ``opaque=`` makes a node of."""
    recorder = call.recorder
    if recorder is None or not recorder.listening() or torch.compiler.is_dynamo_compiling() or private.transforms_active():
        return None
    lacking = private.is_tracing() and call.func not in REWRITES and not private.torchscript_has(f"aten::{call.name}", None)
    called = called_operator(call.func, call.args, call.kwargs) if recorder.choosing or lacking else None
    if called is None:
        return None
    if not recorder.chooses(called.overload):
        if lacking and not called.changes and not recorder.translated(called.overload):
            recorder.capture.untranslated[private.schema_of(called.overload).name] = None
        return None
    return (stand_in(recorder, called, lambda target, result: call.mode.__torch_function__(torch.Tensor.copy_, (), (target, result))),)


def _in_place(call: _Call) -> _Answer:
    """A change of the tensor itself."""
    if not is_inplace(call.name):
        return None
    _keep(call, None)
    look = None if call.name in SAME_VALUES or call.recorder is None else call.recorder.capture.aliases.looked_at(call.args[0])
    if look is not None:
        check_unread(call.recorder, call.name, look[1])  # type: ignore[arg-type]
    result = _changed(call.func, call.name, call.args, call.kwargs)
    if look is not None:
        with torch.no_grad():
            _changed(torch.Tensor.copy_, "copy_", (look[1], look[0]), {})
        call.recorder.capture.aliases.written_through(*look, call.name)  # type: ignore[union-attr]
    elif call.name not in SAME_VALUES:
        _watch_changes(call.recorder, call.name, call.args[:1])
    return (result,)


def _given_data(call: _Call) -> _Answer:
    """``x.data = value``: x has the values, and the gradients that it had; what else looked at its memory keeps the old ones."""
    if call.recorder is None or call.name != "__set__" or getattr(call.func, "__self__", None) is not torch.Tensor.data:
        return None
    x, value = call.args
    if not (isinstance(value, torch.Tensor) and x.layout is value.layout is torch.strided and is_alike(x, value)):
        return None
    if _is_own_data(call.recorder, x, value):
        return (None,)
    check_unread(call.recorder, "x.data = ...", x, made=False)
    with torch.no_grad():
        _changed(torch.Tensor.copy_, "copy_", (x, value), {})
    call.recorder.capture.aliases.part(x)
    return (None,)


def _is_own_data(recorder: Recorder, x: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether x is given what it has: ``module.to(device)`` does so to each parameter that is there already."""
    look = recorder.capture.aliases.looked_at(value)
    return value is x or (look is not None and look[1] is x and is_whole(look[0], value))


def _into_out(call: _Call) -> _Answer:
    """A result that is written into the tensor that ``out=`` names."""
    out = call.kwargs.get("out")
    if out is None:
        return None
    _watch_changes(call.recorder, call.name, out)
    if not isinstance(out, (torch.Tensor, tuple)):
        return None
    rest = {key: value for key, value in call.kwargs.items() if key != "out"}
    result = call.mode.__torch_function__(call.func, call.types, call.args, rest)
    return (out if write_out(out, result) else call.make(),)


_ANSWERS: tuple[Callable[[_Call], _Answer], ...] = (
    _gradient, _hook, _grad_fn, _of_a_class, _composite, _stop_in_an_inlined_forward, _check, _taken, _chosen, _given_data, _in_place, _into_out,
)  # fmt: skip


def _made(call: _Call) -> Any:
    """The call, or what stands for it in a file, with marks where gradients stop."""
    func, name, args, kwargs = call.func, call.name, call.args, call.kwargs
    with private.traced_values_kept(sources(args, kwargs) if private.is_tracing() and name != "__set__" else ()):
        result = called(functools.partial(rewritten, func, REWRITES.get(func)), name, args, kwargs, torch.ops.pythonop.stop_gradient)
    _keep(call, result)
    if call.recorder is not None and (trace := call.recorder.capture.trace) is not None:
        trace.called(func, args, kwargs, result, functools.partial(_place, call.recorder))
    else:
        notice_parts(name, args, kwargs, result)
    return marked(func, name, args, kwargs, result)


def _keep(call: _Call, result: Any) -> None:
    """Remember the arguments that a backward may read: not those of a view, or of a call that asks for a shape alone."""
    if call.recorder is None or torch.compiler.is_dynamo_compiling():  # as of a branch of torch.cond, which Dynamo reads
        return
    if not torch.is_grad_enabled() or call.name in SHAPE_ONLY or call.name in _PROPERTIES or stops(call.func):
        return
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(leaf.requires_grad for leaf in tensors):
        return
    if isinstance(result, torch.Tensor) and any(private.shares_memory(leaf, result) for leaf in tensors):
        return
    call.recorder.capture.aliases.keep(tensors)


def _changed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0] if args else None
    if getattr(target, "_pythonop_alias", False) and name not in ("requires_grad_", "__setstate__"):
        refuse(
            name,
            "it changes the memory of a tensor through x.detach() or x.data; a graph cannot say that: change a copy (x.detach().clone()), or x itself",
        )
    result: Any
    if name == "detach_":
        stopped = torch.ops.pythonop.stop_gradient(target.detach())  # type: ignore[union-attr]
        result = func(*args, **kwargs)
        with torch.no_grad():
            result.copy_(stopped)
        return result
    whole = private.base_of(target) if isinstance(target, torch.Tensor) else target
    unseen = not torch.is_grad_enabled() and name not in SAME_VALUES and is_computed(whole)
    before = whole.clone() if unseen and whole is not None else None
    if not torch.is_grad_enabled():  # the target stays as it is: the mark goes on what is written into it
        rest = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.ops.pythonop.stop_gradient(t) if t.requires_grad else t, (args[1:], kwargs)
        )
        args, kwargs = (target, *rest[0]), rest[1]
    result = change(func, name, target, args, kwargs)
    if before is not None and whole is not None:
        hide_change(whole, before)
    return result


def _check_transforms() -> None:
    """Refuse derivatives by torch.func that neither exporter can see: they fail at them, or keep the example's values."""
    kinds = private.transform_kinds()
    if "Grad" in kinds or ("Jvp" in kinds and len(kinds) > 1):
        refuse(
            "torch.func.grad (vjp, jacrev)" if "Grad" in kinds else "torch.func.jacfwd (a jvp inside another transform)",
            "no exporter sees what it differentiates, a file would hold the example's values: call it in the forward of an autograd Function that is "
            "not named in inline=, which stays one node; or write the derivative out",
        )


def _registered(recorder: Recorder | None, self: torch.Tensor, hook: Any) -> Any:
    if recorder is not None:
        gradients_in_forward.check_later_hook(recorder, self)
    with private.unheard():
        handle = self.register_hook(hook)
    if recorder is not None:
        recorder.hook(self, hook, handle)
    return handle


def _watch_changes(recorder: Recorder | None, name: str, changed: Any) -> None:
    """Tell the recorder of tensors that are changed in place."""
    if recorder is not None and recorder.capture.aliases.pairs:
        for leaf in pytree.tree_leaves(changed):
            if isinstance(leaf, torch.Tensor):
                recorder.capture.aliases.change(leaf, name)


def watch_reads(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the recorder of sizes that become numbers, and of tensors that a Function changed and that are read again."""
    if recorder.capture.dynamic and args and isinstance(args[0], torch.Tensor):
        if name == "__bool__":
            notice_branch(args[0], recorder.capture.dynamic)
        recorder.capture.trace.sizes.read(name, args[0], functools.partial(_place, recorder))  # type: ignore[union-attr]
    if recorder.capture.aliases.stale and name not in SHAPE_ONLY and name not in _PROPERTIES:
        try:
            recorder.capture.aliases.check_read(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        except ExportError as error:
            recorder.refuse(name, error)


def _place(recorder: Recorder) -> str:
    module, source = recorder.capture.sites.here()
    return f"in module {module or '<root>'} at {source}"


def holds_tensor(value: Any) -> bool:
    """Whether an argument is or contains a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
