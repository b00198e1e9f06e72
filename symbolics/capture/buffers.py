"""Which buffers and parameters a forward changes: by writing into them, by a Function that says so, or by putting another tensor in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.aliases import is_whole
from symbolics.capture.side_effects import times_written

__all__ = ["Buffers", "is_alike"]


_BITWISE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "__iand__": torch.bitwise_and, "__ior__": torch.bitwise_or, "__ixor__": torch.bitwise_xor,
    "bitwise_and_": torch.bitwise_and, "bitwise_or_": torch.bitwise_or, "bitwise_xor_": torch.bitwise_xor,
    "logical_and_": torch.logical_and, "logical_or_": torch.logical_or, "logical_xor_": torch.logical_xor,
}  # fmt: skip


class Buffers:
    """The buffers and parameters of a module as they are before its forward.

    Args:
        model: The module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._views: list[torch.Tensor] = []
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        self._before = {name: (tensor, times_written(tensor)) for name, tensor in self._now()}

    def written(
        self, declared: Collection[torch.Tensor] = (), pairs: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        """The buffers and parameters that were written since, by their names, as they are now; also those among the ``declared``.

        One that was written counts, whatever was written: where the example leaves a value as it was, another input may not. One that has
        another shape or type does not: no graph could carry it.

        Args:
            declared: Tensors that were written without a trace of it.
            pairs: What a trace has in the place of buffers, by their ids.
        """
        found = {}
        for name, buffer in self._now() if self._before else ():
            before, version = self._before.get(name, (buffer, 0))
            seen = pairs.get(id(buffer), buffer)
            if (
                name in self._before
                and is_alike(buffer, before)
                and (buffer is not before or times_written(buffer) != version or any(seen is t for t in declared))
            ):
                found[name] = seen
        return found

    def write_assigned(self, result: Any) -> Any:
        """Write what was put in a buffer's place into the buffer: torch.export sees such an assignment in the outermost module alone.

        Args:
            result: What forward returned.

        Returns:
            The same, with copies of what shares memory with such a buffer.
        """
        assigned = [
            (before, buffer)
            for name, buffer in self._now()
            if (before := self._before.get(name, (buffer, 0))[0]) is not buffer and is_alike(before, buffer)
        ]

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if any(private.shares_memory(tensor, before) for before, _ in assigned) else tensor

        result = pytree.tree_map_only(torch.Tensor, apart, result) if assigned else result
        with torch.no_grad():
            for before, value in [(before, apart(buffer)) for before, buffer in assigned]:  # one may be what another was
                before.copy_(value)
        self.put_back()
        return result

    def put_back(self) -> None:
        """Give the modules their buffers back, as objects; what is in them stays."""
        for name, buffer in list(self._now()):
            before = self._before.get(name, (buffer, 0))[0]
            if before is not buffer:
                path, _, last = name.rpartition(".")
                module = self._model.get_submodule(path)
                (module._buffers if last in module._buffers else module._parameters)[last] = before  # type: ignore[assignment]

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_buffers(remove_duplicate=False)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if self._before.get(name, (parameter, 0))[0] is parameter:
                yield name, parameter  # what a hook puts in its place for the call is no change of the parameter

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer, or looks at the memory of one (``buffer.data``, a view)."""
        return any(private.shares_memory(buffer, tensor) for buffer, _ in self._before.values())

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

    def write(self, name: str, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Write into a buffer, or into what looks at one, for a trace: its passes lose what is put into a part of an input.

        Args:
            name: The function's name.
            target: What is written into.
            args, kwargs: The other arguments.

        Returns:
            The tensor that has a new value in the trace, None for a function that a trace has an operator for.
        """
        if name == "copy_":
            return private.overwrite_traced(target, args[0])
        if name in ("fill_", "zero_"):
            value = args[0] if name == "fill_" else 0
            return private.overwrite_traced(target, _number(value, target))
        if name in _BITWISE:  # which the exporter knows in their other form alone
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
        """A tensor was written in a trace, which knows of no memory that two tensors share: the buffer behind it has its new values, too.

        Returns:
            False where a trace cannot say so.
        """
        behind = [buffer for buffer, _ in self._before.values() if private.shares_memory(buffer, other)]
        for buffer in behind:
            if buffer is other:
                continue
            if is_whole(other, buffer):
                private.replace_traced(buffer, other)
            elif buffer.is_contiguous() and buffer.dtype is other.dtype:
                places, _ = self._places(other, buffer)
                with private.paused_capture():
                    sizes = list(buffer.shape)
                with torch.no_grad():
                    private.replace_traced(buffer, buffer.reshape(-1).scatter(0, places, other.reshape(-1)).reshape(sizes))
            else:
                return False
        for view in self._views:
            base = next((buffer for buffer in behind if private.shares_memory(buffer, view)), None)
            if base is not None and view is not other and view is not base and base.is_contiguous() and base.dtype is view.dtype:
                places, sizes = self._places(view, base)
                with torch.no_grad():
                    private.replace_traced(view, base.reshape(-1)[places].reshape(sizes))
        return True

    @staticmethod
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


def is_alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one tensor has the shape and type of the other, so that a graph can give one for the other."""
    with private.paused_capture():
        lazy = torch.nn.parameter.is_lazy(one) or torch.nn.parameter.is_lazy(two)
        return one is two or (not lazy and one.shape == two.shape and one.dtype is two.dtype)
