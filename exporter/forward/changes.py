"""What one forward leaves changed in a model: buffers, parameters, and attributes of its modules that the next call reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.unchanged import Kept
from exporter.train_mode.buffers import UNSEEN
from exporter.train_mode.reads import Reads, attributes_of
from symbolics import torch_private as private
from symbolics.capture.side_effects import same_values, times_written
from symbolics.errors import ExportError
from symbolics.node.metadata import changes_of

__all__ = ["Changes", "check_written"]

_ONCE = (
    "in its first call alone, a parameter that is trained: a file would set it anew in each call.\n"
    "  way out: call the model once before the export"
)
_Call = Callable[[], tuple[list[torch.Tensor], Any]]

_CONSTANT = (
    "in place, and the next call reads it: a tensor that is no buffer, which exporters take for a constant.\n"
    "  way out: register it with register_buffer() in __init__, and the file carries its changes"
)
_NEW = (
    "at every call, a buffer that the first call makes: what is not there at the export is no input of its graph.\n"
    "  way out: register it in __init__, in its shape, or call the model once before the export"
)


def check_written(names: Iterable[str], model: ir.Model) -> None:
    """Refuse a file without the new value of a parameter that is trained: its gradients would be those of the old one.

    Args:
        names: The trained parameters that a forward changes.
        model: The file.

    Raises:
        ExportError: It lacks one.
    """
    lost = changes_of(model).lost
    for name in names:
        if name in lost:
            raise ExportError(
                f"forward changes {name!r}, a parameter that is trained, where the exporter cannot look (NumPy, C code, another shape or type): its "
                "gradient is that of the new value, which the file lacks.\n"
                "  way out: write it by torch (self.weight.data.clamp_(...)), change a copy (w = self.weight.clamp(...)), or change the parameter outside of\n"
                "  forward, after the optimizer's step; where the first call alone sets it, call the model once before the export"
            )


class Changes:
    """What forwards of a model change and the next one reads (exporter/train_mode/reads.py), by comparison with how the model was.

    Args:
        model: The model, before its forward.
        kept: It and all that it has, as it was before.

    Attributes:
        reads: Is open while a forward runs.
        refused: The names of what no file can be right about, not even once -> why, and the way out.
        shared: Two names of one buffer that was found changed.
        parameters: The names of all parameters that were written.
        modules: Those that have other attributes now.
        trained: The names of the parameters that were written, are read, and are trained.
        noted: What is changed and no state, as in `found`.
    """

    def __init__(self, model: torch.nn.Module, kept: Kept) -> None:
        self._model = model
        self._kept = kept
        self.reads = Reads(model)
        self.refused: dict[str, str] = {}
        self.shared: tuple[str, ...] = ()
        self.parameters: list[str] = []
        self.trained: list[str] = []
        self.modules: list[torch.nn.Module] = []
        self.noted: dict[str, str] = {}
        self._buffers = {name: (buffer, self._before(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)}
        self._parameters = {
            name: (parameter, self._before(parameter))
            for name, parameter in model.named_parameters()
            if parameter.layout is torch.strided and not parameter.is_meta
        }
        self._attributes = self._now_attributes()

    def found(self, call: _Call) -> dict[str, str]:
        """The names of the state that is changed -> why a graph may not show it.

        An attribute counts where a second call, on equal buffers, leaves another value than the first: what is computed once and kept is the
        same after both. So does a tensor that a second call reads and then makes anew, whatever is in it: both have the same input. So does a
        buffer that is new, or got another shape or type.

        Args:
            call: Makes another call, and returns its tensors, and its arguments; it is made where there is something to tell apart. The model's
                mode is another one afterwards.
        """
        buffers = self._now()
        before = {name: value for name, (_, value) in self._buffers.items()}
        found = {name: UNSEEN for name, value in buffers.items() if name in before and _moved(value, before[name])}
        found |= {name: UNSEEN for name in self._replaced() if _alike(buffers[name], before[name])}
        names = {name: [other for other, (tensor, _) in self._buffers.items() if tensor is self._buffers[name][0]] for name in found}
        for name, (parameter, value) in self._parameters.items():
            if _moved(parameter, value):
                self.parameters.append(name)
                found[name] = UNSEEN
                if parameter.requires_grad and name in self.reads.ever:  # its optimizer starts from what was written: a note it is not
                    self.trained.append(name)
                    self.reads.first.add(name)
        parted = dict.fromkeys(self._parted(), "two modules share it, and forward puts another tensor in its place under one of its names")
        written = {*found, *parted, *self._replaced(), *self.reads.overwritten}
        remade = {name: value for name, value in buffers.items() if name not in before or not _alike(value, before[name])}
        attributes = self._now_attributes()
        moved = {
            name: value
            for name, (_, value) in attributes.items()
            if name not in self._attributes or not _equal(value, self._attributes[name][1])
        }
        self.modules = [module for path, module in self._model.named_modules() if any(_is_of(name, path) for name in moved)]
        numbers = {name: attributes[name][0] for name, value in moved.items() if not isinstance(value, torch.Tensor)}
        versions = {name: times_written(attributes[name][0]) for name in moved}
        if (remade or moved) and (again := self._again(call, numbers, remade)) is not None:
            later, last = self._now(), self._now_attributes()
            for name, value in remade.items():
                if name in later and not _equal(later[name], value):
                    found[name] = "its shape or type changes, and a graph's are fixed"
            for name, value in moved.items():
                renewed = name in again and name in last and self._renewed(attributes[name][0], last[name][0], versions[name])
                if renewed or (name in last and not _equal(last[name][1], value)):
                    found[name] = "it is an attribute of a module, not a buffer"
        self.refused |= dict.fromkeys(self._set_once(call), _ONCE)
        if not written | found.keys() <= self.reads.first:
            self._model.train(not self._model.training)
            if self._again(call, {name: value for name, value in numbers.items() if name in found}, remade) is None:
                self.reads.first |= written | found.keys()  # nobody knows what the other mode reads
        found |= parted
        self.noted = {name: why for name, why in found.items() if name not in self.reads.first}
        found = {name: why for name, why in found.items() if name in self.reads.first}
        self.shared = next((tuple(names[name]) for name in found if len(names.get(name, ())) > 1), ())
        for name in found:
            if name in remade and name not in before:
                self.refused[name] = _NEW
            if name in moved and isinstance(moved[name], torch.Tensor) and attributes[name][0] is self._attributes.get(name, (None,))[0]:
                self.refused[name] = _CONSTANT
        return found

    def _again(self, call: _Call, numbers: Collection[str], but: dict[str, Any]) -> set[str] | None:
        """Make another call, on the buffers and parameters of the first, and note what it reads.

        Args:
            call: Makes it.
            numbers: Attributes that are watched, in the backward, too.
            but: Buffers that stay as they are.

        Returns:
            What it reads before it writes it; None where it fails.
        """
        try:
            return self._call(call, numbers, but)
        except Exception:
            if not numbers:
                return None
        try:  # C code takes nothing but a plain number: that is a read
            return self._call(call, (), but) | set(numbers)
        except Exception:
            return None
        finally:
            self.reads.first.update(numbers)

    def _call(self, call: _Call, numbers: Collection[str], but: dict[str, Any]) -> set[str]:
        earlier, self.reads.first = self.reads.first, set()
        try:
            self._put_back(but)
            with self.reads, self.reads.counted(numbers):
                made = call()
                if numbers:
                    self._backward(*made)
                del made
            return set(self.reads.first)
        finally:
            self.reads.first |= earlier

    def _set_once(self, call: _Call) -> set[str]:
        """The trained parameters that another call leaves as they were before the first."""
        first, ever = set(self.reads.first), set(self.reads.ever)
        for name in self.trained:
            self._kept.put_back(self._parameters[name][0])
        try:
            if self.trained:
                call()
        except Exception:
            return set(self.trained)
        finally:
            self.reads.first, self.reads.ever = first, ever
        return {name for name in self.trained if not _moved(*self._parameters[name])}

    def _backward(self, outputs: list[torch.Tensor], given: Any) -> None:
        """Run the backward of a call: it may read what the call has changed."""
        leaves = [
            leaf
            for leaf in (*pytree.tree_leaves(given), *self._model.parameters())
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        ends = [tensor for tensor in outputs if tensor.requires_grad]
        if leaves and ends:
            torch.autograd.grad(ends, leaves, [torch.ones_like(tensor) for tensor in ends], allow_unused=True)

    def _renewed(self, before: Any, after: Any, version: int) -> bool:
        """Whether a call wrote a tensor that is an attribute, or put another in its place; not by way of a buffer or parameter."""
        if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
            return False
        if after is not before:
            return not private.shares_memory(after, before)
        own = (*self._buffers.values(), *self._parameters.values())
        return times_written(after) != version and not any(private.shares_memory(after, tensor) for tensor, _ in own)

    def _before(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._kept.values(tensor)
        return _copy(tensor) if values is None else values

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: _copy(buffer) for name, buffer in self._model.named_buffers(remove_duplicate=False)}

    def _now_attributes(self) -> dict[str, tuple[Any, Any]]:
        """Name -> the object, and its value now."""
        return {name: (value, _copy(value) if isinstance(value, torch.Tensor) else value) for name, value in attributes_of(self._model)}

    def _replaced(self) -> Iterator[str]:
        """The buffers in whose place another tensor is now."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        yield from (name for name, (before, _) in self._buffers.items() if name in now and now[name] is not before)

    def _parted(self) -> Iterator[str]:
        """The buffers that were one tensor under several names, and are not now."""
        now, first = dict(self._model.named_buffers(remove_duplicate=False)), dict[int, str]()
        for name, (before, _) in self._buffers.items():
            other = first.setdefault(id(before), name)
            if now.get(name) is not now.get(other):
                yield from (other, name)

    def _put_back(self, but: dict[str, torch.Tensor]) -> None:
        modules = dict(self._model.named_modules())
        for name, (tensor, _) in (*self._buffers.items(), *self._parameters.items()):
            if name not in but:
                path, _, last = name.rpartition(".")
                if name in self._buffers:
                    modules[path]._buffers[last] = tensor
                self._kept.put_back(tensor)


def _is_of(name: str, path: str) -> bool:
    """Whether an attribute may be one of the module at a path."""
    return not path or name.startswith(f"{path}.")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if torch.nn.parameter.is_lazy(tensor) else tensor.detach().clone()


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one could be written into the other as it is."""
    if torch.nn.parameter.is_lazy(one) or torch.nn.parameter.is_lazy(two):
        return one is two
    return one.shape == two.shape and one.dtype is two.dtype and one.layout is two.layout


def _moved(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one has other values than the other, which it could have been written into."""
    return one is not two and _alike(one, two) and not same_values(one, two)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one is two or (_alike(one, two) and same_values(one, two))
    return type(one) is type(two) and bool(one == two)
