"""Runs a model's own forward, and the hooks around it, with every torch call of it seen (`symbolics.capture.torch_calls`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.branches import warn_of_caught
from symbolics.capture.buffers import Buffers
from symbolics.capture.flags import Flags
from symbolics.capture.gradient_ops import Taken
from symbolics.capture.held import Held
from symbolics.capture.own_call import called_as_a_whole, plainly_called
from symbolics.capture.recorder import active_recorder
from symbolics.capture.told import Unseen
from symbolics.capture.torch_calls import TorchCalls, holds_tensor, watch_reads
from symbolics.errors import ExportError
from symbolics.node.result import write_structure

__all__ = ["differentiable_inputs", "marking"]


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
        trace = recorder.capture.trace if private.is_tracing() else None
        recorder.capture.evaluated = not model.training
        recorder.capture.refused.clear()
        recorder.capture.caught.errors.clear()
        recorder.capture.taken = Taken(given=[leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
        buffers = Buffers(model)
        if trace is not None:
            trace.begin(buffers)
        try:
            recorder.capture.flags, recorder.capture.held = Flags(torch.ops.pythonop.stop_gradient), held
            held.begin()
            # Inside, a model that asks for its own forward has the one that it has in eager mode.
            with TorchCalls(recorder.capture.flags, held), private.buffers_assigned_unseen(), _forward_of(model, own):
                result = held.known(as_called(functools.partial(hooked, forward), *args, **kwargs))
            Unseen.check_returned(result)
        except ExportError:
            refused.append(True)
            raise
        recorder.end_forward()
        warn_of_caught(recorder)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        recorder.capture.passed = {
            name
            for name, p in parameters.items()
            if not p.requires_grad or any(private.shares_memory(p, each) for each in recorder.capture.hidden)
        }
        if trace is None:
            result = buffers.write_assigned(result)
        recorder.capture.outputs = write_structure(result, lambda leaf: isinstance(leaf, torch.Tensor))
        recorder.capture.results = _types_of(result)
        watch_reads(recorder, "the model's return", (result,), {})
        if trace is None:
            return result
        written = trace.end(buffers, result)
        recorder.capture.missed |= written.keys() & parameters.keys() - recorder.capture.passed
        written = {name: value for name, value in written.items() if name not in recorder.capture.missed}
        recorder.capture.written = list(written)
        return result, tuple(written.values()), trace.kept()

    if keywords is not None:
        del marked.__wrapped__  # torch.jit must not bind by the signature of forward, and make inputs of its defaults
    own = model.__dict__.get("forward")
    try:
        with (
            called_as_a_whole(model) if keywords is None else contextlib.nullcontext(),
            plainly_called(model, only=keywords is not None) as as_called,
            _forward_of(model, marked),
            private.forward_hooks_inside(model) as hooked,
        ):
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
        shapes = [(t.dtype, [*t.shape, *[2] * t.is_complex()]) for t in tensors if t.layout == torch.strided]  # pairs of floats in a file
        return [(dtype, [d if type(d) is int else None for d in shape]) for dtype, shape in shapes]


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
