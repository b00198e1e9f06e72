"""A step, as each side of `verify` makes it: tensors out of a result, and cotangents back through them."""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from exporter.forward.case import Case
from exporter.train_mode.reads import OWN
from exporter.verification.memory import HighWater
from exporter.verification.relink import cast_attributes, relink
from symbolics import torch_private as private
from symbolics.capture.side_effects import same_values
from symbolics.errors import ExportError
from symbolics.node.dtypes import as_real
from symbolics.node.patterns import listed
from symbolics.text import said

__all__ = [
    "backward",
    "buffers_again",
    "changed",
    "compiling_quietly",
    "copy_of",
    "entries_of_copy",
    "measured",
    "shapes_of",
    "state_of",
    "tensors_of",
]


def copy_of(model: torch.nn.Module, kind: torch.dtype | None = None) -> torch.nn.Module:
    """A copy of a model, in another float type where one is given, with the hooks on its parameters: a deep copy alone loses those."""
    scripted = {id(v): v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.jit.ScriptFunction)}
    # A scripted function has no state, and cannot be copied.
    copied = _compiled_copy(model) if isinstance(model, torch.jit.ScriptModule) else _deep_copy(model, scripted)
    if not isinstance(model, torch.jit.ScriptModule):
        relink(model, copied)
    if kind is not None:
        copied = copied.to(kind)  # before the hooks: what they hang on keeps the type that it was made with
        cast_attributes(model, copied, kind)
    parameters = dict(copied.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for hook in private.tensor_hooks(parameter):
                parameters[name].register_hook(hook)
            for hook in private.post_accumulate_hooks(parameter):
                parameters[name].register_post_accumulate_grad_hook(hook)
    return copied


def _deep_copy(model: torch.nn.Module, known: dict[int, Any]) -> torch.nn.Module:
    """A deep copy; what cannot be copied (a lock, a handle of C++, a generator) both have.

    Raises:
        ExportError: A module of the model cannot be copied.
    """
    try:
        return copy.deepcopy(model, memo=dict(known))
    except Exception:  # __deepcopy__ and __setstate__ of the model's classes may raise anything
        shared = dict(known)
    for value in [value for module in model.modules() for name, value in vars(module).items() if name not in OWN]:
        try:
            copy.deepcopy(value)
        except Exception:
            shared[id(value)] = value
    try:
        return copy.deepcopy(model, memo=shared)
    except Exception as error:
        raise ExportError(
            f"the model cannot be compared with its file: copy.deepcopy(model) raises {type(error).__name__}: {said(error)}\n"
            "  a step of the model is run on a copy, so that its parameters, buffers and attributes stay as they are\n"
            "  way out: give the class of that module a __deepcopy__, or compare by hand: model(...) beside exporter.load(file)(...)"
        ) from error


def entries_of_copy(case: Case, copied: torch.nn.Module) -> dict[str, Any]:
    """``opaque=`` and ``functions=`` of an export of a copy of the model: its modules in the places of the model's own."""
    twins = {id(module): twin for module, twin in zip(case.model.modules(), copied.modules(), strict=True)}
    entries = {"opaque": case.opaque, "functions": case.functions}
    return {name: [twins.get(id(item), item) for item in listed(given)] for name, given in entries.items()}


def _compiled_copy(model: torch.jit.ScriptModule) -> torch.nn.Module:
    """By a file: the parameters of torch's deep copy are no leaves, and their gradients go to the original."""
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    copied: torch.nn.Module = torch.jit.load(file)
    return copied


@contextlib.contextmanager
def compiling_quietly() -> Iterator[None]:
    """Where every warning is an error: torch.cond compiles its branches, and Dynamo then reads .grad of what is no leaf, as inputs here are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of what a model returned, flat."""
    return [as_real(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def shapes_of(outputs: Sequence[torch.Tensor]) -> list[list[int]]:
    """The shapes of outputs: where a file's are others than eager's, no cotangent fits, and there are no gradients to compare."""
    return [list(out.shape) for out in outputs]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's buffers and parameters, under each of their names."""
    named = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return {name: as_real(tensor.detach()).clone() for name, tensor in named if not torch.nn.parameter.is_lazy(tensor)}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that hold other values. One that is new, or of another shape, is no state to a file: what it does is judged at the export."""
    kept = {name: value for name, value in after.items() if name in before and before[name].shape == value.shape}
    return {name: value for name, value in kept.items() if not same_values(before[name], value)}


def backward(outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]) -> None:
    """Run autograd from the outputs that have a gradient; the others, and those without a cotangent, are left out.

    It gets copies: a backward may change in place what comes in (``return g.mul_(2)``), and the next step gets the same cotangents.
    """
    roots = [(out, g.to(out.dtype, copy=True)) for out, g in zip(outputs, cotangents, strict=True) if g is not None and out.requires_grad]
    if roots:
        torch.autograd.backward([out for out, _ in roots], [g for _, g in roots])


def buffers_again(module: torch.nn.Module, names: Collection[str]) -> Callable[[], None]:
    """What gives buffers the values that they have now: each timed step begins as the first one, so that a cache does not run over.

    A buffer through which gradients flow stays: the step that reads it fails, and that is to be said.
    """
    kept = {name: value.detach().clone() for name, value in module.named_buffers() if name in names}

    def again() -> None:
        for name, value in kept.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            now = getattr(owner, leaf, None)
            if not isinstance(now, torch.Tensor) or now.requires_grad:
                continue
            if now.shape == value.shape:
                with torch.no_grad():
                    now.copy_(value)
            else:
                setattr(owner, leaf, value.clone())

    return again


def measured(
    step: Callable[[], Any], count: int, memory: HighWater, again: Callable[[], object] = lambda: None
) -> tuple[float, int | None]:
    """The median time of several steps, at least one, and the bytes that they take more than was resident when ``memory`` was made.

    Args:
        step: It is timed.
        count: How often.
        memory: What counts the bytes.
        again: Runs before each step, and is not timed.
    """
    memory.begin()
    times = []
    for _ in range(max(1, count)):
        again()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), memory.bytes()
