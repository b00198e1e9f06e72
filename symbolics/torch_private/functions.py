"""torch.autograd and torch.func: how a Function is applied, how a backward runs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# The bases of all Functions, where symbolics.capture.interception stands; `apply` of the first is what Function.apply ends in.
from torch.autograd.function import FunctionMeta, _SingleLevelFunction as SingleLevelFunction

__all__ = [
    "FunctionMeta",
    "SingleLevelFunction",
    "after_backward",
    "apply_of_base",
    "backward_of",
    "cpp_function_of",
    "enter_transform",
    "forward_level",
    "forward_mode",
    "function_of",
    "functional_transforms",
    "functions",
    "graph_task",
    "has_own_jvp",
    "helpers_of_apply",
    "is_any_autocast_enabled",
    "is_higher_order",
    "is_legacy_batch",
    "is_module_hook",
    "is_registered_autograd",
    "keeps_graph",
    "layers_of",
    "leave_forward_levels",
    "leave_transform",
    "leave_transforms",
    "may_move",
    "outside_of_compile",
    "reparametrized",
    "replace_helpers_of_apply",
    "requires_grad",
    "run_backward",
    "running_node",
    "set_grad_enabled",
    "stateless",
    "transform_depth",
    "transform_kinds",
    "transforms_active",
    "unwrap_if_dead",
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


def functional_transforms() -> Any:
    """The module in which torch.func's grad, vjp, jvp, jacrev, jacfwd and hessian look up, at each call, what does the work:
    ``grad_and_value_impl``, ``_vjp_with_argnums``, ``_jvp_with_argnums``, ``vmap``, ``_chunked_standard_basis_for_``."""
    from torch._functorch import eager_transforms

    return eager_transforms


def stateless() -> Any:
    """The module in which torch.func.functional_call looks up ``_functional_call``, which refuses to run in a TorchScript trace."""
    import torch.nn.utils.stateless

    return torch.nn.utils.stateless


def reparametrized(module: torch.nn.Module, tensors: Any, *, tie_weights: bool, strict: bool) -> contextlib.AbstractContextManager[Any]:
    """Tensors in the place of a module's parameters and buffers: what functional_call does around a call. There is no public way that a trace may take."""
    return stateless()._reparametrize_module(module, tensors, tie_weights=tie_weights, strict=strict)


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


def layers_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, and those that transforms of torch.func have wrapped in it, down to the plain one: each has an autograd graph of its own."""
    yield tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def transform_kinds() -> list[str]:
    """The transforms of torch.func that surround this code, the outermost first: Grad (grad, vjp, jacrev), Jvp (jvp, jacfwd), Vmap, Functionalize."""
    return [interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ()]


def forward_level() -> int:
    """The level of forward-mode differentiation (torch.autograd.forward_ad.dual_level) that is open, -1 for none."""
    return torch.autograd.forward_ad._current_level


def forward_mode() -> AbstractContextManager[None]:
    """Forward-mode differentiation switched on: within the forward of a Function, which may run a session, it is off."""
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def leave_forward_levels(level: int) -> None:
    """Close those that something left open, down to this one: with one of them every jvp fails."""
    while forward_level() > level:
        torch.autograd.forward_ad.exit_dual_level()


def enter_transform() -> None:
    """Let Function.apply believe that torch.func.grad surrounds it: it then hands its call over to Python."""
    torch._C._functorch._grad_increment_nesting()


def leave_transform() -> None:
    """Undo `enter_transform`, before any operator runs."""
    torch._C._functorch._grad_decrement_nesting()


def outside_of_compile(function: Any) -> Any:
    """The function, as torch.compile leaves it alone. torch.compiler.disable is the same, and imports all of Dynamo when it decorates."""
    return torch._disable_dynamo(function)


def is_legacy_batch(value: torch.Tensor) -> bool:
    """Whether a tensor is a batch of torch.autograd's own making (is_grads_batched=True), which no transform of torch.func is about."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(value))


