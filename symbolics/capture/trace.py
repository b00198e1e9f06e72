"""What TorchScript's trace takes beside the calls: it has no views, no state, and numbers for sizes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from symbolics.capture.buffers import Buffers
from symbolics.capture.running_statistics import RunningStatistics
from symbolics.capture.views import Views
from symbolics.errors import ExportError
from symbolics.node.containers import expand_leaves

__all__ = ["Number", "Trace"]


class Number(NamedTuple):
    """A size that became a number of Python in a trace.

    Attributes:
        size: The size, as a traced tensor.
        how, place: By which use, and where in the model.
        parts: Into how many parts a tensor was taken along an axis of this size; 0 where the size itself was read.
    """

    size: torch.Tensor
    how: str
    place: str
    parts: int = 0


@dataclass
class Trace:
    """What TorchScript's trace takes beside the calls.

    Attributes:
        anchors: A traced tensor per call: as outputs of the graph they keep calls whose results nobody reads.
        dynamic: Example sizes of the dimensions that are declared dynamic.
        numbers: Sizes that the model turned into Python numbers, or into a number of parts; some may be those of open axes.
        frozen: Those that the model turned into Python ints (torch.export keeps them symbolic, or fails).
        state: The names of the model's parameters and buffers.
        fed: The names of values that depend on the model's inputs, of those that somebody asked about.
        dirtied: Tensors that a Function changed and said so: the trace leaves them as they were.
        buffers: The model's buffers before its forward.
        pairs: The real and imaginary parts of complex parameters and buffers, by the ids of those: a trace has these in their places.
        statistics: What batch_norm wrote into running statistics.
        views: Which tensors look at the memory of which others.
    """

    anchors: list[torch.Tensor] = field(default_factory=list)
    dynamic: set[int] = field(default_factory=set)
    numbers: list[Number] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    state: Container[str] = ()
    fed: set[str] = field(default_factory=set)
    dirtied: list[torch.Tensor] = field(default_factory=list)
    buffers: Buffers | None = None
    pairs: dict[int, torch.Tensor] = field(default_factory=dict)
    statistics: RunningStatistics | None = None
    views: Views = field(default_factory=Views)

    def check_frozen(self, arguments: Iterable[object], names: Sequence[str]) -> None:
        """Refuse a call that is handed a size as a number.

        Args:
            arguments, names: The arguments of the call, and their names.

        Raises:
            ExportError: One is, or may be, a size of a dynamic dimension.
        """
        for value, name in zip(arguments, names, strict=True):
            for leaf in expand_leaves(value) if self.frozen else ():
                if type(leaf) is int and leaf in self.frozen:
                    raise ExportError(
                        f"argument {name} holds the int {leaf}, and so large is a dynamic dimension that the model turned into an int before: the file would "
                        "keep today's size: pass the size itself (x.shape[0], without int() or .item()), or export with another example size if they are unrelated"
                    )
