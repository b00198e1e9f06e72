"""Every private name of torch and onnxscript that the project uses, each with the reason.

tests/symbolics/test_torch_private.py has a test a name: when a release moves one, that test fails by its name. Nothing else in
the project may touch a private name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch

# The bases of all Functions, where symbolics.capture.interception stands; `apply` of the first is what Function.apply ends in.
from torch.autograd.function import FunctionMeta, _SingleLevelFunction as SingleLevelFunction

__all__ = [
    "FunctionMeta",
    "SingleLevelFunction",
    "add_traced_node",
    "allow_in_dynamo",
    "answered_draws",
    "apply_of_base",
    "autograd_kernel",
    "captured_by_dynamo",
    "detect_fake_mode",
    "dynamo_exporter",
    "enter_transform",
    "every_result",
    "from_dlpack",
    "function_of",
    "functions",
    "has_bodies",
    "helpers_of_apply",
    "in_forward_mode",
    "is_any_autocast_enabled",
    "is_fake",
    "is_higher_order",
    "is_module_hook",
    "is_tracing",
    "keeps_graph",
    "leave_transform",
    "leave_transforms",
    "module_backward_hooks",
    "non_persistent_buffers",
    "operator_name",
    "own_memory",
    "parametrization_cache",
    "paused_capture",
    "post_accumulate_hooks",
    "quiet_registration",
    "random_operators",
    "real_tensors",
    "release_weak_storage",
    "replace_helpers_of_apply",
    "replace_traced",
    "run_backward",
    "set_grad_enabled",
    "set_traced_value",
    "shares_memory",
    "sizes_watched",
    "tensor_hooks",
    "tensor_type",
    "torchscript_exporter",
    "torchscript_passes",
    "traced_graph",
    "traced_producer",
    "traced_value",
    "tracing_questions",
    "tracing_questions_of_c",
    "transform_depth",
    "transforms_active",
    "translator",
    "unheard",
    "weak_storage",
]


def apply_of_base(cls: type) -> Any:
    """What ``cls.apply`` ends in: the method of C, whatever stands before it."""
    return super(SingleLevelFunction, cls).apply  # type: ignore[misc]


def functions() -> Any:
    """The module in which Function.apply looks up ``custom_function_call``, its path under torch.func transforms."""
    import torch.autograd.function

    return torch.autograd.function


def helpers_of_apply() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of Python that ``apply`` in C (torch 2.14 on) looks up at each call.

    Returns:
        ``bind(forward, args, kwargs)``, called for a Function with a setup_context; ``call(cls, args, kwargs)``, called under torch.func.
    """
    return functions()._bind_default_args, functions()._call_custom_function_call


