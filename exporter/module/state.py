"""The state of a file as parameters and buffers of nested modules, and where a run finds it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from exporter.files.tensors import own_array
from exporter.files.weights import foreign_state
from exporter.gradient_graph.frozen import frozen_arguments
from exporter.runtime.tensors import to_tensor
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.limits import MAX_DEPTH
from symbolics.node.metadata import StateEntry, state_of
from symbolics.node.names import STATE_KEY
from symbolics.text import shown

__all__ = ["Part", "entries_of", "leave_empty", "look_up", "register", "with_flags"]


#: What calls of a hook would see of a part: nothing.
_NEVER = (
    "{path!r} of a loaded file never runs: the file is one call, of the loaded module, and {what} here would never be called.\n"
    "  way out: a hook of the loaded module or of a tensor (Tensor.register_hook); to see inside, return the value from forward and export again"
)


class Part(torch.nn.Module):
    """A module of the exported model, of which only the parameters and buffers are left.

    The file's forward is one call, in which no part runs. What was put around a part (PEFT's LoRA of a parameter) is called for each tensor below
    it, and may change what that is while the part itself answers.

    Args:
        path: Its name among the modules of the file.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path_in_file = path

    def forward(self, *path: Any) -> torch.Tensor:
        """The parameter or buffer at the end of a path from here.

        Raises:
            RunError: This is no path: somebody calls the part as if it were the layer.
        """
        if not path or not all(isinstance(name, str) for name in path):
            raise RunError(
                f"{shown(self._path_in_file)!r} of a loaded file cannot be called: it has parameters and buffers, and no forward of its own.\n"
                "  way out: call the loaded module, or export that module by itself"
            )
        return look_up(self, *path)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Only of what makes a tensor of the part (torch.nn.utils.prune, its older weight_norm and spectral_norm). Raises RunError for others."""
        if not any(hasattr(hook, name) for name in ("apply_mask", "compute_weight")):
            raise self._never("a forward pre-hook")
        return super().register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        """Raises RunError: nothing would call it."""
        raise self._never("a forward hook")

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Raises RunError: nothing would call it."""
        raise self._never("a backward hook")

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Raises RunError: nothing would call it."""
        raise self._never("a backward hook")

    def register_backward_hook(self, hook: Any) -> Any:
        """Raises RunError: nothing would call it."""
        raise self._never("a backward hook")

    def _never(self, what: str) -> RunError:
        return RunError(_NEVER.format(path=shown(self._path_in_file), what=what))


def look_up(module: torch.nn.Module, *path: str) -> torch.Tensor:
    """The parameter or buffer at the end of a path, as it counts now: replaced, parametrized, or adapted by what was put around a part."""
    owner: Any = module
    for name in path[:-1]:
        owner = owner._modules.get(name)  # without nn.Module.__getattr__, 1 us a step
        if owner is None:
            return _asked(module, path)
    found = owner._parameters.get(path[-1])
    if found is None:
        found = owner._buffers.get(path[-1])
    return _asked(module, path) if found is None else found


def _asked(module: Any, path: tuple[str, ...]) -> torch.Tensor:
    """The same, step by step: a parametrized tensor, or what the part has that a module on the way was put around."""
    for place, name in enumerate(path):
        if place and not isinstance(module, Part) and not _has(module, name) and any(isinstance(each, Part) for each in module.modules()):
            return module(*path[place:])
        if isinstance(module, Part) and name in module.__dict__:
            # What makes tensors of a part before its forward, which is never called: torch.nn.utils.prune, its older weight_norm and spectral_norm.
            private.run_forward_pre_hooks(module)
        known = name in module.__dict__ or hasattr(type(module), name) or _has(module, name)
        module = getattr(module, name) if known else getattr(module, name, None)  # what is put around a part may forward to it
        if module is None:
            raise _gone(path)
    return module


def _gone(path: tuple[str, ...]) -> RunError:
    return RunError(
        f"{shown('.'.join(path))!r} is gone: the file computes with it, and the module has no such tensor any more.\n"
        "  way out: put a tensor of its shape in its place (zeros, for a bias), or export the model without it"
    )


def _has(module: torch.nn.Module, name: str) -> bool:
    return any(own.get(name) is not None for own in (module._modules, module._parameters, module._buffers))


def entries_of(model: ir.Model) -> dict[str, StateEntry]:
    """The names of the module's state; of a foreign model, running statistics are the buffers."""
    entries = state_of(model)
    if entries is not None:
        return entries
    return {name: StateEntry(name, "parameter" if trained else "buffer", trained, True) for name, trained in foreign_state(model).items()}


