"""Hooks on gradients: what ``tensor.register_hook`` becomes, and which other hooks a file can do without.

A tensor's hook is a Python call in the backward, so it is carried as one: an identity whose backward runs the hook is a Function
like any other. It stands behind what made the tensor, and all who read the tensor read the identity, also those that read it
before the hook came: autograd runs a hook on the whole gradient of the tensor, on the way to what made it.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.gradient_ops import is_pin
from symbolics.capture.inlining import closed_over
from symbolics.capture.opaque_op import record_of
from symbolics.capture.trace.hooks import read_through
from symbolics.errors import ExportError
from symbolics.node.arguments import encode
from symbolics.node.containers import Slot, fill
from symbolics.node.names import qualified_name

__all__ = [
    "GradientHook",
    "HookedTensor",
    "arguments_of",
    "changes_nothing",
    "is_portable",
    "is_removed",
    "read_through_hooks",
    "shown_hook",
    "unhook",
    "why_not_portable",
]


class GradientHook(torch.autograd.Function):
    """An identity whose backward runs a hook, as the hook of a tensor is run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hook: Callable[..., Any], arguments: tuple[Any, ...] = (), keywords: Any = None) -> torch.Tensor:
        """The tensor as it is.

        Args:
            ctx: autograd's.
            x: The tensor.
            hook: A function that takes the gradient, and returns another one or None.
            arguments, keywords: What it takes beside, before the gradient: those of a functools.partial.
        """
        ctx.hook, ctx.arguments, ctx.keywords = hook, arguments, keywords or {}
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """What the hook returns, or the gradient where it returns None."""
        (gradient,) = gradients
        result = ctx.hook(*ctx.arguments, gradient, **ctx.keywords)
        return gradient if result is None else result, None, None, None


@dataclass
class HookedTensor:
    """A hook that was registered in a forward that is being captured, or a tensor that the forward takes a gradient with respect to.

    Attributes:
        key: Of the record of its call of `GradientHook`; None for a tensor that is pinned by ``pythonop::variable``.
        tensor: The tensor, from then on.
        value: What stood for the tensor in TorchScript's trace when the hook came, None under torch.export.
        result: What the call returned: what stands for the tensor to its readers.
        handle: What removes the hook, None for one that was there before the export.
    """

    key: str | None
    tensor: torch.Tensor
    value: Any
    result: torch.Tensor
    handle: Any

    @property
    def removed(self) -> bool:
        """Whether the model itself took the hook away again."""
        return self.handle is not None and is_removed(self.handle)


# -------------------------------------------------------------------------------------------------- what a hook is


def is_removed(handle: Any) -> bool:
    """Whether a hook was taken away again by its handle."""
    return handle.id not in (handle.hooks_dict_ref() or {})


def shown_hook(hook: Any) -> str:
    """A hook's name, for messages."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return qualified_name(hook) if hasattr(hook, "__qualname__") else f"an object of type {qualified_name(type(hook))}"


def arguments_of(hook: Any) -> tuple[Any, ...]:
    """The arguments of `GradientHook` after the tensor."""
    return (hook.func, tuple(hook.args), dict(hook.keywords)) if type(hook) is functools.partial else (hook,)


def why_not_portable(hook: Any, names: Callable[[Any], str | None]) -> ExportError | None:
    """The error of a hook that a file cannot name, None for one that it can."""
    try:
        encode(fill(arguments_of(hook), lambda leaf: Slot(0) if isinstance(leaf, torch.Tensor) else leaf), names)
    except ExportError as error:
        return error
    return None


def is_portable(hook: Any, names: Callable[[Any], str | None]) -> bool:
    """Whether a file can name the hook."""
    return why_not_portable(hook, names) is None


def changes_nothing(hook: Any) -> bool:
    """Whether it is plain to see that a hook leaves gradients alone: each of its returns is None, and nothing in it changes a value in place.

    A hook whose code cannot be read (a method of C, an object) may do anything.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType):
        return False
    if function.__module__ == "torch.autograd.graph":  # register_multi_grad_hook: what the user's function returns is dropped
        inner = dict(closed_over(function)).get("fn")
        return isinstance(inner, types.FunctionType) and not _changes(inner.__code__)
    return _returns_none(function.__code__) and not _changes(function.__code__)


def _returns_none(code: types.CodeType) -> bool:
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_VALUE":
            if before is None or before.opname not in ("LOAD_CONST", "LOAD_COMMON_CONSTANT") or before.argval is not None:
                return False
        elif instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        before = instruction
    return not code.co_flags & (0x20 | 0x80 | 0x200)  # generators and coroutines


def _changes(code: types.CodeType) -> bool:
    """Whether code changes a tensor in place, by its looks; the names of keywords are constants of it (``torch.mul(g, 2, out=g)``)."""
    return any(map(_changes_by, dis.get_instructions(code))) or any(isinstance(each, tuple) and "out" in each for each in code.co_consts)


