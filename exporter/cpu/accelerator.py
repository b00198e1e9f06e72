"""The accelerator for onnxruntime's CPU: rewrites a model's graph in memory into operators that run faster there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from exporter.cpu.batches import multiply_batches
from exporter.cpu.blocked import block_channels
from exporter.cpu.channels import sum_by_channels
from exporter.cpu.elementwise import fuse
from exporter.cpu.in_place import take_out_updates
from exporter.cpu.moves import move_at_once
from exporter.cpu.operators import has_wide_vectors, library
from exporter.cpu.phases import convolve_phases
from exporter.cpu.pools import pool_at_once
from exporter.cpu.products import multiply_few_windows
from exporter.cpu.recurrences import run_recurrences
from exporter.cpu.statistics import zeros_at_once
from exporter.cpu.sums import multiply_sums
from exporter.cpu.weights import CONV_WEIGHT_GRAD
from exporter.runtime.accelerate import Optimized, Request
from exporter.runtime.facts import ShapeAndType, find_facts

__all__ = ["ACCELERATOR", "rewrite_convolutions"]


def rewrite_convolutions(
    model: ir.Model, sizes: Mapping[str, int] | None = None, facts: dict[ir.Value, ShapeAndType] | None = None, *, native: bool
) -> int:
    """Rewrite convolutions and pools, with their gradients and the sums beside them, into forms that onnxruntime's CPU kernels run faster.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        sizes: As `block_channels` has it.
        facts: As `fuse` found them; takes more.
        native: Whether the accelerator's library is there.

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


class CpuAccelerator:
    """An `exporter.runtime.accelerate.Accelerator`."""

    @property
    def library(self) -> Path | None:
        """Where its operators are; None where they were not compiled, and only standard ones are put in."""
        return library()

    @property
    def claims(self) -> frozenset[str]:
        """The gradients of convolutions for their weights, where the processor is quick at them."""
        return frozenset([CONV_WEIGHT_GRAD] if has_wide_vectors() else [])

    def takes(self, providers: Sequence[Any]) -> bool:
        """Whether these are the CPU's alone."""
        return all((entry if isinstance(entry, str) else entry[0]) == "CPUExecutionProvider" for entry in providers)

    def optimize(self, model: ir.Model, request: Request, facts: dict[ir.Value, ShapeAndType]) -> Optimized:
        """As `exporter.runtime.accelerate.Accelerator.optimize`."""
        native = self.library is not None
        replaced = 0
        if native:
            replaced += run_recurrences(model)
        if native and request.part != "inference":
            replaced += fuse(model, guards_only=request.part == "forward", facts=facts)
        elif request.part == "step":
            find_facts(model, facts)
        replaced += rewrite_convolutions(model, request.sizes, facts, native=native)
        update = take_out_updates(model, request.carried, facts) if replaced and request.carried is not None else None
        return Optimized(replaced, update)


ACCELERATOR = CpuAccelerator()
