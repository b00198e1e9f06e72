"""Finds where PyTorch stops gradients during a capture and puts a mark there.

ONNX has no operator for x.detach() or torch.no_grad(). The mode below sees every torch call of the model's own code, on
both exporters: where floats that need a gradient go in and floats that need none come out, it wraps the results in
``pythonop::stop_gradient``. Frozen parameters need no mark: nothing that depends on them alone needs a gradient.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import symbolics.capture.opaque_op  # noqa: F401  (it defines the two operators)
from symbolics import torch_private as private
from symbolics.capture import gradients_in_forward
from symbolics.capture.accumulation import ACCUMULATING, accumulate
from symbolics.capture.binding import is_traced_size
from symbolics.capture.branches import notice_branch
from symbolics.capture.buffers import Buffers
from symbolics.capture.checks import passed
from symbolics.capture.flags import Flags, is_inplace
from symbolics.capture.gradient_ops import Taken
from symbolics.capture.held import Held
from symbolics.capture.inlining import stands_in_inlined
from symbolics.capture.other_hooks import GradFn
from symbolics.capture.recorder import active_recorder
from symbolics.capture.running_statistics import RunningStatistics
from symbolics.capture.taken_values import TAKING, take
from symbolics.capture.undifferentiable import called
from symbolics.capture.writes import SAME_VALUES, change, hide_change, is_computed, refuse, rewritten, write_out
from symbolics.errors import ExportError
from symbolics.node.result import write_structure
from symbolics.quirks import REWRITES, SPELLINGS, spelled

__all__ = ["StopGradients", "body_of", "differentiable_inputs", "holds_tensor", "marking"]

# Their results do not depend on the values of their arguments: nothing flows that could be stopped.
_SHAPE_ONLY = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided",
}  # fmt: skip

_GETTER_OF_DATA = torch.Tensor.data
_GETTER_OF_GRAD_FN = torch.Tensor.grad_fn


_STOPPING = (private.set_grad_enabled, torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.detach_)


def _stops(func: Any) -> bool:
    return any(func is stopping for stopping in _STOPPING) or getattr(func, "__self__", None) is _GETTER_OF_DATA


_OPERATORS = (
    torch.ops.pythonop.call, torch.ops.pythonop.call.default, torch.ops.pythonop.stop_gradient, torch.ops.pythonop.stop_gradient.default,
    torch.ops.pythonop.gradient, torch.ops.pythonop.gradient.default, torch.ops.pythonop.variable, torch.ops.pythonop.variable.default,
)  # fmt: skip


class StopGradients(TorchFunctionMode):
    """Marks the places where gradients stop. Enter it around the model's own forward.

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
        if (recorder := active_recorder()) is not None:
            if func is torch.autograd.grad:
                return gradients_in_forward.grad(recorder, *args, **kwargs)
            if func in ACCUMULATING:
                return ACCUMULATING[func](recorder, *args, **kwargs)
            if (held := accumulate(recorder, func, args)) is not None:
                return held[0]
        if func is torch.Tensor.register_hook:
            return _hook(*args, **kwargs)
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            refuse(
                "register_post_accumulate_grad_hook",
                "it runs on .grad, which is the training loop's and in no file: call it there, after backward()",
            )
        if getattr(func, "__self__", None) is _GETTER_OF_GRAD_FN and not sys._getframe(1).f_globals.get("__name__", "").startswith(
            "torch."
        ):
            node = func(*args, **kwargs)
            return None if node is None else GradFn(node, refuse)
        body = None if func in REWRITES else body_of(func)
        if body is not None:
            with self:  # what it calls inside may stop gradients too (F.gumbel_softmax)
                return rewritten(body, REWRITES.get(func), *args, **kwargs)
        recorder = active_recorder()
        given = None if recorder is None else recorder.capture.given
        if given is not None and args and _stops(func) and stands_in_inlined(sys._getframe(1), given):
            if func is private.set_grad_enabled:
                return None
            return args[0] if func in (torch.Tensor.detach_, torch.detach_) else args[0].view_as(args[0])
        name = getattr(func, "__name__", "")
        if name == "__bool__" and recorder is not None and private.has_no_value(args[0]):
            verdict = passed(sys._getframe(1), *recorder.capture.sites.here())
            if verdict is not None:
                return verdict
        if recorder is not None:
            _watch_reads(recorder, name, args, kwargs)
            if recorder.capture.trace.statistics is not None and name not in _PROPERTIES:
                recorder.capture.trace.statistics.note(func, args, kwargs)
            if name in TAKING and args:
                return take(func, name, args, kwargs)
        if is_inplace(name):
            result = self._inplace(func, name, args, kwargs)
            if name not in SAME_VALUES:
                _watch_changes(recorder, name, args[:1])
            return result
        out = kwargs.get("out")
        if out is not None:
            _watch_changes(recorder, name, out)
        if isinstance(out, (torch.Tensor, tuple)):
            result = self.__torch_function__(func, types, args, {key: value for key, value in kwargs.items() if key != "out"})
            return out if write_out(out, result) else func(*args, **kwargs)
        with private.traced_values_kept(_sources(args, kwargs) if private.is_tracing() and name != "__set__" else ()):
            result = called(functools.partial(rewritten, func, REWRITES.get(func)), name, args, kwargs, torch.ops.pythonop.stop_gradient)
        buffers = None if recorder is None else recorder.capture.trace.buffers
        if recorder is not None and buffers is not None:
            buffers.note_views(func, result)
            recorder.capture.trace.views.note(func, args, kwargs, result)
        if name in _SHAPE_ONLY or _needs_no_mark(result):
            return result
        if private.transforms_active():  # what torch.func wraps does not say that it needs a gradient
            stopped = _stops(func) or not torch.is_grad_enabled()
            return pytree.tree_map_only(torch.Tensor, lambda t: _mark(t, []), result) if stopped else result
        if torch.is_grad_enabled() and private.is_higher_order(func):  # torch.cond, scan: a capture runs their bodies without autograd
            if _sources(args, kwargs):
                pytree.tree_map_only(torch.Tensor, _as_differentiable, result)
            return result
        sources = _sources(args, kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: _mark(t, sources), result) if sources else result

    def _inplace(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                torch.Tensor, lambda t: torch.ops.pythonop.stop_gradient(t) if _needs_gradient(t) else t, (args[1:], kwargs)
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


def _hook(self: torch.Tensor, hook: Any) -> Any:
    recorder = active_recorder()
    if recorder is not None:
        gradients_in_forward.check_later_hook(recorder, self)
    with private.unheard():
        handle = self.register_hook(hook)
    if recorder is not None:
        recorder.hook(self, hook, handle)
    return handle


def _watch_changes(recorder: Any, name: str, changed: Any) -> None:
    """Tell the recorder of tensors that are changed in place."""
    if recorder is not None and recorder.capture.aliases.pairs:
        for leaf in pytree.tree_leaves(changed):
            if isinstance(leaf, torch.Tensor):
                recorder.capture.aliases.change(leaf, name)


_SIZE_READERS = {"__int__", "__index__", "item", "tolist"}
_PROPERTIES = {"__get__", "size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_complex", "type", "__repr__"}


def _watch_reads(recorder: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the recorder of sizes that become numbers, and of tensors that a Function changed and that are read again."""
    if name in _SIZE_READERS and recorder.capture.trace.dynamic and args and isinstance(args[0], torch.Tensor) and is_traced_size(args[0]):
        with private.paused_capture():
            size = int(args[0])
        if size in recorder.capture.trace.dynamic:
            recorder.capture.trace.frozen.add(size)
    if name == "__bool__" and recorder.capture.trace.dynamic and isinstance(args[0], torch.Tensor):
        notice_branch(args[0], recorder.capture.trace.dynamic)
    if recorder.capture.aliases.stale and name not in _SHAPE_ONLY and name not in _PROPERTIES:
        try:
            recorder.capture.aliases.check_read(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        except ExportError as error:
            recorder.refuse(name, error)


def _as_differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Let what follows see that a gradient flows here."""
    return tensor.requires_grad_() if tensor.is_floating_point() and tensor.is_leaf else tensor


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _needs_no_mark(result: Any) -> bool:
    """Whether this is plain to see; most calls of a forward end here."""
    if isinstance(result, torch.Tensor):
        return result.requires_grad or not result.is_floating_point()
    return isinstance(result, torch.Size) or not isinstance(result, (tuple, list, dict))


def _sources(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments through which gradients flow."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _mark(tensor: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    marked = torch.ops.pythonop.stop_gradient(tensor)
    shared = [source for source in sources if private.shares_memory(tensor, source)]
    if shared:
        marked._pythonop_alias = True
        if (recorder := active_recorder()) is not None:
            recorder.capture.aliases.pairs += [
                (marked, source, "detach() or .data", "detach a copy (x.detach().clone())") for source in shared
            ]
    return marked


@functools.lru_cache(maxsize=1024)
def body_of(func: Any) -> Callable[..., Any] | None:
    """A composite written in Python (torch.nn.functional.*), without its dispatch to modes; None for anything else."""
    if not isinstance(func, types.FunctionType):
        return None
    checks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    if not checks or "super" in func.__code__.co_names:  # Tensor.unflatten: what it calls comes back here under its own name
        return None
    unheard = dict.fromkeys(checks, lambda *_: False)
    scope = {**func.__globals__, **unheard}
    for name in func.__code__.co_names:  # overrides.has_torch_function(...) in torch._assert and torch.sym_max
        if isinstance(module := func.__globals__.get(name), types.ModuleType) and unheard.keys() & vars(module).keys():
            scope[name] = types.SimpleNamespace(**{**vars(module), **unheard})
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@contextlib.contextmanager
def marking(model: torch.nn.Module, keywords: dict[str, Any] | None = None, constants: dict[int, Any] | None = None) -> Iterator[None]:
    """Mark what happens inside ``model.forward``, and in the hooks around it, while the block runs.

    Args:
        model: The module.
        keywords: Keyword arguments for a caller that passes positional ones only (torch.jit): those that hold tensors
            arrive as the last positional arguments, in this order, the others are constants. None for any other caller.
        constants: Positional arguments that the caller left out, by position.
    """
    forward, held = model.forward, Held(model)
    traced = [name for name, value in (keywords or {}).items() if holds_tensor(value)]
    hooks = {name: found for name, p in model.named_parameters() if p.requires_grad and (found := private.tensor_hooks(p))}

    refused: list[bool] = []
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    @functools.wraps(forward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces its own way in; a training thread beside the export has no recorder.
        if torch.compiler.is_dynamo_compiling() and refused:  # torch tries Dynamo where another way failed: it need not, and may crash
            raise ExportError("refused before")
        if torch.compiler.is_dynamo_compiling() or (recorder := active_recorder()) is None:
            return hooked(forward, *args, **kwargs)
        if keywords:
            count = len(args) - len(traced)
            args, kwargs = args[:count], {**keywords, **dict(zip(traced, args[count:], strict=True))}
        for position, value in sorted((constants or {}).items()):
            args = (*args[:position], value, *args[position:])
        for name, parameter in model.named_parameters() if hooks else ():
            for hook in hooks.get(name, ()):
                recorder.hook(parameter, hook, parameter=name)
        trace = recorder.capture.trace
        recorder.capture.evaluated = not model.training
        recorder.capture.taken = Taken(given=[leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
        buffers = Buffers(model)
        trace.buffers = buffers if private.is_tracing() else None
        trace.statistics = RunningStatistics(trace.dirtied, buffers.follow) if private.is_tracing() else None
        try:
            recorder.capture.flags, recorder.capture.held = Flags(torch.ops.pythonop.stop_gradient), held
            held.begin()
            # Inside, a model that asks for its own forward has the one that it has in eager mode.
            with StopGradients(recorder.capture.flags, held), private.buffers_assigned_unseen(), _forward_of(model, own):
                result = held.known(hooked(forward, *args, **kwargs))
        except ExportError:
            refused.append(True)
            raise
        recorder.end_forward()
        if trace.buffers is None:
            result = buffers.write_assigned(result)
        recorder.capture.outputs = write_structure(result, lambda leaf: isinstance(leaf, torch.Tensor))
        recorder.capture.results = _types_of(result)
        _watch_reads(recorder, "the model's return", (result,), {})
        if trace.buffers is None or trace.statistics is None:
            return result
        trace.statistics.say(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        trace.statistics.say_touched()
        written = {name: buffer.detach().clone() for name, buffer in trace.buffers.written(trace.dirtied).items()}
        trace.buffers.put_back()
        recorder.capture.written = list(written)
        return result, tuple(written.values()), tuple(trace.anchors)

    if keywords is not None:
        del marked.__wrapped__  # torch.jit must not bind by the signature of forward, and make inputs of its defaults
    own = model.__dict__.get("forward")
    try:
        with _forward_of(model, marked), private.forward_hooks_inside(model) as hooked:
            yield
    finally:
        for (
            parameter,
            flag,
        ) in flags:  # those that forward leaves without; of one that is no leaf torch would raise, and hide why forward did
            if parameter.requires_grad is not flag and parameter.is_leaf:
                parameter.requires_grad_(flag)


@contextlib.contextmanager
def _forward_of(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """While the block runs, a module has a forward of its own; None: that of its class."""
    before = model.__dict__.get("forward")

    def put(forward: Any) -> None:
        model.__dict__.pop("forward", None)
        if forward is not None:
            model.__dict__["forward"] = forward

    put(forward)
    try:
        yield
    finally:
        put(before)


def _types_of(result: Any) -> list[tuple[torch.dtype, list[int | None]]]:
    with private.paused_capture():
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return [(t.dtype, [d if type(d) is int else None for d in t.shape]) for t in tensors if t.layout == torch.strided]


def holds_tensor(value: Any) -> bool:
    """Whether an argument is or contains a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def differentiable_inputs(tree: Any) -> Any:
    """The example inputs, each float tensor a copy that needs a gradient.

    A gradient graph may be asked for any float input later, so marks and flags must not depend on whether the example
    happened to need one. Copies are no leaves: a model may change its inputs in place.
    """

    def differentiable(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor
        with torch.enable_grad():
            fresh = tensor.detach().clone()
            return fresh.requires_grad_().clone() if fresh.is_floating_point() else fresh

    with torch.inference_mode(False):
        return pytree.tree_map_only(torch.Tensor, differentiable, tree)