def _changes_by(instruction: dis.Instruction) -> bool:
    """Whether an instruction changes a tensor in place, by its looks: ``g *= 2``, ``g[0] = 1``, ``g.mul_(2)``, ``p.grad = g``, ``g.data``."""
    name = instruction.argval if isinstance(instruction.argval, str) else ""
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr.endswith("=")
    if instruction.opname in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"):
        return True
    if instruction.opname == "STORE_ATTR":
        return name in ("grad", "data")
    if instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST":
        return (name.endswith("_") and not name.endswith("__")) or name in ("data", "out", "exec", "eval", "setattr")
    return False


# -------------------------------------------------------------------------------------------- readers read the hooks


def unhook(hooked: Iterable[HookedTensor]) -> None:
    """End a capture's forward: forget the hooks that were removed, and let the readers of TorchScript's trace read the others."""
    by_value: dict[str, list[HookedTensor]] = {}
    for each in hooked:
        if each.key is not None:
            record_of(each.key).removed = each.removed
        if each.value is not None and not each.removed:
            by_value.setdefault(each.value.debugName(), []).append(each)
    for group in by_value.values():  # a gradient with respect to a tensor is what its hooks make of it: what pins it stands before them
        group.sort(key=lambda each: each.key is None)
        read_through(group[0].value, [each.result for each in group], [each.tensor for each in group])


def read_through_hooks(program: Any) -> None:
    """Let the readers of each hooked value of an ExportedProgram read what its hooks return; hooks that were removed go.

    Args:
        program: The program about to be translated, in which all changes in place are gone: a value is a value.
    """
    graph = program.graph
    if any(node.target in (torch.ops.pythonop.variable.default, torch.ops.pythonop.call.default) for node in graph.nodes):
        _merge_given_back(program)
    hooks: dict[Any, list[Any]] = {}
    pins: dict[Any, list[Any]] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.pythonop.variable.default and is_pin(node.args[1]):
            pins.setdefault(node.args[0], []).append(node)
        if node.target is not torch.ops.pythonop.call.default:
            continue
        record = record_of(node.args[2])
        if record.call.name != qualified_name(GradientHook):
            continue
        if record.removed:
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
        else:
            hooks.setdefault(node.args[0][0], []).append(node)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for value in {**hooks, **pins}:
        place = value if value.op != "placeholder" else inputs[-1]
        below, inside = value, set()
        for pin in pins.get(value, ()):  # a gradient with respect to a tensor is what its hooks make of it: it is pinned before them
            place.append(pin)
            pin.args = (below, *pin.args[1:])
            place = below = pin
            inside.add(pin)
        for call in reversed(hooks.get(value, ())):  # the hook that came first runs first: it stands nearest to the readers
            place.append(call)
            with graph.inserting_after(call):
                place = graph.call_function(operator.getitem, (call, 1))
            place.meta["val"] = call.meta["val"][1]
            call.args = ([below], *call.args[1:])
            below = place
            inside |= {call, place}
        _read_instead(program, value, below, inside)


def _read_instead(program: Any, value: Any, other: Any, unless: Collection[Any] = ()) -> None:
    """Let all who read a node of an ExportedProgram read another one."""
    value.replace_all_uses_with(other, delete_user_cb=lambda user: user not in unless)
    for spec in program.graph_signature.output_specs:
        if spec.arg.name == value.name:
            spec.arg.name = other.name


def _merge_given_back(program: Any) -> None:
    """What gives its argument back (``x.type_as(x)``) is a node of its own, and for the model the same tensor: all read the argument."""
    _, mode = private.fake_mode()
    for node in list(program.graph.nodes):
        if not private.is_composite(node.target):
            continue
        try:
            examples = {each: _example(each.meta.get("val"), mode) for each in node.all_input_nodes}
            given = {id(value): each for each, value in examples.items() if isinstance(value, torch.Tensor)}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), examples.__getitem__)
            result = node.target(*args, **kwargs)
        except Exception:
            continue
        parts = [(node, result)]
        if isinstance(result, (list, tuple)):
            parts = [(user, result[user.args[1]]) for user in node.users if user.target is operator.getitem]
        for part, value in parts:
            # As text: to ask whether open sizes are equal would settle that.
            if id(value) in given and str(part.meta["val"].shape) == str(given[id(value)].meta["val"].shape):
                _read_instead(program, part, given[id(value)])
                program.graph.erase_node(part)


def _example(value: Any, mode: Any) -> Any:
    """A value of the program with the sizes of the example: to compute with the program's own would settle open ones."""
    if isinstance(value, torch.Tensor):
        shape, strides = ([private.example_size(size) for size in sizes] for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return private.example_size(value) if isinstance(value, torch.SymInt) else value
