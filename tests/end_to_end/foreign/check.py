"""What a file that somebody else exported gives here: outputs beside plain onnxruntime, gradients beside differences, a loss that falls."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

import exporter

__all__ = ["Outcome", "check", "draw_weights"]

#: Relative steps of the central differences: the best one counts, for float32 rounds at small ones and kinks are met at large ones.
STEPS = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6)
TRAINED = 8


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        parameters: How many parameters the loaded module has, in elements.
        outputs: The largest difference of an output from plain onnxruntime's, over the output's largest element, or a thousandth.
        gradient: |directional derivative - central difference| over the derivative.
        losses: The loss before and after some steps of Adam.
    """

    parameters: int
    outputs: float
    gradient: float
    losses: tuple[float, float]

    @property
    def fine(self) -> bool:
        return self.outputs <= 1e-3 and self.gradient <= 1e-2 and self.losses[1] < self.losses[0]


def check(path: Path, feeds: dict[str, np.ndarray], *, drawn: bool = False) -> Outcome:
    """Load a file, compare, and train it for some steps.

    Args:
        path: The ONNX file.
        feeds: Its inputs.
        drawn: Whether to compare the outputs also, and all else only, with weights that draw_weights drew.
    """
    torch.manual_seed(0)
    model = onnx.load(path)
    inputs = {name: torch.from_numpy(array.copy()) for name, array in feeds.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = _difference(model, inputs)
        if drawn:
            draw_weights(model)
        model = _without_last_activation(model)
        if drawn:  # without the last Softmax, which answers with one class whatever the difference
            outputs = float(np.maximum(outputs, _difference(model, inputs)))
        module = exporter.load(model)
        gradient = statistics.median(_slope(module, inputs) for _ in range(3))
        return Outcome(sum(p.numel() for p in module.parameters()), outputs, gradient, _train(module, inputs))


def draw_weights(model: onnx.ModelProto) -> None:
    """Put random initializers in the place of the float tensors that ConstantOfShape makes of a constant shape, all of one number.

    Matrices and kernels keep the variance of their input; what has one axis, biases and the four vectors of a BatchNormalization,
    lies between 0.5 and 1.5.
    """
    random = np.random.default_rng(0)
    shapes = {each.name: onnx.numpy_helper.to_array(each).tolist() for each in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == "ConstantOfShape" and node.input[0] in shapes]:
        shape = shapes[node.input[0]]
        wide = random.standard_normal(shape) * np.sqrt(1 / np.prod(shape[1:]))
        weight = wide if len(shape) > 1 else random.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float32), node.output[0]))
        model.graph.input.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape))  # as IR 3 wants it
        model.graph.node.remove(node)


def _without_last_activation(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model that ends in front of a last Sigmoid or Softmax: a network that is sure of its answer has gradients of almost nothing behind it."""
    makers = {name: node for node in model.graph.node for name in node.output}
    for output in model.graph.output:
        node = makers.get(output.name)
        if node is not None and node.op_type in ("Sigmoid", "Softmax"):
            output.name = node.input[0]
            output.type.tensor_type.ClearField("shape")
    return model


def _difference(model: onnx.ModelProto, inputs: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        found = exporter.load(model).flat(**inputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    plain = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    pairs = [(a.numpy().astype(np.float64), b.astype(np.float64)) for a, b in zip(found, plain, strict=True) if b.size]
    return float(np.max([np.abs(a - b).max() / np.maximum(np.abs(b).max(), 1e-3) for a, b in pairs]))  # numpy's: a NaN stays


def _floats(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [y for y in outputs if y.is_floating_point() and y.requires_grad]


def _slope(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """A directional derivative of all inputs and parameters at once, beside central differences of plain forwards.

    The direction is, in each tensor, its gradient plus as much noise, as long as the tensor: along the gradient a difference of float32 says most.
    """
    given = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    sources = [*(x for x in given.values() if x.requires_grad), *module.parameters()]
    found = _floats(module.flat(**given))
    seeds = [torch.randn_like(y) for y in found]
    gradients = torch.autograd.grad(found, sources, seeds, allow_unused=True)
    sources, gradients = zip(*((s, g) for s, g in zip(sources, gradients, strict=True) if g is not None), strict=True)
    moves = [(_unit(g) + torch.randn_like(g)) * (_length(s.detach()) + 1e-3) for s, g in zip(sources, gradients, strict=True)]
    slope = sum((g.double() * m.double()).sum() for g, m in zip(gradients, moves, strict=True))
    before = [s.detach().clone() for s in sources]

    def along(step: float) -> torch.Tensor:
        with torch.no_grad():
            for source, value, move in zip(sources, before, moves, strict=True):
                source.copy_(value + step * move)
            kept = [y for y in module.flat(**given) if y.is_floating_point()]
            return sum((y.double() * u.double()).sum() for y, u in zip(kept, seeds, strict=True))

    try:
        errors = [abs((along(step) - along(-step)) / (2 * step) - slope) / abs(slope) for step in STEPS]
    finally:
        with torch.no_grad():
            for source, value in zip(sources, before, strict=True):
                source.copy_(value)
    return float(min(errors))


def _length(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / _length(x).clamp_min(1e-30)


def _train(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Adam drives the first output to what it is not."""
    target = torch.randn_like(_floats(module.flat(**inputs))[0])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    losses = []
    for _ in range(TRAINED):
        optimizer.zero_grad()
        loss = (_floats(module.flat(**inputs))[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]