def replace_helpers_of_apply(bind: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Put others in the place of `helpers_of_apply`."""
    functions()._bind_default_args, functions()._call_custom_function_call = bind, call


def transforms_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) surrounds this code."""
    return bool(torch._C._are_functorch_transforms_active())


def transform_depth() -> int:
    """How many transforms of torch.func surround this code."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def leave_transforms(depth: int) -> None:
    """Take away the transforms that something left behind, down to so many: with one of them every Function fails."""
    while transform_depth() > depth:
        torch._C._functorch.pop_dynamic_layer_stack()


def enter_transform() -> None:
    """Let Function.apply believe that torch.func.grad surrounds it: it then hands its call over to Python."""
    torch._C._functorch._grad_increment_nesting()


def leave_transform() -> None:
    """Undo `enter_transform`, before any operator runs."""
    torch._C._functorch._grad_decrement_nesting()


def is_higher_order(func: Any) -> bool:
    """Whether a function mode was called for torch.cond, while_loop, scan and the like."""
    from torch._ops import HigherOrderOperator

    return isinstance(func, HigherOrderOperator)


@contextlib.contextmanager
def paused_capture() -> Iterator[None]:
    """Run code that the exporters must not see: no proxy tracing, no TorchScript tracing, no torch function modes."""
    # Loading proxy_tensor is cheap once torch.export is: the TorchScript exporter does not need it.
    proxy = sys.modules.get("torch.fx.experimental.proxy_tensor")
    state = torch._C._get_tracing_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unheard())
        if proxy is not None:
            stack.enter_context(proxy.disable_proxy_modes_tracing())
        if state is not None:
            torch._C._set_tracing_state(None)
            stack.callback(torch._C._set_tracing_state, state)
        yield


def unheard() -> contextlib.AbstractContextManager[Any]:
    """Neither torch function modes nor subclasses of Tensor hear of the torch functions that run inside."""
    return torch._C.DisableTorchFunction()


#: What torch.no_grad() and enable_grad() call; a torch function mode sees it. torch.set_grad_enabled is a class whose instances
#: restore: 0.5 us against 0.06.
set_grad_enabled = torch._C._set_grad_enabled

#: The engine behind torch.autograd.grad, without the checks that the native library does not need: 11 us against 22.
run_backward = torch.autograd.Variable._execution_engine.run_backward

#: Whether autocast is on for any device, in one call.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: What torch.utils.dlpack.from_dlpack ends in, for a capsule: 0.5 us against 1.1.
from_dlpack = torch._C._from_dlpack


def weak_storage(tensor: torch.Tensor) -> int:
    """A weak reference to the memory of a tensor, which `release_weak_storage` takes back. 0.3 us with that; the public way
    (torch.multiprocessing.reductions.StorageWeakRef) is slower, and cannot give the memory back."""
    return tensor.untyped_storage()._weak_ref()  # type: ignore[return-value]  # an address, whatever its stub says


#: Drop what `weak_storage` returned.
release_weak_storage = torch.UntypedStorage._free_weak_ref


def own_memory(weak: int) -> None:
    """Give a storage over memory of somebody else a copy of its own, in place: each tensor that shares it, also one that
    autograd has saved, reads the copy from here on. Nothing but sharing it with other processes does that.

    Where there is no room for shared memory, each tensor that Python knows gets a copy; one that autograd alone holds gets none.

    Args:
        weak: From `weak_storage`; a storage that is gone is no error.
    """
    storage = torch.UntypedStorage._new_with_weak_ptr(weak)
    if storage is None:
        return
    with contextlib.suppress(RuntimeError, OSError):
        if sys.platform == "win32":
            storage.share_memory_()
            return
        room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        # Writing beyond the room would end the process.
        if room is None or room.f_bavail * room.f_frsize > storage.nbytes() + (1 << 20):
            storage._share_fd_cpu_()  # share_memory_() starts a process where the strategy is "file_system"
            return
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and _is_over(found, storage):
            found.data = found.detach().clone()


def _is_over(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return tensor.untyped_storage()._cdata == storage._cdata
    except (RuntimeError, NotImplementedError):
        return False  # it has none


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors (fake ones too) have one storage: a change of one is a change of the other."""
    return bool(torch._C._is_alias_of(a, b))


@functools.cache
def _random_watch() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.drawn: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _draws(func):
                self.drawn.append(func)
            return func(*args, **(kwargs or {}))

    return Watch


@functools.lru_cache(maxsize=1024)
def _draws(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


@contextlib.contextmanager
def random_operators() -> Iterator[list[Any]]:
    """Collect the random operators of torch that run in the block, on real tensors or fake ones (which draw nothing)."""
    with _random_watch()() as watch:
        yield watch.drawn


def is_module_hook(cls: type) -> bool:
    """Whether a Function is the one by which modules call their full backward hooks: an identity."""
    from torch.nn.modules._functions import BackwardHookFunction

    return cls is BackwardHookFunction


def operator_name(called: Any) -> str:
    """``namespace::name`` of what torch._ops calls, "" for torch's own operators and anything else."""
    name = getattr(called, "_qualified_op_name", None) or getattr(getattr(called, "_schema", None), "name", "")
    return "" if str(name).split("::")[0] in ("", "aten", "prims", "prim", "pythonop") else str(name)


def autograd_kernel(called: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
    """What an operator of torch.library runs where autograd is on: what the exporters' modes stand in front of.

    Returns:
        The kernel for the device of the tensors; None where the operator has several overloads, or no such kernel.
    """
    overload = (
        called if not hasattr(called, "overloads") else getattr(called, called.overloads()[0]) if len(called.overloads()) == 1 else None
    )
    if overload is None or not tensors:
        return None
    try:
        kernel = torch.library.get_kernel(overload.name(), f"Autograd{tensors[0].device.type.upper()}")
    except RuntimeError:
        return None
    keys = functools.reduce(lambda a, b: a | b, (torch._C._dispatch_keys(t) for t in tensors))
    return functools.partial(kernel.call_boxed, keys)


def function_of(node: Any) -> type | None:
    """The Function class whose call a node of an autograd graph is the backward of; None for torch's own operators."""
    return getattr(type(node), "_forward_cls", None)


def tracing_questions() -> tuple[Any, ...]:
    """The functions of Python by which code asks whether it is traced, compiled or exported."""
    return (
        torch.jit.is_tracing,
        torch.onnx.is_in_onnx_export,
        torch.compiler.is_exporting,
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
    )


def tracing_questions_of_c() -> tuple[Any, dict[str, Any]]:
    """The module of those that are written in C, and each one's answer in eager mode. brevitas and others ask them."""
    return torch._C, {"_get_tracing_state": None, "_is_tracing": False}


# ------------------------------------------------------------------------------------------------ torch.export


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def detect_fake_mode(values: list[Any]) -> Any:
    """The FakeTensorMode of an export in progress, None outside."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Leave the fake mode: tensors made inside have data."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def sizes_watched(shape_env: Any) -> Iterator[list[Any]]:
    """Run forward on fake tensors without a trace in the export's own shape reasoning.

    What forward asks of a size (a branch, int()) is asked again at every run of the node, so it must not become a
    condition of the whole graph; nor are forward's own data-dependent sizes those of the op that stands for it.

    Yields:
        The sizes that forward turned into numbers: output shapes computed from those hold for the example only.
    """
    asked: list[Any] = []
    if shape_env is None:
        yield asked
        return
    evaluate = shape_env.evaluate_expr

    def watched(expression: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(expression, *args, **kwargs)
        if expression.free_symbols and not getattr(expression, "is_Boolean", False) and not getattr(expression, "is_Relational", False):
            asked.append(expression)
        return result

    with shape_env.ignore_fresh_unbacked_symbols(), shape_env.suppress_guards():
        shape_env.evaluate_expr = watched
        try:
            yield asked
        finally:
            del shape_env.evaluate_expr


@contextlib.contextmanager
def allow_in_dynamo(classes: list[type]) -> Iterator[None]:
    """Keep calls of these Functions as one node where Dynamo traces (bodies of torch.cond, strict=True).

    Without it Dynamo inlines them and says nothing. torch has a public way in (allow_in_graph) and none out.
    """
    from torch._dynamo import trace_rules

    known = trace_rules._allowed_callable_ids
    added = [cls for cls in classes if id(cls) not in known]
    for cls in added:
        torch._dynamo.allow_in_graph(cls)
    try:
        yield
    finally:
        for cls in added:
            known.remove(id(cls))


def add_traced_node(node: ir.Node) -> None:
    """Append a node to the graph that torch.onnx is translating into."""
    from torch.onnx._internal.exporter import _core

    _core.current_tracer.nodes.append(node)  # type: ignore[union-attr]


def dynamo_exporter() -> Any:
    """The module whose ``export_compat`` torch.onnx.export(dynamo=True) calls, looked up at each call."""
    from torch.onnx._internal.exporter import _compat

    return _compat


def translator() -> Any:
    """The module whose ``_exported_program_to_onnx_program`` translates; unread nodes are lost in the step after it."""
    from torch.onnx._internal.exporter import _core

    return _core


@contextlib.contextmanager
def quiet_registration(functions: Iterable[Any]) -> Iterator[None]:
    """torch.onnx infers a signature for onnxscript functions; that these are none is no news to the user."""
    names = {str(function) for function in functions}
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def wanted(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args and str(record.args[0]) in names)

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def captured_by_dynamo(program: Any) -> bool:
    """Whether torch.onnx.export fell back to torch.export.export(strict=True)."""
    return "Strict" in (program._capture_strategy or "") and "NonStrict" not in program._capture_strategy


# ------------------------------------------------------------------------------------------------- TorchScript


def torchscript_exporter() -> Any:
    """The module whose ``export`` torch.onnx.export(dynamo=False) calls, looked up at each call."""
    from torch.onnx._internal.torchscript_exporter import utils

    return utils


def torchscript_passes() -> Any:
    """The module in which torch.onnx.export(dynamo=False) looks up its passes at each call: ``_jit_pass_onnx_constant_fold``
    and ``_jit_pass_onnx_graph_shape_type_inference``."""
    return torch._C


def has_bodies(graph: Any) -> bool:
    """Whether a graph of the TorchScript exporter has nodes with bodies, at any depth."""
    return any(graph.findNode(kind) is not None for kind in ("onnx::If", "onnx::Loop"))


def torchscript_symbolic(name: str) -> tuple[int, Any] | None:
    """The TorchScript exporter's own newest symbolic function of an operator, and the opset that it is for.

    None where a user has registered another one for that opset. The registry is private.
    """
    from torch.onnx._internal.torchscript_exporter.registration import registry

    group = registry.get_function_group(name)
    if group is None:
        return None
    functions = group._functions
    opset = max(functions._base)
    return None if any(functions.overridden(version) for version in functions) else (opset, functions._base[opset])


def torchscript_constant(value: Any) -> Any:
    """The number or text that a constant of the TorchScript exporter holds; None for any other value."""
    node = value.node()
    if node.kind() not in ("prim::Constant", "onnx::Constant") or not node.hasAttribute("value"):
        return None
    if node.kindOf("value") == "s":
        return node.s("value")
    return node.t("value").item() if node.kindOf("value") == "t" else getattr(node, node.kindOf("value"))("value")


def inner_function(name: str) -> Any:
    """What a function of torch.nn.functional, or torch.cdist, calls after its checks: this is what a mode sees of it."""
    return getattr(torch._C._nn, name, None) or getattr(torch._VF, name)


def is_tracing() -> bool:
    """Whether torch.jit is tracing in this thread."""
    return torch._C._get_tracing_state() is not None


def traced_producer(tensor: torch.Tensor) -> Any:
    """The TorchScript node that produced a traced tensor."""
    return torch._C._get_value_trace(tensor).node()


def replace_traced(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """From here on, ``tensor`` stands for the traced value of ``source``."""
    torch._C._set_value_trace(tensor, torch._C._get_value_trace(source))


def traced_value(tensor: torch.Tensor) -> Any:
    """What stands for a tensor in the TorchScript trace."""
    return torch._C._get_value_trace(tensor)


def set_traced_value(tensor: torch.Tensor, value: Any) -> None:
    """From here on, a value of the trace stands for ``tensor``."""
    torch._C._set_value_trace(tensor, value)


def traced_graph() -> Any:
    """The graph that torch.jit is tracing into."""
    return torch._C._get_tracing_state().graph()


def tensor_type(dtype: torch.dtype, sizes: Sequence[int | None]) -> Any:
    """The TorchScript type of tensors of a dtype and of these sizes, None for one that is open."""
    return torch._C.TensorType.get().with_dtype(dtype).with_sizes(list(sizes))


# ----------------------------------------------------------------------------------------------------- modules


def parametrization_cache() -> dict[Any, Any]:
    """What torch.nn.utils.parametrize.cached() keeps: a run fills it, and the next one calls nothing."""
    import torch.nn.utils.parametrize

    return torch.nn.utils.parametrize._cache


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """The names of a module's buffers that state_dict() leaves out (the live set)."""
    return module._non_persistent_buffers_set


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, in the order in which they run."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that run once a tensor's .grad is there."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def module_backward_hooks(module: torch.nn.Module) -> list[tuple[str, Callable[..., Any]]]:
    """A module's hooks on gradients, those of all modules included, each with the method that registers it."""
    everywhere = torch.nn.modules.module
    full, old = "register_full_backward_hook", "register_backward_hook"
    return [
        *(("register_full_backward_pre_hook", hook) for hook in module._backward_pre_hooks.values()),
        *(("register_module_full_backward_pre_hook", hook) for hook in everywhere._global_backward_pre_hooks.values()),
        *((old if module._is_full_backward_hook is False else full, hook) for hook in module._backward_hooks.values()),
        *(("register_module_full_backward_hook", hook) for hook in everywhere._global_backward_hooks.values()),
    ]


# ---------------------------------------------------------------------------------------------------- autograd


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation (torch.autograd.forward_ad.dual_level) is open."""
    return torch.autograd.forward_ad._current_level >= 0


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def answered_draws(answer: Callable[[tuple[int, ...], float], torch.Tensor]) -> Iterator[None]:
    """Let ``answer(shape, probability)`` say what is drawn where dropout draws.

    On the CPU all dropouts, those inside LSTM and attention as well, end in this operator.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answering(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is not torch.ops.aten.bernoulli_.float:
                return func(*args, **kwargs)
            return args[0].copy_(answer(tuple(args[0].shape), args[1] if len(args) > 1 else kwargs.get("p", 0.5)))

    with Answering():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def every_result(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Hear of every tensor that an ATen operator returns, those of backward included."""
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in _pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    listener(leaf)
            return result

    with Listening():  # type: ignore[no-untyped-call]
        yield
