"""The running statistics of train-mode BatchNormalization: a graph computes them, a module keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch

from symbolics.errors import RunError
from symbolics.graph.values import HALVES, array_of, attr, made_by, name_of, trains
from symbolics.node.metadata import changes_of, read_cumulative
from symbolics.node.names import NEW_VARIANCE
from symbolics.quirks import copied, read_copies

__all__ = ["Statistics", "batch_statistics", "counter_of", "kept_statistics", "one_value", "plain_statistics", "source_of"]


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

        Raises:
            RunError: The batch has one value for each channel, of which there is no variance.
        """
        batch_mean, batch_var, shape = (results[name] for name in self.values)
        samples, _, *sizes = whole = shape.tolist()  # numbers: operators on a tensor of so few take ten times as long
        count = samples * math.prod(sizes)
        if count == 1:
            raise RunError(f"{self.var!r}: {one_value(whole)}")
        unbiased = batch_var * (count / (count - 1))
        if batches is not None:
            batches.add_(1)
        for running, batch in ((mean, batch_mean), (var, unbiased)):
            if self.momentum is None:
                assert batches is not None
                running.add_((batch - running) / batches)
            else:
                running.mul_(self.momentum).add_(batch, alpha=1 - self.momentum)


def one_value(shape: object = None) -> str:
    """What is wrong with a batch of that shape."""
    of = "" if shape is None else f" of shape {shape}"
    return f"a batch{of} has one value for each channel, of which there is no variance: train with more (a DataLoader: drop_last=True), or use eval()"


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
    graph, carried = model.graph, changes_of(model).carried  # of those the graph itself computes the next values
    nodes = [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]
    buffers = [(node, _buffer(node.inputs[3], 3), _buffer(node.inputs[4], 4)) for node in nodes]
    variances = {mean: var for _, mean, var in buffers if var is not None}  # of a later call torch.export computes it
    for node, mean, _ in buffers:
        x, var = node.inputs[0], variances.get(mean)
        if mean is None or var is None or x is None or mean.name in carried:
            continue
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        stem = f"pythonop/statistics_{len(found)}"
        for position, source, what in ((3, mean, "mean"), (4, var, "var")):
            output = node.outputs[position - 2]
            output.name = output.name or f"{stem}/{what}"
            output.shape = source.shape
        zeros = _zeros(node, mean, var)
        for output, zero in zip(node.outputs[1:], zeros):
            output.type = zero.type
        read_copies(node, *zeros)  # of its own for each node: onnxruntime's kernel writes over them
        shape = ir.Node("", "Shape", [x], name=f"{stem}/shape")
        shape.outputs[0].name = shape.name
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.insert_after(node, shape)
        momentum = None if mean.name in cumulative else attr(node, "momentum")
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        names = (name_of(node.outputs[1]), name_of(node.outputs[2]), name_of(shape.outputs[0]))
        found.append(Statistics(name_of(mean), name_of(var), names, momentum))
    return found


def _zeros(node: ir.Node, *buffers: ir.Value) -> list[ir.Value]:
    """Zeros in the place of the buffers: what momentum 0 makes of finite ones. Of others, which one bad batch leaves, it makes NaN.

    Those of a half type are float32: a batch's variance may be no number of float16 where the running one is.
    """
    tape = ir.tape.Tape()
    found = []
    for buffer in buffers:
        kind = ir.DataType.FLOAT if buffer.dtype in HALVES else buffer.dtype
        assert kind is not None
        zeros = tape.op("Cast", [tape.op("Less", [buffer, buffer])], {"to": kind})
        zeros.type, zeros.shape = ir.TensorType(kind), buffer.shape
        found.append(zeros)
    assert node.graph is not None
    node.graph.insert_before(node, tape.nodes)
    return found


def kept_statistics(graph: ir.Graph) -> set[str]:
    """The buffers that follow from the train-mode BatchNormalizations of a graph, their counts of batches included."""
    norms = [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]
    kept = {name_of(found) for node in norms for position in (3, 4) if (found := _buffer(node.inputs[position], position)) is not None}
    return kept | {counter_of(name) for name in kept if name.endswith("running_mean")}


def plain_statistics(graph: ir.Graph, following: Mapping[str, ir.Value]) -> set[str]:
    """Those of them that nothing else of the graph reads or writes: only of these the nodes alone say the next values.

    Args:
        graph: The graph as it was translated, its outputs the model's results.
        following: Initializer of a buffer that was seen to change -> its next value.
    """
    plain: set[str] = set()
    calls: dict[str, list[ir.Node]] = {}
    variances: dict[str, ir.Value] = {}
    for node in graph:
        if node.op_type == "BatchNormalization" and trains(node) and (mean := _buffer(node.inputs[3], 3)) is not None:
            calls.setdefault(name_of(mean), []).append(node)
            if (var := _buffer(node.inputs[4], 4)) is not None:
                variances[name_of(mean)] = var
    for mean_name, nodes in calls.items():
        var = variances.get(mean_name)
        if var is None or any(map(_is_read, nodes)):
            continue
        mean_after, var_after = following.get(mean_name), following.get(name_of(var))  # None where a trace did not see what changed it
        if mean_after is not None and _start_of_mean(mean_after).name != mean_name:
            continue
        if var_after is not None and _start_of_variance(var_after) is not var:
            continue
        plain |= {mean_name, name_of(var)}
        counter = counter_of(mean_name)
        if mean_name.endswith("running_mean") and counter in following and _counts(following[counter], counter, len(nodes)):
            plain.add(counter)
    return plain


def _start_of_mean(value: ir.Value) -> ir.Value:
    """The running mean before the BatchNormalizations that made this one of it."""
    value = source_of(value)
    while (node := made_by(value, "BatchNormalization")) is not None and value.index() == 1 and node.inputs[3] is not None:
        value = source_of(node.inputs[3])
    return value


def _start_of_variance(value: ir.Value) -> ir.Value:
    """The running variance before the BatchNormalizations that made this one of it."""
    value = source_of(value)
    while (node := value.producer()) is not None and NEW_VARIANCE in node.meta:
        value = source_of(node.meta[NEW_VARIANCE])
    return value


def _is_read(node: ir.Node) -> bool:
    """Whether the new running mean of a BatchNormalization is read by anything but the next of the same module."""
    if len(node.outputs) < 2:
        return False
    mean = node.outputs[1]
    return mean.is_graph_output() or any(
        user.op_type != "BatchNormalization" or not trains(user) or position != 3 for user, position in mean.uses()
    )


def _counts(value: ir.Value, counter: str, calls: int) -> bool:
    """Whether a value is that of a counter, plus 1 for each call; or the counter itself, where a trace did not see that."""
    value, ones = source_of(value), 0
    while (node := made_by(value, "Add")) is not None and node.inputs[0] is not None:
        one = array_of(node.inputs[1])
        if one is not None and (one != 1).any():
            return False
        value, ones = source_of(node.inputs[0]), ones + 1
    return value.name == counter and ones in (0, calls)


def source_of(value: ir.Value) -> ir.Value:
    """What a value is a copy of."""
    while (node := made_by(value, "Identity")) is not None and (x := node.inputs[0]) is not None:
        value = x
    return value
