"""Operators that are slow on onnxruntime's CPU become others, once a model is whole; `symbolics.graph.slow_operators` has which."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator

import onnx_ir as ir

from exporter.gradient_graph.inference import infer_shapes
from symbolics.graph.slow_operators import ASK_FOR_SHAPES, SLOW, rewrite_slow_operators
from symbolics.graph.walk import walk

__all__ = ["slow_operators_stay", "without_slow_operators"]

_later = contextvars.ContextVar("later", default=False)


@contextlib.contextmanager
def slow_operators_stay() -> Iterator[None]:
    """In this block, exports leave slow operators as they are: what they make is differentiated before anybody runs it."""
    token = _later.set(True)
    try:
        yield
    finally:
        _later.reset(token)


def without_slow_operators(model: ir.Model, nodes: Collection[ir.Node] | None = None) -> None:
    """Put faster operators in the place of slow ones, in place.

    Args:
        model: A model that is whole: no gradient is to be made of it here.
        nodes: Which of its nodes may become others; default: all.
    """
    slow = [node for node in (walk(model.graph) if nodes is None else nodes) if node.op_type in SLOW and node.domain == ""]
    if _later.get() or not slow:
        return
    asking = [node for node in slow if node.op_type in ASK_FOR_SHAPES]
    if any(value is not None and (value.type is None or value.shape is None) for node in asking for value in node.inputs):
        infer_shapes(model, only_where_missing=True)
    rewrite_slow_operators(model, nodes)
