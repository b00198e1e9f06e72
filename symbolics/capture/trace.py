"""What TorchScript's trace takes beside the calls: it has no views, no state, and numbers for sizes."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch

from symbolics.capture.buffers import Buffers
from symbolics.capture.running_statistics import RunningStatistics
from symbolics.capture.views import Views

__all__ = ["Trace"]


@dataclass
class Trace:
    """What TorchScript's trace takes beside the calls.

    Attributes:
        anchors: A traced tensor per call: as outputs of the graph they keep calls whose results nobody reads.
        dynamic: Example sizes of the dimensions that are declared dynamic.
        frozen: Those that the model turned into Python ints (torch.export keeps them symbolic, or fails).
        state: The names of the model's parameters and buffers.
        fed: The names of values that depend on the model's inputs, of those that somebody asked about.
        dirtied: Tensors that a Function changed and said so: the trace leaves them as they were.
        buffers: The model's buffers before its forward.
        statistics: What batch_norm wrote into running statistics.
        views: Which tensors look at the memory of which others.
    """

    anchors: list[torch.Tensor] = field(default_factory=list)
    dynamic: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    state: Container[str] = ()
    fed: set[str] = field(default_factory=set)
    dirtied: list[torch.Tensor] = field(default_factory=list)
    buffers: Buffers | None = None
    statistics: RunningStatistics | None = None
    views: Views = field(default_factory=Views)
