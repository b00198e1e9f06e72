"""The interface of a trace: what the capture tells it, and what it has to be asked before tensors are changed in place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.buffers import Buffers
from symbolics.capture.trace.buffers import TracedBuffers
from symbolics.capture.trace.sizes import Sizes
from symbolics.capture.trace.statistics import RunningStatistics
from symbolics.capture.trace.views import Views, without_new_dimensions
from symbolics.errors import ExportError

__all__ = ["Trace"]


@dataclass
class Trace:
    """One trace.

    Attributes:
        anchors: A traced tensor per call: as outputs of the graph they keep calls whose results nobody reads.
        sizes: Which sizes are open, and which of them became numbers.
        state: The names of the model's parameters and buffers.
        fed: The names of values that depend on the model's inputs, of those that somebody asked about.
        dirtied: Tensors that a Function changed and said so: the trace leaves them as they were.
        pairs: The real and imaginary parts of complex parameters and buffers, by the ids of those: a trace has these in their places.
        views: Which tensors look at the memory of which others.
        told: Of which values that left torch a warning told: its text, and the module.
    """

    anchors: list[torch.Tensor] = field(default_factory=list)
    sizes: Sizes = field(default_factory=Sizes)
    state: Container[str] = ()
    fed: set[str] = field(default_factory=set)
    dirtied: list[torch.Tensor] = field(default_factory=list)
    pairs: dict[int, torch.Tensor] = field(default_factory=dict)
    views: Views = field(default_factory=Views)
    told: set[tuple[str, str]] = field(default_factory=set)
    _buffers: TracedBuffers | None = None
    _statistics: RunningStatistics | None = None

    def begin(self, buffers: Buffers) -> None:
        """The model's forward is about to be traced, with its buffers as they are."""
        self._buffers = TracedBuffers(buffers)
        self._statistics = RunningStatistics(self.dirtied, self._buffers.follow)

    def end(self, buffers: Buffers, result: Any) -> dict[str, torch.Tensor]:
        """The model's forward returned ``result``: the new values of the buffers and parameters that it wrote, by their names."""
        assert self._statistics is not None
        self._statistics.say(_tensors(result))
        self._statistics.say_touched()
        written = {name: buffer.detach().clone() for name, buffer in buffers.written(self.dirtied, self.pairs).items()}
        buffers.put_back()
        return written

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What the graph has to give out beside results, so that the passes of torch.onnx leave it there."""
        return *self.anchors, *(number.size for number in self.sizes.numbers)

    def reading(self, tensors: Iterable[torch.Tensor]) -> None:
        """A call is about to read tensors."""
        if self._statistics is not None:
            self._statistics.say(tensors)

    def calling(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function of torch is about to be called."""
        if self._statistics is not None:
            self._statistics.note(func, args, kwargs)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, place: Callable[[], str]) -> None:
        """A function of torch was called, in a ``place`` of the model."""
        self.sizes.parted(getattr(func, "__name__", ""), args, kwargs, result, place)
        if self._buffers is not None:
            self._buffers.note_views(func, result)
            self.views.note(func, args, kwargs, result)

    def change(self, name: str, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """A call that changes a tensor in place; what shares the tensor's memory has its new values, too.

        Args:
            name: The function.
            target: What it changes.
            args, kwargs: Its arguments, the target in front.
            call: Makes the call.

        Raises:
            ExportError: A trace cannot say what becomes of a tensor that shares the memory.
        """
        if self._buffers is not None and self._buffers.has(target):
            written, result = self._buffers.write(name, target, args[1:]), target
            if written is None:
                written, result = target, call(*args, **kwargs)
            if not self._buffers.follow(written):
                raise ExportError(
                    "it writes into a view of a buffer that is not contiguous, or in another type: write into the buffer itself"
                )
            return result
        shared = self.views.shared(target)
        if name == "copy_" and (shared or not target._is_view()):
            return self.overwrite(target, args[1])
        if name == "__setitem__" and (index := without_new_dimensions(args[1])) is not None:
            value = args[2].expand(target[args[1]].shape).reshape(target[index].shape) if isinstance(args[2], torch.Tensor) else args[2]
            args = (target, index, value)
        if not shared:
            return call(*args, **kwargs)
        value = target.clone()
        call(value, *args[1:], **kwargs)
        return self.overwrite(target, value)

    def overwrite(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``target.copy_(value)``."""
        private.overwrite_traced(target, value)
        self.views.follow(target, self.sizes.dynamic)
        return target

    def write_out(self, out: torch.Tensor, value: torch.Tensor) -> None:
        """Write a result into what ``out=`` gave."""
        self.overwrite(out, value)
        if self._buffers is not None:
            self._buffers.follow(out)

    def replace(self, target: torch.Tensor, result: torch.Tensor) -> None:
        """A call has changed a tensor, which it returns as a new value.

        Raises:
            ExportError: It is a view.
        """
        if target._is_view():
            raise ExportError(
                "mark_dirty on a view: torch.onnx.export(dynamo=False) would drop the node without a word. Use dynamo=True, or clone the view first"
            )
        with torch.no_grad(), private.paused_capture():
            target.copy_(result)
        private.replace_traced(target, result)
        self.views.follow(target, self.sizes.dynamic)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
