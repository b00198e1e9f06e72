"""Parameters survive: every name of a model's state maps to an initializer of its own bits.

torch's optimizers fold parameters into other tensors, transpose them away and merge equal ones. Here they are held out
of the graph's constants while anything optimizes, and put back under their PyTorch names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from symbolics.graph.values import name_of
from symbolics.node.dtypes import as_real
from symbolics.node.metadata import StateEntry
from symbolics.quirks import cumulative_statistics

__all__ = ["ModelState", "all_buffers_named", "held_out", "names_in_trace"]


@dataclass
class ModelState:
    """The parameters and buffers of a model, as they were before an export touched them.

    Attributes:
        entries: name -> StateEntry; tied names share one initializer name.
        values: initializer name -> its tensor, a copy for buffers.
        cumulative: Initializers of running means that are averages of all batches.
    """

    entries: dict[str, StateEntry]
    values: dict[str, torch.Tensor]
    cumulative: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelState:
        """Snapshot a model. Parameters are shared, buffers are copied: a forward in training mode changes them."""
        try:
            persistent = set(model.state_dict(keep_vars=True))
        except Exception:  # a state_dict of the user's own, which wants the tensor class that `held_plainly` has taken away
            persistent = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        entries: dict[str, StateEntry] = {}
        values: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        for kind, named in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                owner = first.setdefault(id(tensor), name)
                if owner == name:
                    values[name] = tensor if kind == "parameter" else tensor.detach().clone()
                entries[name] = StateEntry(owner, kind, kind == "parameter" and tensor.requires_grad, name in persistent)  # type: ignore[arg-type]
        return cls(entries, values, tuple(dict.fromkeys(entries[name].initializer for name in cumulative_statistics(model))))

    def adopt(self, graph: ir.Graph) -> dict[str, ir.Value]:
        """Give the graph one initializer a tensor, with the snapshot's bits; tied names are joined.

        A complex tensor is one of floats, its last dimension the real and the imaginary parts, as torch's translation reads it. Where an input of
        the graph has the name, the initializer has another.

        Returns:
            initializer name -> its value, unused parameters included.
        """
        out: dict[str, ir.Value] = {}
        tied: dict[str, list[str]] = {name: [] for name in self.values}
        for name, entry in self.entries.items():
            tied[entry.initializer].append(name)
        renamed = self._renamed({name_of(value) for value in graph.inputs})
        for name, tensor in list(self.values.items()):
            found = [graph.initializers.pop(n) for n in tied[name] if n in graph.initializers]
            value = found[0] if found else ir.Value(name=name)
            for other in found[1:]:
                other.replace_all_uses_with(value, replace_graph_outputs=True)
            value.name = name = renamed.get(name, name)
            held = as_real(tensor.detach()) if tensor.is_complex() else tensor
            value.const_value = _tensor_of(held, name)
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(held.shape)
            graph.initializers[name] = value
            out[name] = value
        self.entries = {
            name: replace(entry, initializer=renamed.get(entry.initializer, entry.initializer)) for name, entry in self.entries.items()
        }
        self.values = {renamed.get(name, name): tensor for name, tensor in self.values.items()}
        self.cumulative = tuple(renamed.get(name, name) for name in self.cumulative)
        return out

    def _renamed(self, taken: set[str]) -> dict[str, str]:
        """Other names for the initializers whose names are taken."""
        renamed = {}
        for name in self.values.keys() & taken:
            number = next(number for number in itertools.count(1) if not {f"{name}_{number}"} & (self.values.keys() | taken))
            renamed[name] = f"{name}_{number}"
        return renamed


def _tensor_of(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    """A tensor of torch as one of onnx_ir; nothing is copied."""
    return tensor_adapters.TorchTensor(tensor.detach().contiguous(), name=name)


@contextlib.contextmanager
def held_out(graph: ir.Graph, values: dict[str, ir.Value]) -> Iterator[None]:
    """While the block runs, these initializers are inputs of the graph: nothing folds, merges or renames them."""
    tensors = {name: value.const_value for name, value in values.items()}
    for name, value in values.items():
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    try:
        yield
    finally:
        held = {id(value) for value in values.values()}
        kept = [value for value in graph.inputs if id(value) not in held]
        graph.inputs.clear()
        graph.inputs.extend(kept)
        for name, value in values.items():
            value.name = name
            value.const_value = tensors[name]
            graph.initializers[name] = value


def names_in_trace(entries: Iterable[str], inputs: Collection[str]) -> dict[str, str]:
    """The parameters and buffers by the names that TorchScript is to have for them: others than the inputs have."""
    return {f"{name}/state" if name in inputs else name: name for name in entries}


@contextlib.contextmanager
def all_buffers_named(model: torch.nn.Module, names: Mapping[str, str], pairs: dict[int, torch.Tensor] | None) -> Iterator[None]:
    """Let the TorchScript exporter, which asks state_dict(), see every parameter and buffer under its name of `names_in_trace`, and nothing else.

    By itself it takes buffers that are not persistent for constants without a name, and what a state_dict() of the user's own leaves out,
    renames or adds for something else. Of a complex tensor it sees the parts, as the file has them and opaque modules take them: it knows no complex numbers.

    Args:
        model: The model.
        names: As `names_in_trace` gives them.
        pairs: Takes those parts, by the ids of the tensors; None where no module is opaque.
    """

    told = {name: other for other, name in names.items()}
    parts = {} if pairs is None else pairs
    for tensor in (*model.parameters(), *model.buffers()) if pairs is not None else ():
        if tensor.dtype.is_complex:  # no view, which a trace would not write into
            parts[id(tensor)] = as_real(tensor).data.requires_grad_(tensor.requires_grad)

    def tensors(destination: dict[str, torch.Tensor] | None = None, prefix: str = "", **_: Any) -> dict[str, torch.Tensor]:
        found = {} if destination is None else destination
        for path, module in model.named_modules(remove_duplicate=False):
            for own in (module.named_parameters, module.named_buffers):
                for name, tensor in own(recurse=False, remove_duplicate=False):
                    key = f"{path}.{name}".removeprefix(".")
                    found[prefix + told.get(key, key)] = parts.get(id(tensor), tensor)
        return found

    before = model.__dict__.get("state_dict")
    model.__dict__["state_dict"] = tensors
    try:
        yield
    finally:
        del model.__dict__["state_dict"]
        if before is not None:
            model.__dict__["state_dict"] = before
