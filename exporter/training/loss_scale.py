"""The loss scale of float16 training: torch.amp.GradScaler as a part of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from exporter.training.carried import Carried
from symbolics.graph.builder import Builder

__all__ = ["LossScale"]

# torch.amp.GradScaler's defaults.
_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 65536.0, 2.0, 0.5, 2000
_FLOAT = ir.DataType.FLOAT


class LossScale:
    """The factor that keeps float16 gradients from vanishing, and how it changes from step to step."""

    def __init__(self, carried: Carried) -> None:
        self._carried = carried
        self._scale = carried.new("state.loss_scale", np.array(_SCALE, np.float32))
        self._growth = carried.new("state.growth_tracker", np.array(0, np.int64))

    def cotangent(self, kind: ir.DataType) -> ir.Value:
        """The gradient of the loss: the scale, made in front of all other nodes."""
        graph = self._carried.graph
        node = ir.Node("", "Cast", [self._scale], [ir.AttrInt64("to", int(kind))], name="step/scale")
        node.outputs[0].name, node.outputs[0].type = "step/scale", ir.TensorType(kind)
        graph.insert_before(graph[0], node)
        return node.outputs[0]

    def unscaled(self, op: Builder, gradients: Mapping[str, ir.Value], accumulate: int) -> dict[str, ir.Value]:
        """The mean of so many accumulated gradients, without the scale."""
        inverse = op.Div(1 / accumulate, self._scale)
        return {name: g * op.Cast(inverse, to=g.dtype) for name, g in gradients.items()}

    def skip_overflow(self, op: Builder, changed: Iterable[ir.Value], gradients: Mapping[str, ir.Value]) -> None:
        """Where a gradient is not finite nothing changes but the scale."""
        following = self._carried.next
        # x - x is 0 for finite x, NaN for the others, and NaN survives the sum.
        rests = [op.Cast(op.ReduceSum(op.Sub(g, g), None, keepdims=0), to=_FLOAT) for g in gradients.values()]
        finite = op.Equal(op.Sum(*rests) if len(rests) > 1 else rests[0], op.constant(0.0, _FLOAT))
        for old in changed:
            following[old] = op.Where(finite, following[old], self._carried.written.get(old, old))
        grown = op.Add(self._growth, 1)
        full = op.Equal(grown, _INTERVAL)
        larger = op.Where(full, op.Mul(self._scale, _GROWTH), self._scale)
        following[self._scale] = op.Where(finite, larger, op.Mul(self._scale, _BACKOFF))
        following[self._growth] = op.Where(op.And(finite, op.Not(full)), grown, op.i64(0))
