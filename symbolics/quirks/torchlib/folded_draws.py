"""Draws from constants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "draws_stay"]

QUIRK = Quirk(
    upstream="onnxscript",
    seen="0.7.2",
    wrong="fold_constants draws the mask of a Dropout of a constant, and a Bernoulli of one, once for all runs (with attributes that it does not know it "
    "fails, and logs that)",
)


@contextlib.contextmanager
def draws_stay(graph: ir.Graph) -> Iterator[None]:
    """While the block runs, these count among the draws that it leaves alone."""
    with private.draws_not_folded(("Dropout", "Bernoulli")):
        yield
