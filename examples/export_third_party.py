"""Export a model that calls somebody else's autograd Function: attention with the weights of entmax.

The Function stays one PythonOp node. The file is saved, looked into, and run again on onnx.reference.

    python examples/export_third_party.py [model.onnx]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import onnx
import torch
from entmax import entmax15
from torch import nn

import exporter


class SparseAttention(nn.Module):
    """Self-attention that gives most positions no weight at all."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return entmax15(scores, dim=-1) @ self.value(x)


def main(path: Path) -> float:
    """Export, save, inspect, run; the largest difference from eager PyTorch."""
    model, x = SparseAttention(), torch.randn(2, 6, 16)

    # Export at batch 2, with a batch that may vary.
    program = exporter.export(model, (x,), dynamic_shapes=({0: "batch"},))
    program.save(path)

    # What the file says about the call: which Function, and how each of its arguments was passed.
    for node in onnx.load(path).graph.node:
        if node.op_type == "PythonOp":
            said = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            where = {prop.key: prop.value for prop in node.metadata_props}
            print(f"{said['name'].decode()}: arguments {said['input_convention'].decode()!r} (d: a tensor, c: a constant)")
            print(f"  called at {where['pythonop.source']}")

    # Another process would start here. A file may name only what we allow: here, the modules of entmax.
    evaluator = exporter.reference_evaluator(path, allow=["entmax.*"])
    larger = torch.randn(5, 6, 16)
    (found,) = evaluator.run(None, {"x": larger.numpy()})
    error = float((torch.from_numpy(found) - model(larger)).abs().max())
    print(f"batch 5, exported at batch 2: max error {error:.1e}")
    return error


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else folder + "/model.onnx")) > 1e-5)
