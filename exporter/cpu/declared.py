"""Whether values have the shapes that a graph says, where a pass relies on them and onnxruntime does not look.

The shapes of inputs it does look at. Those of what a graph computes are a file's word: what was laid out by a wrong one would be wrong
numbers, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from symbolics.graph.emitter import Emitter
from symbolics.graph.values import fixed_array

__all__ = ["forget", "is_certain", "row_if_declared"]


def forget(values: Iterable[ir.Value | None]) -> None:
    """Say nothing of the shapes of computed values that a pass has checked, or onnxruntime computes the check beforehand, from what is said.

    Those of outputs stay: whoever reads these looks at them.
    """
    for value in values:
        if value is not None and not is_certain(value) and not value.is_graph_output():
            value.shape = None


def is_certain(value: ir.Value) -> bool:
    """Whether onnxruntime sees to it that a value has its static shape: an input, or what is reshaped to a constant one."""
    node = value.producer()
    if node is None:
        return True
    sizes = fixed_array(node.inputs[1]) if node.op_type == "Reshape" and node.domain == "" else None
    return sizes is not None and bool((sizes > 0).all())


def row_if_declared(op: Emitter, row: Sequence[int], *checks: tuple[ir.Value, int, Sequence[int]]) -> ir.Value:
    """A vector of these numbers, made when the graph runs: an error where a value has another shape.

    Args:
        op: Takes the nodes.
        row: The numbers.
        checks: (value, first axis, sizes from there on).
    """
    found = op.Concat(*(op.raw("Shape", [value], start=start) for value, start, _ in checks), axis=0)
    said = [size for *_, sizes in checks for size in sizes]
    differs = op.ReduceMax(op.Cast(op.Not(op.Equal(found, op.i64(said))), to=ir.DataType.INT64), keepdims=0)
    picked = op.Gather(op.constant(np.array([row]), ir.DataType.INT64), differs, axis=0)
    if (node := picked.producer()) is not None:
        names = " and ".join(repr(value.name) for value, *_ in checks)
        node.name = op.scope.name(f"the file says of {names} another shape than they have")
    return picked
