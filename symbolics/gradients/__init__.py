"""One rule an operator, grouped by family. The engine that applies them is exporter/gradient_graph.py."""

from __future__ import annotations

import importlib

from symbolics.gradients._registry import COMPOSITES, RULES, Rule, composite, gradient
from symbolics.gradients.nondifferentiable import NONDIFFERENTIABLE

__all__ = ["COMPOSITES", "NONDIFFERENTIABLE", "RULES", "Rule", "composite", "gradient"]

_FAMILIES = (
    "elementwise",
    "recurrent",
    "reductions",
    "control_flow",
    "convolution",
    "linear",
    "movement",
    "normalization",
    "pooling",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
