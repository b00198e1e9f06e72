"""load(): a saved model as torch.nn.Module, trained by torch's optimizers and run by stock onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from exporter.files.read import check_complete, open_model
from exporter.files.trust import Gate
from exporter.module.bound import Bound
from exporter.runtime.tensors import to_tensor
from symbolics.errors import FormatError
from symbolics.node.metadata import StateEntry, read_state
from symbolics.node.names import STEP_KEY

__all__ = ["OnnxModule", "load"]


def load(model: Any, *, allow: Any = (), device: torch.device | str | None = None, providers: Sequence[Any] | None = None) -> OnnxModule:
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

    Returns:
        The module. Its parameters and buffers have the names of the model that was exported (of a file of another
        exporter, those of its float initializers of rank 1 or more, all trainable), so state_dict() goes back into it.

    Raises:
        FormatError: The file is damaged, cut off, or its external data is missing or outside its folder.
        TrustError: The file names a class that is not allowed.
        RunError: onnxruntime or the native library is not there.
    """
    return OnnxModule(model, allow=allow, device=device, providers=providers)


class OnnxModule(torch.nn.Module):
    """An ONNX model as a module; made by `load`.

    In train() mode it behaves as the file says: a file that was exported in training mode drops out (a new mask each
    step, from torch's generator) and updates the running statistics of BatchNorm. eval() takes both back, and runs the
    forward alone unless an input needs a gradient; so does torch.no_grad(). Parameters are read at every forward.

    forward takes the tensors of the exported model's arguments in their order, in containers or not, and keyword
    arguments by the names of the graph's inputs. It returns what the exported model returned, where the file says
    what that was; otherwise the one output or a tuple.
    """

    _onnx: Bound

    def __init__(
        self, model: Any, *, allow: Any = (), device: torch.device | str | None = None, providers: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        place = torch.device("cpu" if device is None else device)
        gate = Gate(allow)
        opened = open_model(model)
        check_complete(opened)
        if STEP_KEY in opened.metadata_props:
            raise FormatError(
                "the file is a training step, which has no parameters of its own: run it with exporter.inference_session, or load the forward file"
            )
        entries = _entries(opened)
        found = _register(self, opened.graph, entries, place)
        if providers is None and place.type == "cuda":
            providers = [("CUDAExecutionProvider", {"device_id": place.index or 0}), "CPUExecutionProvider"]
        object.__setattr__(self, "_onnx", Bound(opened, entries, found, allow, gate, place, providers))
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
            RunError: An input or parameter has another type, shape or device than the file says.
            UnsupportedOperatorError: A gradient is needed through an operator that has none.
        """
        return self._onnx.structured(self._onnx.run(self, args, kwargs))

    def extra_repr(self) -> str:
        """The file and the inputs."""
        inputs = ", ".join(
            f"{value.name}: {value.dtype}{list(value.shape) if value.shape is not None else ''}" for value in self._onnx.inputs.values()
        )
        return f"{self._onnx.source}: {inputs}"


class _Part(torch.nn.Module):
    """A module of the exported model, of which only the parameters and buffers are left."""


# -------------------------------------------------------------------------------------------------------- the state


def _entries(model: ir.Model) -> dict[str, StateEntry]:
    """The names of the module's state; those of a foreign model are its float initializers of rank 1 or more."""
    initializers = model.graph.initializers
    entries = read_state(model.metadata_props)
    if entries is not None:
        missing = [entry.initializer for entry in entries.values() if entry.initializer not in initializers]
        if missing:
            raise FormatError(
                f"the file lacks the initializers {missing[:5]} that its metadata names: something removed them, or it is damaged"
            )
        return entries
    floats = [(name, value.const_value) for name, value in initializers.items() if value.const_value is not None]
    return {
        name: StateEntry(name, "parameter", True, True)
        for name, array in floats
        if array.dtype.is_floating_point() and len(array.shape) >= 1
    }


def _register(root: torch.nn.Module, graph: ir.Graph, entries: dict[str, StateEntry], device: torch.device) -> dict[str, str]:
    """Put the state into modules as nested as its names.

    Returns:
        initializer -> the name under which the module has it. Tied names share a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, entry in entries.items():
        value = graph.initializers[entry.initializer]
        if entry.initializer not in tensors:
            array = value.const_value
            if array is None:
                raise FormatError(f"the initializer {entry.initializer!r} has no values: the file is damaged")
            try:
                data = to_tensor(array.numpy()).to(device)
            except Exception as error:
                raise FormatError(f"the initializer {entry.initializer!r} is damaged: {error}") from error
            tensors[entry.initializer] = torch.nn.Parameter(data, requires_grad=entry.trainable) if entry.kind == "parameter" else data
            # The values belong to the module from here on: the graph keeps the shape alone.
            empty = np.broadcast_to(np.zeros((), array.dtype.numpy()), tuple(data.shape))
            value.const_value = ir.Tensor(empty, dtype=array.dtype, name=value.name)
            value.type, value.shape = ir.TensorType(array.dtype), ir.Shape(data.shape)
        *path, last = name.split(".")
        if any(".".join([*path[: i + 1]]) in entries for i in range(len(path))):
            path, last = [], name.replace(".", "_")  # "w" and "w.x": no module can have both
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                setattr(owner, part, _Part())
            owner = getattr(owner, part)
        if entry.kind == "parameter":
            setattr(owner, last, tensors[entry.initializer])
        else:
            owner.register_buffer(last, tensors[entry.initializer], persistent=entry.persistent)
        names.setdefault(entry.initializer, ".".join([*path, last]))
    return names
