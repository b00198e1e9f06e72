"""The running statistics of train-mode BatchNormalization: a graph computes them, a module keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from exporter.randomness import trains
from symbolics.file import read_cumulative

__all__ = ["Statistics", "batch_statistics"]


@dataclass(frozen=True)
class Statistics:
    """One BatchNormalization whose statistics are buffers.

    Attributes:
        mean, var: The initializers that hold them.
        values: What the graph gives out for them: the new mean, the new variance, the shape of the input.
        momentum: ONNX's: the share of the old value. None: the new value is the batch's own, and the running one is the
            average of all batches.
    """

    mean: str
    var: str
    values: tuple[str, str, str]
    momentum: float | None

    @torch.no_grad()
    def update(self, mean: torch.Tensor, var: torch.Tensor, batches: torch.Tensor | None, results: dict[str, torch.Tensor]) -> None:
        """Take over what a run computed. torch's running variance is of the unbiased kind, ONNX's is not.

        Args:
            mean, var: The buffers.
            batches: The buffer that counts, int64 scalar, None where there is none.
            results: name -> value, of the run.
        """
        new_mean, new_var, shape = (results[name] for name in self.values)
        count = shape.prod() // shape[1]
        unbiased = count / (count - 1)
        if batches is not None:
            batches.add_(1)
        if self.momentum is None:
            assert batches is not None
            mean.add_((new_mean - mean) / batches)
            var.add_((new_var * unbiased - var) / batches)
        else:
            kept = var * self.momentum
            mean.copy_(new_mean)
            var.copy_(kept + (new_var - kept) * unbiased)


def _initializer(value: ir.Value | None) -> str | None:
    """The buffer behind a statistic: itself, or under the Where of `symbolics.batch_norm.pin_running_statistics`."""
    if value is not None and value.producer() is not None:
        node = value.producer()
        value = node.inputs[1] if node.op_type == "Where" and node.inputs[1] is node.inputs[2] else None
    return value.name if value is not None and value.is_initializer() else None


def batch_statistics(model: ir.Model) -> list[Statistics]:
    """The train-mode BatchNormalizations of the main graph; each gets named outputs for its statistics, in place."""
    found = []
    cumulative = read_cumulative(model.metadata_props)
    graph = model.graph
    for node in [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]:
        mean, var = _initializer(node.inputs[3]), _initializer(node.inputs[4])
        x = node.inputs[0]
        if mean is None or var is None or x is None:
            continue
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        stem = f"pythonop/statistics_{len(found)}"
        for output, source, what in zip(node.outputs[1:], node.inputs[3:5], ("mean", "var"), strict=True):
            output.name = output.name or f"{stem}/{what}"
            output.type, output.shape = source.type, source.shape  # type: ignore[union-attr]
        shape = ir.Node("", "Shape", [x], name=f"{stem}/shape")
        shape.outputs[0].name = shape.name
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.insert_after(node, shape)
        momentum: float | None = None
        if mean in cumulative:
            node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        else:
            momentum = node.attributes.get_float("momentum", 0.9)
        names = (node.outputs[1].name, node.outputs[2].name, shape.name)
        found.append(Statistics(mean, var, names, momentum))  # type: ignore[arg-type]
    return found
