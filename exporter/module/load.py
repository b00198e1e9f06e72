"""load(): a saved model as torch.nn.Module, trained by torch's optimizers and run by stock onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from exporter.files.inspect import inspect_model
from exporter.files.read import check_complete, open_model
from exporter.files.summary import as_html, signature, summary_of
from exporter.files.trust import Gate
from exporter.files.weights import foreign_state, lift_weights
from exporter.gradient_graph.recompute import Recompute, checked
from exporter.module.bound import Bound
from exporter.runtime.tensors import to_tensor
from symbolics.errors import FormatError
from symbolics.node.limits import MAX_DEPTH
from symbolics.node.metadata import StateEntry, state_of
from symbolics.node.names import STATE_KEY, STEP_KEY
from symbolics.text import shown

__all__ = ["OnnxModule", "load"]


def load(
    model: Any,
    *,
    allow: Any = (),
    device: torch.device | str | None = None,
    providers: Sequence[Any] | None = None,
    recompute: Recompute = None,
) -> OnnxModule:
    """A saved model as a torch.nn.Module: its forward runs in onnxruntime, its backward runs the gradient graph.

    ::

        module = exporter.load("model.onnx", allow=["mypkg.ops:*"])
        optimizer = torch.optim.AdamW(module.parameters())
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a Program: a forward file, or a training file of
            `build_gradient_graph`.
        allow: Classes and patterns that the file may name; see `exporter.files.trust.Gate`.
        device: Where parameters and buffers are. Default: the CPU.
        providers: As onnxruntime.InferenceSession takes them; default: the CPU's, or CUDA's for a CUDA device.
        recompute: How much the forward may keep for the backward. None: all that the backward reads. "auto": results of products,
            convolutions, recurrences and reductions; elementwise chains, normalizations and views between them are computed again, to
            the same bits. An int: at most so many bytes, of inputs with the shapes of the first call; products are computed again,
            too, where it takes that. Calls of Functions and random draws never run twice.

    Returns:
        The module. Its parameters and buffers have the names of the model that was exported (of a file of another
        exporter, those of its float initializers of rank 1 or more, all trainable), so state_dict() goes back into it.

    Raises:
        FormatError: The file is damaged, cut off, or its external data is missing or outside its folder.
        TrustError: The file names a class that is not allowed.
        RunError: onnxruntime or the native library is not there.
        ArgumentError: recompute is none of these.
    """
    return OnnxModule(model, allow=allow, device=device, providers=providers, recompute=recompute)


class OnnxModule(torch.nn.Module):
    """An ONNX model as a module; made by `load`.

    In train() mode it behaves as the file says: a file that was exported in training mode drops out (a new mask each
    step, from torch's generator), updates the running statistics of BatchNorm, and every other buffer that forward changed. eval() takes
    dropout and BatchNorm back, leaves buffers alone, and runs the forward alone unless an input needs a gradient; so does torch.no_grad().
    Parameters are read at every forward.

    forward takes the tensors of the exported model's arguments in their order, in containers or not, and keyword
    arguments by the names of the graph's inputs. It returns what the exported model returned, where the file says
    what that was; otherwise the one output or a tuple.
    """

    _onnx: Bound

    def __init__(
        self,
        model: Any,
        *,
        allow: Any = (),
        device: torch.device | str | None = None,
        providers: Sequence[Any] | None = None,
        recompute: Recompute = None,
    ) -> None:
        super().__init__()
        again = checked(recompute)
        place = torch.device("cpu" if device is None else device)
        gate = Gate(allow)
        opened = open_model(model)
        lift_weights(opened)
        check_complete(opened)
        if STEP_KEY in opened.metadata_props:
            raise FormatError(
                "the file is a training step, which has no parameters of its own: run it with exporter.inference_session, or load the forward file"
            )
        object.__setattr__(self, "_onnx", None)  # no parameter of a file may take the name
        entries = _entries(opened)
        found = _register(self, opened.graph, entries, place)
        if providers is None and place.type == "cuda":
            providers = [("CUDAExecutionProvider", {"device_id": place.index or 0}), "CPUExecutionProvider"]
        object.__setattr__(self, "_onnx", Bound(opened, entries, found, allow, gate, place, providers, again))
        if isinstance(model, (str, os.PathLike)):
            self._onnx.source = str(model)
        self._onnx.plans.plan(False, frozenset())  # a class that is missing is told now

    def flat(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """As calling the module, without hooks and without the structure: the outputs of the graph in their order."""
        return self._onnx.run(self, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            TypeError: Arguments do not match the inputs of the graph.
            RunError: An input or parameter has another type, shape or device than the file says; in train() mode, the model
                changed state that the file does not carry.
            UnsupportedOperatorError: A gradient is needed through an operator that has none.
        """
        return self._onnx.structured(self._onnx.run(self, args, kwargs))

    def __repr__(self) -> str:
        """One line: the file, its inputs and outputs, how much state it has. The modules below it are names of parameters alone."""
        state = f"{len(list(self.parameters()))} parameters, {len(list(self.buffers()))} buffers"
        return f"OnnxModule({shown(self._onnx.source)}, {state}: {signature(self._onnx.plans.model.graph)})"

    def _repr_html_(self) -> str:
        """What `pythonop inspect` says first, for a notebook."""
        return as_html(summary_of(inspect_model(self._onnx.plans.model), self._onnx.source))


class _Part(torch.nn.Module):
    """A module of the exported model, of which only the parameters and buffers are left."""


# -------------------------------------------------------------------------------------------------------- the state


def _entries(model: ir.Model) -> dict[str, StateEntry]:
    """The names of the module's state; of a foreign model, running statistics are the buffers."""
    entries = state_of(model)
    if entries is not None:
        return entries
    return {name: StateEntry(name, "parameter" if trained else "buffer", trained, True) for name, trained in foreign_state(model).items()}


def _register(root: torch.nn.Module, graph: ir.Graph, entries: dict[str, StateEntry], device: torch.device) -> dict[str, str]:
    """Put the state into modules as nested as its names.

    Returns:
        initializer -> the name under which the module has it. Tied names share a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
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
        names.setdefault(entry.initializer, ".".join([*path, last]))
    return names


def _tensor(value: ir.Value, parameter: StateEntry | None, device: torch.device) -> torch.Tensor:
    """The value of an initializer, which belongs to the module from here on: the graph keeps the shape alone."""
    array = value.const_value
    if array is None:
        raise FormatError(f"the initializer {shown(value.name or '')!r} has no values: the file is damaged")
    try:
        data = to_tensor(array.numpy()).to(device)
        found = data if parameter is None else torch.nn.Parameter(data, requires_grad=parameter.trainable)
    except Exception as error:
        raise FormatError(f"the initializer {shown(value.name or '')!r} is damaged: {error}") from error
    empty = np.broadcast_to(np.zeros((), array.dtype.numpy()), tuple(data.shape))
    value.const_value = ir.Tensor(empty, dtype=array.dtype, name=value.name)
    value.type, value.shape = ir.TensorType(array.dtype), ir.Shape(data.shape)
    return found


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
    for part in path:
        child = owner._modules.get(part)
        if not isinstance(child, _Part):
            _check_free(owner, part, name)
            child = owner._modules[part] = _Part()
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
