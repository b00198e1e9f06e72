"""What modules, tensors and optimizers hold beside their values: hooks, buffers, parametrizations."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "activation_of_torch",
    "blank_module",
    "buffers_assigned_unseen",
    "changes_its_statistics",
    "forward_hooks_inside",
    "forward_or_backward_hooks",
    "holding",
    "is_base_attribute",
    "module_backward_hooks",
    "optimizer_hooks",
    "own_attributes",
    "own_step",
    "parametrization_cache",
    "parts_of",
    "post_accumulate_hooks",
    "run_forward_pre_hooks",
    "tensor_hooks",
    "wrapped_module",
]


def wrapped_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """What torch.compile or DataParallel made a module of that takes whatever arguments there are; None of any other."""
    if isinstance(model, torch.nn.DataParallel):
        return model.module
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # there is none before it is loaded
    kind, inner = getattr(compiled, "OptimizedModule", ()), getattr(model, "_orig_mod", None)
    return inner if isinstance(model, kind) and isinstance(inner, torch.nn.Module) else None


def parametrization_cache() -> dict[Any, Any]:
    """What torch.nn.utils.parametrize.cached() keeps: a run fills it, and the next one calls nothing."""
    import torch.nn.utils.parametrize

    return torch.nn.utils.parametrize._cache


@contextlib.contextmanager
def buffers_assigned_unseen() -> Iterator[None]:
    """While the block runs, torch.export does not note what a forward assigns to buffers of the outermost module.

    It maps them to graph values at the assignment: what is written into them afterwards is lost, and another shape fails.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__name__", "") == "_map_assigned_buffer_to_proxy"}
    for key in own:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(own)


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, in the order in which they run."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that run once a tensor's .grad is there."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def run_forward_pre_hooks(module: torch.nn.Module) -> None:
    """Run a module's own hooks before forward, of no arguments; what they return is left."""
    for number, hook in module._forward_pre_hooks.items():
        hook(module, (), *([{}] if number in module._forward_pre_hooks_with_kwargs else []))


@contextlib.contextmanager
def forward_hooks_inside(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """While the block runs, a call of the module runs none of its own forward hooks, which torch calls outside of `forward`.

    Yields:
        Takes the module's forward and the arguments of a call, and makes the call with the hooks around it.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks

    def ended(number: int, hook: Callable[..., Any], *call: Any) -> Any:
        args, kwargs, result = call
        return hook(module, args, kwargs, result) if number in module._forward_hooks_with_kwargs else hook(module, args, result)

    def called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for number, hook in list(before.items()):
            if number in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            elif (given := hook(module, args)) is not None:
                args = given if isinstance(given, tuple) else (given,)
        waiting = list(after.items())
        try:
            result = forward(*args, **kwargs)
            while waiting:
                given = ended(*waiting.pop(0), args, kwargs, result)
                result = result if given is None else given
            return result
        except Exception:
            for number, hook in waiting:
                if number in module._forward_hooks_always_called:
                    with contextlib.suppress(Exception):
                        ended(number, hook, args, kwargs, None)
            raise

    if before or after:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield called
    finally:
        module._forward_pre_hooks, module._forward_hooks = before, after


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


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[tuple[str, Callable[..., Any]]]:
    """What runs around an optimizer's step(), hooks of all optimizers included, each with what registers it."""
    everywhere = importlib.import_module("torch.optim.optimizer")  # no stub has it
    return [
        *(("register_step_pre_hook", hook) for hook in optimizer._optimizer_step_pre_hooks.values()),
        *(("register_optimizer_step_pre_hook", hook) for hook in everywhere._global_optimizer_pre_hooks.values()),
        *(("register_step_post_hook", hook) for hook in optimizer._optimizer_step_post_hooks.values()),
        *(("register_optimizer_step_post_hook", hook) for hook in everywhere._global_optimizer_post_hooks.values()),
    ]


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The function that somebody put in the place of an optimizer's step(); None where it is that of its class.

    A scheduler of learning rates puts one there, too, which only notes that it was called, and keeps what it found as ``__wrapped__``.
    """
    step: Any = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    step = getattr(step, "__func__", step)
    return None if step is type(optimizer).step else step


@contextlib.contextmanager
def holding(module: torch.nn.Module, path: str, value: Any) -> Iterator[None]:
    """While this is open, a module or one inside it holds another tensor as the parameter or buffer of this name; no hook runs."""
    owner, _, name = path.rpartition(".")
    inner = module.get_submodule(owner)
    place: dict[str, Any] = inner._parameters if name in inner._parameters else inner._buffers
    before, place[name] = place[name], value
    try:
        yield
    finally:
        place[name] = before


#: What every module holds in its ``__dict__``.
_BASE = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_base_attribute(name: str) -> bool:
    """Whether torch.nn.Module itself keeps something under a name in each module's ``__dict__``."""
    return name in _BASE or name in ("_compiled_call_impl", "_is_hf_initialized")


def parts_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The parameters, buffers and submodules that a module itself has, None among them (the live dicts)."""
    return module._parameters, module._buffers, module._modules


def forward_or_backward_hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks of a module's own that run around its forward or backward."""
    return [hook for name in _HOOKS for hook in vars(module)[name].values()]


def blank_module(cls: type[torch.nn.Module]) -> torch.nn.Module:
    """A module of a class, with nothing in it: none of the class's own code runs.

    Raises:
        TypeError: The class has a base that cannot be made so.
    """
    module: torch.nn.Module = object.__new__(cls)
    vars(module).update(vars(torch.nn.Module()))
    return module


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module has. Torch's recurrent layers make some of theirs of their weights: those are as if made now."""
    found = {key: value for key, value in vars(module).items() if not is_base_attribute(key)}
    if isinstance(module, torch.nn.RNNBase):
        parameters, names = module._parameters, module._flat_weights_names
        found |= {"_flat_weights": [parameters.get(name) for name in names], "_flat_weight_refs": [None] * len(names)}
    return found


def changes_its_statistics(module: torch.nn.Module) -> bool:
    """Whether a module is a normalization of torch's own that moves its running statistics when it is called."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats


def activation_of_torch(module: str, name: str) -> Callable[..., Any] | None:
    """A function of torch that a layer may have as its activation, by ``__module__`` and name: it computes on tensors, and does nothing else."""
    places = {"torch.nn.functional": torch.nn.functional, "torch._C._nn": torch._C._nn}
    found = vars(places[module]).get(name) if module in places else None
    if module == "torch" and name in ("relu", "tanh", "sigmoid", "softmax", "selu", "celu", "relu_"):
        found = vars(torch)[name]
    return found if callable(found) and not isinstance(found, type) else None
