"""Which buffers and parameters a forward changes: by writing into them, by a Function that says so, or by putting another tensor in their place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.side_effects import times_written

__all__ = ["Buffers", "is_alike"]


class Buffers:
    """The buffers and parameters of a module as they are before its forward.

    Args:
        model: The module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
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

    def behind(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Those whose memory a tensor looks at: itself, or what ``buffer.data`` or a view looks at."""
        return [buffer for buffer, _ in self._before.values() if private.shares_memory(buffer, tensor)]


def is_alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one tensor has the shape and type of the other, so that a graph can give one for the other."""
    with private.paused_capture():
        lazy = torch.nn.parameter.is_lazy(one) or torch.nn.parameter.is_lazy(two)
        return one is two or (not lazy and one.shape == two.shape and one.dtype is two.dtype)
