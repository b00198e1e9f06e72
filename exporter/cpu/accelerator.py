"""The accelerator for onnxruntime's CPU: rewrites a model's graph in memory into operators that run faster there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from exporter.cpu.blocked import block_channels
from exporter.cpu.elementwise import fuse
from exporter.cpu.in_place import take_out_updates
from exporter.cpu.moves import move_at_once
from exporter.cpu.operators import DOMAIN, has_wide_vectors, library
from exporter.cpu.phases import convolve_phases
from exporter.cpu.pools import max_pool_grad, pool_at_once
from exporter.cpu.products import multiply_few_windows
from exporter.cpu.recurrences import RECURRENCES
from exporter.cpu.weights import conv_weight
from exporter.runtime.accelerate import Optimized, Part, Request
from exporter.runtime.claims import Claim, claim
from exporter.runtime.facts import ShapeAndType, find_facts
from exporter.runtime.providers import is_cpu_alone

__all__ = ["ACCELERATOR", "CLAIMS", "PASSES", "Pass"]

Facts = dict[ir.Value, ShapeAndType]


class Pass(NamedTuple):
    """A rewriting of a model, in memory.

    Attributes:
        name: What it is called where passes are switched off, to measure what they bring.
        run: Changes the model, whose nodes stand in the order of their values, and returns how many nodes it replaced; takes facts, and adds to them.
        needs_library: Whether it puts in operators of the accelerator's library.
        parts: The models that it is for.
    """

    name: str
    run: Callable[[ir.Model, Request, Facts], int]
    needs_library: bool = True
    parts: frozenset[Part] = frozenset(("inference", "forward", "backward", "step"))


def _chains(model: ir.Model, request: Request, facts: Facts) -> int:
    # Of a forward, only what replaces NaN: onnxruntime has kernels for whole compositions (Gelu, normalizations), which it would no longer find.
    return fuse(model, guards_only=request.part == "forward", facts=facts)


#: In the order in which they run: each finds what those before it have left. Gradients that nobody claims by name are nodes of the graph for those behind;
#: moves come last, for all others put in products and what lays their operands out.
PASSES = (
    Pass("chains", _chains, parts=frozenset(("forward", "backward", "step"))),
    Pass("few windows", lambda model, request, facts: multiply_few_windows(model, request.sizes), needs_library=False),
    Pass("strides by phases", lambda model, request, facts: convolve_phases(model, request.sizes)),
    Pass("channels in blocks", lambda model, request, facts: block_channels(model, request.sizes), needs_library=False),
    Pass("pools", lambda model, request, facts: pool_at_once(model, facts)),
    Pass("moves", lambda model, request, facts: move_at_once(model, facts)),
)


#: Names of gradients that the library computes -> what puts its operators in.
CLAIMS: Mapping[str, Claim] = {"ConvWeight": conv_weight, "MaxPoolGrad": max_pool_grad, **RECURRENCES}


class CpuAccelerator:
    """An `exporter.runtime.accelerate.Accelerator` of these passes.

    Attributes:
        passes: What it runs, in order.
        claims: What it does before: gradients that it computes by their names.
    """

    def __init__(self, passes: Sequence[Pass] = PASSES, claims: Mapping[str, Claim] = CLAIMS) -> None:
        self.passes, self.claims = tuple(passes), claims

    @property
    def library(self) -> Path | None:
        """Where its operators are; None where they were not compiled, and only standard ones are put in."""
        return library()

    @property
    def own_gradients(self) -> frozenset[str]:
        """The gradients of convolutions for their weights, where the processor is quick at them."""
        return frozenset(["ConvWeight"] if has_wide_vectors() else [])

    def takes(self, providers: Sequence[Any]) -> bool:
        """Whether these are the CPU's alone."""
        return is_cpu_alone(providers)

    def optimize(self, model: ir.Model, request: Request, facts: Facts) -> Optimized:
        """As `exporter.runtime.accelerate.Accelerator.optimize`."""
        is_there = self.library is not None
        passes = [each for each in self.passes if request.part in each.parts and (is_there or not each.needs_library)]
        replaced = claim(model, self.claims if is_there else {})
        if replaced:
            model.graph.opset_imports[DOMAIN] = 1
        replaced += sum(each.run(model, request, facts) for each in passes)
        if not facts and request.part == "step":
            find_facts(model, facts)
        update = take_out_updates(model, request.carried, facts) if replaced and request.carried is not None else None
        return Optimized(replaced, update)


ACCELERATOR = CpuAccelerator()
