"""The session of a plan's gradients, for one set of outputs that have a cotangent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exporter.gradient_graph.partition import Partition
from exporter.runtime.tensors import LARGE, Runner, TensorPool
from symbolics.node.dtypes import DTYPES

__all__ = ["Backward"]


@dataclass
class Backward:
    """What runs in a backward.

    Attributes:
        runner: The session.
        partition: What it reads and gives.
        row: The names of what a backward has: what the forward has left, tensors that it has read, and the cotangents in their order.
        others: Names of further tensors, behind those, that only this backward reads.
        places: Of each gradient, the place of its name among all whose gradients are wanted.
        beside: The gradients that pass `exporter.module.torch_kernels.beside` the session, by the names that were its outputs.
    """

    runner: Runner
    partition: Partition
    row: Sequence[str]
    others: Sequence[str]
    places: dict[str, int]
    beside: frozenset[str] = frozenset()

    @functools.cached_property
    def wanted(self) -> list[int]:
        """Of each gradient, the place of its name among all that are wanted: those of `gradients`, then those of `passed`."""
        gradients = self.partition.gradients
        return [self.places[name] for name in sorted(gradients, key=lambda name: gradients[name] in self.beside)]

    @functools.cached_property
    def gradients(self) -> list[int]:
        """Of each gradient that does not pass beside the session, its place among the session's outputs."""
        return [self.runner.places[output] for output in self.partition.gradients.values() if output not in self.beside]

    @functools.cached_property
    def passed(self) -> list[str]:
        """Of each gradient that passes beside the session, its name there."""
        return [output for output in self.partition.gradients.values() if output in self.beside]

    @functools.cached_property
    def feeds(self) -> list[int]:
        """Of each input of the session, its place in the row, and behind it among the others."""
        known = {name: place for place, name in enumerate((*self.row, *self.others))}
        return [known[name] for name in self.runner.inputs]

    def room(self, shapes: list[torch.Size], pool: TensorPool) -> list[torch.Tensor]:
        """Tensors for the outputs of the session, where one of them is large; else none.

        Small ones come faster from onnxruntime's arena, which asks the system for each page of a large one.

        Args:
            shapes: Of each of `gradients`, as the tensors have them.
            pool: Where from.
        """
        known, outputs = self._room
        return [pool.empty(*output) for output in outputs] if shapes == known else []

    @functools.cached_property
    def _room(self) -> tuple[list[torch.Size] | None, list[tuple[torch.Size, torch.dtype]]]:
        """The shapes of `gradients`, and shape and element type of each output of the session; (None, []) where that makes its outputs itself.

        It does where the file does not say all shapes: what it made of another shape would be onnxruntime's error, not ours.
        """
        runner = self.runner
        if not runner.takes_room or sorted(self.gradients) != list(range(len(runner.names))):
            return None, []
        if not all(isinstance(size, int) for shape in runner.shapes.values() for size in shape):
            return None, []
        outputs = [(torch.Size(shape), DTYPES[runner.types[name] or 0]) for name, shape in runner.shapes.items()]
        if not any(shape.numel() * kind.itemsize >= LARGE for shape, kind in outputs):
            return None, []
        return [outputs[place][0] for place in self.gradients], outputs
