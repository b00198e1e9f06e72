"""Writing into buffers in a trace, whose passes lose what is put into a part of an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.aliases import is_whole
from symbolics.capture.buffers import Buffers

__all__ = ["TracedBuffers"]

#: Which the exporter knows in their other form alone.
_BITWISE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "__iand__": torch.bitwise_and, "__ior__": torch.bitwise_or, "__ixor__": torch.bitwise_xor,
    "bitwise_and_": torch.bitwise_and, "bitwise_or_": torch.bitwise_or, "bitwise_xor_": torch.bitwise_xor,
    "logical_and_": torch.logical_and, "logical_or_": torch.logical_or, "logical_xor_": torch.logical_xor,
}  # fmt: skip


class TracedBuffers:
    """The buffers and parameters of a model while it is traced.

    Args:
        buffers: They, as they were before its forward.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._views: list[torch.Tensor] = []

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer, or looks at the memory of one."""
        return bool(self._buffers.behind(tensor))

    def note_views(self, func: Any, result: Any) -> None:
        """Remember what looks at the memory of a buffer.

        Args:
            func: What a forward called.
            result: What it returned.
        """
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(each, torch.Tensor)
                and (each._is_view() or getattr(func, "__name__", "") in ("__get__", "detach"))
                and self.has(each)
            ):
                self._views.append(each)

    def write(self, name: str, target: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Write into a buffer, or into what looks at one.

        Args:
            name: The function's name.
            target: What is written into.
            args: The other arguments.

        Returns:
            The tensor that has a new value in the trace, None for a function that a trace has an operator for.
        """
        if name == "copy_":
            return private.overwrite_traced(target, args[0])
        if name in ("fill_", "zero_"):
            value = args[0] if name == "fill_" else 0
            return private.overwrite_traced(target, _number(value, target))
        if name in _BITWISE:
            return private.overwrite_traced(target, _BITWISE[name](target, args[0]))
        if name != "__setitem__":
            return None
        index, value = args[0], _number(args[1], target)
        if any(isinstance(each, (torch.Tensor, list)) for each in (index if isinstance(index, tuple) else (index,))):
            changed = target.clone()
            changed[index] = value
            return private.overwrite_traced(target, changed)
        part = target[index]
        if value.dim() > part.dim():  # leading dimensions of size 1
            value = value.reshape(value.shape[value.dim() - part.dim() :])
        return private.overwrite_traced(part, value)

    def follow(self, other: torch.Tensor) -> bool:
        """A tensor was written: the buffer whose memory it looks at has its new values, too, and each view of that buffer.

        Returns:
            False where a trace cannot say so.
        """
        behind = self._buffers.behind(other)
        for buffer in behind:
            if buffer is other:
                continue
            if is_whole(other, buffer):
                private.replace_traced(buffer, other)
            elif buffer.is_contiguous() and buffer.dtype is other.dtype:
                places, _ = _places(other, buffer)
                with private.paused_capture():
                    sizes = list(buffer.shape)
                with torch.no_grad():
                    private.replace_traced(buffer, buffer.reshape(-1).scatter(0, places, other.reshape(-1)).reshape(sizes))
            else:
                return False
        for view in self._views:
            base = next((buffer for buffer in behind if private.shares_memory(buffer, view)), None)
            if base is not None and view is not other and view is not base and base.is_contiguous() and base.dtype is view.dtype:
                places, sizes = _places(view, base)
                with torch.no_grad():
                    private.replace_traced(view, base.reshape(-1)[places].reshape(sizes))
        return True


def _places(view: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Where the elements of a view stand in a buffer that is contiguous; the sizes of the view."""
    with private.paused_capture():
        places = torch.arange(buffer.numel()).as_strided(view.shape, view.stride(), view.storage_offset() - buffer.storage_offset())
        return places.reshape(-1).clone(), list(view.shape)


def _number(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number as a constant of a trace; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    with private.paused_capture():
        return torch.tensor(value, dtype=like.dtype)