def requires_grad(value: torch.Tensor) -> bool:
    """Whether a gradient of a tensor is wanted, also by a transform outside of the innermost one: the tensor itself says the latter's."""
    while not value.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.requires_grad


def may_move(value: torch.Tensor) -> bool:
    """Whether a tensor has a tangent (forward mode), or could have one in a transform outside of the innermost one, where nothing tells."""
    levels = {interpreter.level() for interpreter in torch._C._functorch.get_interpreter_stack() or () if interpreter.key().name == "Jvp"}
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.maybe_get_level(value) in levels:
            return True
        value = torch._C._functorch.get_unwrapped(value)
    with temporarily_clear_interpreter_stack():
        return torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def function_of(node: Any) -> type | None:
    """The Function class whose call a node of an autograd graph is the backward of; None for torch's own operators."""
    return getattr(type(node), "_forward_cls", None)


def is_registered_autograd(cls: type | None) -> bool:
    """Whether a Function is the one that torch.library makes of ``register_autograd``: its backward is the registered one, and a None."""
    return cls is not None and cls.__module__ == "torch._library.autograd" and cls.__name__.startswith("GeneratedBackwardFor_")


def backward_of(cls: type | None) -> Callable[..., Any] | None:
    """The function that a Function's backward is; of one made of ``register_autograd`` what was registered. None where nobody knows."""
    found = getattr(cls, "backward", None)
    if cls is not None and getattr(cls, "vjp", None) is not SingleLevelFunction.vjp:
        found = cls.vjp
    if not is_registered_autograd(cls):
        return found
    variables = inspect.getclosurevars(found).nonlocals if inspect.isfunction(found) else {}
    return getattr(variables.get("info"), "_backward_fn", None)  # of an operator with lists it stands deeper: nobody knows


def has_own_jvp(cls: type) -> bool:
    """Whether a Function says itself how tangents go through it; the base class has a jvp that refuses."""
    return getattr(cls, "jvp", None) is not SingleLevelFunction.jvp


def cpp_function_of(node: Any) -> str:
    """The name of the autograd::Function of C++ that a node of an autograd graph is the backward of; "" for any other, and for torch's own."""
    name = node.name()
    if not name.startswith("torch::autograd::CppNode<"):
        return ""
    inner = name.partition("<")[2].removesuffix(">")
    return "" if inner.startswith(("torch::", "at::", "c10::", "c10d::")) else inner


def is_module_hook(cls: type) -> bool:
    """Whether a Function is the one by which modules call their full backward hooks: an identity."""
    from torch.nn.modules._functions import BackwardHookFunction

    return cls is BackwardHookFunction


def running_node() -> Any:
    """The node of the autograd graph whose backward, or whose hook, runs in this thread; None outside a backward."""
    return torch._C._current_autograd_node()


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_task() -> int:
    """The number of the engine's run that this thread is in; -1 outside a backward."""
    return int(torch._C._current_graph_task_id())


def after_backward(function: Callable[[], None]) -> None:
    """Call it when the engine's run that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


#: What torch.no_grad() and enable_grad() call; a torch function mode sees it. torch.set_grad_enabled is a class whose instances
#: restore: 0.5 us against 0.06.
set_grad_enabled = torch._C._set_grad_enabled


#: The engine behind torch.autograd.grad, without the checks that the native library does not need: 11 us against 22.
run_backward = torch.autograd.Variable._execution_engine.run_backward


#: Whether autocast is on for any device, in one call.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


#: A tensor without the wrapper of a transform of torch.func that has ended; any other as it is. Function.apply asks it of each argument.
unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def is_higher_order(func: Any) -> bool:
    """Whether a function mode was called for torch.cond, while_loop, scan and the like."""
    from torch._ops import HigherOrderOperator

    return isinstance(func, HigherOrderOperator)
