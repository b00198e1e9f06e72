"""Dropout in `verify`: eager PyTorch drops what the file drops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir
import torch

from exporter.train_mode.dropout import dropout_mask, dropouts, ratio_of
from symbolics import torch_private as private
from symbolics.errors import PythonopError
from symbolics.graph.flatten import flattened

__all__ = ["Masks", "OtherDraws"]


class OtherDraws(PythonopError):
    """What eager draws is not what the file's Dropouts draw."""


class Masks:
    """The masks that the Dropouts of a file draw from a seed, in the order of the file, which is the order of eager's run."""

    def __init__(self, model: ir.Model, seed: int) -> None:
        """
        Raises:
            OtherDraws: A Dropout is in a body: eager draws another number of masks.
            UnsupportedOperatorError: A ratio is computed in the graph.
        """
        self.seed = seed
        model = flattened(model)
        self.nodes = dropouts(model)
        if inside := [node.name for node in self.nodes if node.graph is not model.graph]:
            raise OtherDraws(f"Dropout {inside[0]!r} is in the body of another node")
        self.ratios = [ratio_of(node) for node in self.nodes]

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Run eager with these masks.

        Raises:
            OtherDraws: It does not draw one mask for each Dropout of the file, of its ratio and shape and in its order.
        """
        count = 0

        def answer(shape: tuple[int, ...], kept: float) -> torch.Tensor:
            nonlocal count
            number, count = count, count + 1
            if number >= len(self.nodes):
                raise OtherDraws(f"eager draws more than the {len(self.nodes)} masks of the file's Dropout nodes")
            node, ratio = self.nodes[number], self.ratios[number]
            wanted = node.inputs[0].shape if node.inputs[0] is not None else None
            sizes = (
                shape
                if wanted is None or len(wanted) != len(shape)
                else tuple(d if isinstance(d, int) else n for d, n in zip(wanted, shape, strict=True))
            )
            if abs(1 - kept - ratio) > 1e-6 or sizes != shape or (wanted is not None and len(wanted) != len(shape)):
                raise OtherDraws(
                    f"mask {number} of eager has the shape {list(shape)} and drops {1 - kept:g}, Dropout {node.name!r} of the file {wanted} and {ratio:g}"
                )
            return torch.from_numpy(dropout_mask(self.seed, number, shape, ratio))

        with private.answered_draws(answer):
            yield
        if count != len(self.nodes):
            raise OtherDraws(f"eager draws {count} masks, the file has {len(self.nodes)} Dropout nodes")
