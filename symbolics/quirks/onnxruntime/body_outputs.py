"""Outputs of the bodies of If and Scan, which onnxruntime leaves as they were in memory where a body does not make each of them by a node."""

from __future__ import annotations

from symbolics.graph.own_outputs import own_outputs_of_bodies
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "own_outputs_of_bodies"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.32",
    wrong="a body of If or Scan that gives one value as two outputs, or a Scan's that gives back what it was given, has outputs that nobody "
    "writes: they are what was in memory, without a word (a Loop's are right)",
    cure="symbolics/graph/own_outputs.py",
)
