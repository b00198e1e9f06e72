"""What convolutions, pools, sums and statistics become in memory, for onnxruntime's CPU."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from exporter.runtime.fusion.batches import multiply_batches
from exporter.runtime.fusion.blocked import block_channels
from exporter.runtime.fusion.channels import sum_by_channels
from exporter.runtime.fusion.elementwise import Facts
from exporter.runtime.fusion.moves import move_at_once
from exporter.runtime.fusion.phases import convolve_phases
from exporter.runtime.fusion.pools import pool_at_once
from exporter.runtime.fusion.products import multiply_few_windows
from exporter.runtime.fusion.statistics import zeros_at_once
from exporter.runtime.fusion.sums import multiply_sums

__all__ = ["arrange"]


def arrange(model: ir.Model, sizes: Mapping[str, int] | None = None, facts: dict[ir.Value, Facts] | None = None, *, native: bool) -> int:
    """Few windows and sums of rows as products, channels in blocks, and with the native library strides by phases, sums by channels in the
    chains before them, statistics that count for nothing, pools with their indices, and what all these and the gradients lay out at once.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        sizes: As `block_channels` has it.
        facts: As `fuse` found them; takes more.
        native: Whether the native library is there.

    Returns:
        How many nodes were replaced.
    """
    facts = {} if facts is None else facts
    replaced = multiply_few_windows(model, sizes)
    if native:
        replaced += convolve_phases(model, sizes) + sum_by_channels(model, facts) + zeros_at_once(model)
    replaced += block_channels(model, sizes) + multiply_sums(model, facts)
    if native:
        replaced += pool_at_once(model, facts) + multiply_batches(model, facts, sizes) + move_at_once(model, facts)
    return replaced
