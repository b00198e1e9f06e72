"""One rule per operator, grouped by family. The engine that applies them is exporter/gradient_graph/engine.py."""

from __future__ import annotations

import importlib

from symbolics.gradients.nondifferentiable import FLAT, IN_INTEGERS, MOVES, NONDIFFERENTIABLE, in_integers
from symbolics.gradients.registry import COMPOSITES, RULES, Rule, composite, gradient

__all__ = ["COMPOSITES", "FLAT", "IN_INTEGERS", "MOVES", "NONDIFFERENTIABLE", "RULES", "Rule", "composite", "gradient", "in_integers"]

_FAMILIES = (
    "control_flow",
    "convolution",
    "elementwise",
    "linear",
    "movement",
    "normalization",
    "pooling",
    "python_op",
    "quantization",
    "recurrent",
    "reductions",
    "resize",
    "sampling",
    "sequences",
    "signal",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
