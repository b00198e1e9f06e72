"""The running statistics of train-mode BatchNormalization: a graph computes them, a module keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from symbolics.graph.values import attr, name_of, trains
from symbolics.node.metadata import read_cumulative
from symbolics.quirks import copied, read_copies

__all__ = ["Statistics", "batch_statistics", "counter_of", "kept_statistics"]


@dataclass(frozen=True)
class Statistics:
    """One BatchNormalization whose statistics are buffers.

    Attributes:
        mean, var: The initializers that hold them.
        values: What the graph gives out: the batch's mean, its biased variance, the shape of the input.
        momentum: ONNX's: the share of the old value. None: the running value is the average of all batches.
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
        batch_mean, batch_var, shape = (results[name] for name in self.values)
        count = shape.prod() // shape[1]
        unbiased = batch_var * (count / (count - 1))
        if batches is not None:
            batches.add_(1)
        for running, batch in ((mean, batch_mean), (var, unbiased)):
            if self.momentum is None:
                assert batches is not None
                running.add_((batch - running) / batches)
            else:
                running.mul_(self.momentum).add_(batch, alpha=1 - self.momentum)


def _buffer(value: ir.Value | None, position: int) -> ir.Value | None:
    """The initializer behind a statistic: itself, that of which it is a copy, or before the node of an earlier call of the same
    module, from which torch.export takes it.
    """
    while value is not None and value.producer() is not None:
        node = value.producer()
        assert node is not None
        if (source := copied(value)) is not None:
            value = source
        elif node.op_type == "BatchNormalization" and value.index() == position - 2:
            value = node.inputs[position]
        else:
            return None
    return value if value is not None and value.is_initializer() else None


def counter_of(mean: str) -> str:
    """The name of the count of batches beside a running mean."""
    return mean.removesuffix("running_mean") + "num_batches_tracked"


def batch_statistics(model: ir.Model) -> list[Statistics]:
    """The train-mode BatchNormalizations of the main graph; each gets named outputs for its batch's statistics, in place.

    A module that is called twice has two of them over the same buffers: so the nodes give out what the batch says
    (momentum 0), and who keeps the buffers lets them follow, one node after the other. For graphs whose state are inputs.
    """
    found: list[Statistics] = []
    cumulative = read_cumulative(model.metadata_props)
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]
    buffers = [(node, _buffer(node.inputs[3], 3), _buffer(node.inputs[4], 4)) for node in nodes]
    variances = {mean: var for _, mean, var in buffers if var is not None}  # of a later call torch.export computes it
    for node, mean, _ in buffers:
        x, var = node.inputs[0], variances.get(mean)
        if mean is None or var is None or x is None:
            continue
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        stem = f"pythonop/statistics_{len(found)}"
        for position, source, what in ((3, mean, "mean"), (4, var, "var")):
            output = node.outputs[position - 2]
            output.name = output.name or f"{stem}/{what}"
            output.type, output.shape = source.type, source.shape
        read_copies(node, mean, var)  # the caller's own memory is behind these inputs
        shape = ir.Node("", "Shape", [x], name=f"{stem}/shape")
        shape.outputs[0].name = shape.name
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.insert_after(node, shape)
        momentum = None if mean.name in cumulative else attr(node, "momentum")
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        names = (name_of(node.outputs[1]), name_of(node.outputs[2]), name_of(shape.outputs[0]))
        found.append(Statistics(name_of(mean), name_of(var), names, momentum))
    return found


def kept_statistics(graph: ir.Graph) -> set[str]:
    """The buffers that follow from the train-mode BatchNormalizations of a graph, their counts of batches included."""
    norms = [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]
    kept = {name_of(found) for node in norms for position in (3, 4) if (found := _buffer(node.inputs[position], position)) is not None}
    return kept | {counter_of(name) for name in kept if name.endswith("running_mean")}
