"""What convolutions, sums and statistics become in memory, for onnxruntime's CPU."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from exporter.runtime.fusion.blocked import block_channels
from exporter.runtime.fusion.channels import sum_by_channels
from exporter.runtime.fusion.elementwise import Facts
from exporter.runtime.fusion.moves import move_at_once
from exporter.runtime.fusion.products import multiply_few_windows
from exporter.runtime.fusion.statistics import zeros_at_once
from exporter.runtime.fusion.sums import multiply_sums

__all__ = ["arrange"]


def arrange(model: ir.Model, sizes: Mapping[str, int] | None = None, facts: dict[ir.Value, Facts] | None = None, *, native: bool) -> int:
    """Sums by channels in the chains before them, few windows and sums of rows as products, channels in blocks, and what these and the
    gradients lay out at once.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        sizes: As `block_channels` has it.
        facts: As `fuse` found them; takes more.
        native: Whether the native library is there, which makes what chains give out, moves elements and makes zeros.

    Returns:
        How many nodes were replaced.
    """
    summed = sum_by_channels(model, facts) if native and facts else 0
    replaced = summed + multiply_few_windows(model, sizes) + block_channels(model, sizes) + multiply_sums(model, facts)
    return replaced + (zeros_at_once(model) + move_at_once(model, facts) if native else 0)
