"""What convolutions, pools and sums become in memory, for onnxruntime's CPU."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from exporter.runtime.fusion.blocked import block_channels
from exporter.runtime.fusion.elementwise import Facts
from exporter.runtime.fusion.moves import move_at_once
from exporter.runtime.fusion.pools import pool_at_once
from exporter.runtime.fusion.products import multiply_few_windows
from exporter.runtime.fusion.sums import multiply_sums

__all__ = ["arrange"]


def arrange(model: ir.Model, sizes: Mapping[str, int] | None = None, facts: dict[ir.Value, Facts] | None = None, *, native: bool) -> int:
    """Few windows and sums of rows as products, channels in blocks, pools with their indices, and what these and the gradients lay out at once.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        sizes: As `block_channels` has it.
        facts: As `move_at_once` has it, and `pool_at_once`.
        native: Whether the native library is there, which moves elements.

    Returns:
        How many nodes were replaced.
    """
    replaced = multiply_few_windows(model, sizes) + block_channels(model, sizes) + multiply_sums(model, facts)
    if not native:
        return replaced
    facts = {} if facts is None else facts
    return replaced + pool_at_once(model, facts) + move_at_once(model, facts)