def with_flags(model: ir.Model, entries: dict[str, StateEntry], wants_grad: Mapping[str, bool]) -> dict[str, StateEntry]:
    """Entries that say which parameters are frozen now.

    Args:
        model: The file.
        entries: Its own.
        wants_grad: The initializer of a parameter -> its ``requires_grad`` now. One that a Function takes and has no gradient for stays frozen.
    """
    refused = frozen_arguments(model, [name for name, wants in wants_grad.items() if wants])
    return {
        key: replace(entry, trainable=wants_grad.get(entry.initializer, entry.trainable) and entry.initializer not in refused)
        if entry.kind == "parameter"
        else entry
        for key, entry in entries.items()
    }


def register(root: torch.nn.Module, graph: ir.Graph, entries: dict[str, StateEntry], device: torch.device) -> dict[str, list[str]]:
    """Put the state into modules as nested as its names.

    Returns:
        initializer -> the names under which the module has it. Tied names share a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, list[str]] = {}
    parameters: dict[str, StateEntry] = {}
    for name, entry in entries.items():
        if entry.kind == "parameter" and parameters.setdefault(entry.initializer, entry).trainable != entry.trainable:
            raise FormatError.damaged(
                f"metadata {STATE_KEY}", f"{shown(name)!r} is trainable under one of its names and frozen under another"
            )
    for name, entry in entries.items():
        if entry.initializer not in tensors:
            tensors[entry.initializer] = _tensor(graph.initializers[entry.initializer], parameters.get(entry.initializer), device)
        owner, path, last = _place(root, name, entries)
        if entry.kind == "parameter":
            setattr(owner, last, tensors[entry.initializer])
        else:
            owner.register_buffer(last, tensors[entry.initializer], persistent=entry.persistent)
        names.setdefault(entry.initializer, []).append(".".join([*path, last]))
    return names


def _tensor(value: ir.Value, parameter: StateEntry | None, device: torch.device) -> torch.Tensor:
    """The value of an initializer, which belongs to the module from here on: the graph keeps the shape alone."""
    array = value.const_value
    if array is None:
        raise FormatError(f"the initializer {shown(value.name or '')!r} has no values: the file is damaged")
    try:
        data = to_tensor(own_array(array), share=True).to(device)
        found = data if parameter is None else torch.nn.Parameter(data, requires_grad=parameter.trainable)
    except Exception as error:
        raise FormatError(f"the initializer {shown(value.name or '')!r} is damaged: {error}") from error
    leave_empty(value, array.dtype, tuple(data.shape))
    return found


def leave_empty(value: ir.Value, kind: ir.DataType, shape: tuple[int, ...]) -> None:
    """Let an initializer have type and shape alone: zeros that take no memory stand for its values."""
    value.const_value = ir.Tensor(np.broadcast_to(np.zeros((), kind.numpy()), shape), dtype=kind, name=value.name)
    value.type, value.shape = ir.TensorType(kind), ir.Shape(shape)


def _place(root: torch.nn.Module, name: str, entries: Container[str]) -> tuple[torch.nn.Module, list[str], str]:
    """Where a name of the state goes: the module that has it, the way there, its name in that module.

    Raises:
        FormatError: A module cannot have the name: a part of it is empty, taken, or an attribute of every module.
    """
    *path, last = name.split(".")
    if len(path) > MAX_DEPTH:
        raise FormatError.damaged(f"metadata {STATE_KEY}", f"the name {shown(name)!r} has more than {MAX_DEPTH} dots")
    if any(".".join(path[: i + 1]) in entries for i in range(len(path))):
        path, last = [], name.replace(".", "_")  # "w" and "w.x": no module can have both
    owner = root
    for place, part in enumerate(path):
        child = owner._modules.get(part)
        if not isinstance(child, Part):
            _check_free(owner, part, name)
            child = owner._modules[part] = Part(".".join(path[: place + 1]))
        owner = child
    _check_free(owner, last, name)
    return owner, path, last


def _check_free(owner: torch.nn.Module, part: str, name: str) -> None:
    if not part or hasattr(owner, part):
        why = f"{shown(part)!r} is an attribute that it has already" if part else "a part of it is empty"
        raise FormatError(
            f"the parameter or buffer {shown(name)!r} of the file cannot be one of a torch.nn.Module: {why}. "
            "The file is damaged, or give the module another name before the export"
        )
