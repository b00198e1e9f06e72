"""A Function whose forward leaves PyTorch and computes in numpy, with a batch that may vary, through both exporters.

Without the hook, torch.export fails on it, and the TorchScript exporter writes what it returned for the example as one
constant, without a word.

    python examples/numpy_function.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import exporter


# Files name it by "numpy_function:Smooth", or "examples.numpy_function:Smooth". Run as a script it is "__main__:Smooth",
# which another process cannot import: registering it gives it a name that both know.
class Smooth(torch.autograd.Function):
    """A moving average over the last axis; ``valid`` drops the borders."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, valid: bool = False) -> torch.Tensor:
        kernel = np.ones(width, dtype=np.float32) / width
        rows = [np.convolve(row, kernel, mode="valid" if valid else "same") for row in x.detach().numpy().reshape(-1, x.shape[-1])]
        ctx.length, ctx.kernel, ctx.valid = x.shape[-1], kernel, valid
        return torch.from_numpy(np.stack(rows)).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows = gradient.numpy().reshape(-1, gradient.shape[-1])
        full = [np.convolve(row, ctx.kernel[::-1], mode="full" if ctx.valid else "same") for row in rows]
        return torch.from_numpy(np.stack(full)).reshape(*gradient.shape[:-1], ctx.length), None, None


class Model(nn.Module):
    """A Linear, the average without its borders, another Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Smooth.apply(self.first(x), 3, True))


def main() -> float:
    """Export by both exporters at batch 2, run at batch 5; the largest difference from eager PyTorch."""
    exporter.register(Smooth)
    model, worst = Model(), 0.0
    for dynamo in (True, False):
        program = exporter.export(model, (torch.randn(2, 8),), dynamo=dynamo, dynamic_shapes=({0: "batch"},))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            program.save(path)
            evaluator = exporter.reference_evaluator(path)
            x = torch.randn(5, 8)
            (found,) = evaluator.run(None, {"x": x.numpy()})
        error = float((torch.from_numpy(found) - model(x)).abs().max())
        (node,) = [node for node in program.model.graph if node.op_type == "PythonOp"]
        shapes = f"{list(node.inputs[0].shape)} -> {list(node.outputs[1].shape)}"
        print(f"{'torch.export' if dynamo else 'TorchScript ':12}  {shapes}  batch 5: max error {error:.1e}")
        worst = max(worst, error)
    return worst


if __name__ == "__main__":
    sys.exit(main() > 1e-5)
