"""A training step without PythonOps needs no Python: npm's onnxruntime-node runs the same file to the same losses."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exporter.training.step import export_training_step
from tests.exporter.training.loop import run
from tests.processes import ROOT
from tests.support import missing
from tests.zoo.portable import Surrogate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# `make node` puts the package there.
FOLDER = Path(os.environ.get("PYTHONOP_NODE_DIR", Path(sys.prefix, "node")))


def _network():
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(36, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).train()


class _Spiking(nn.Module):
    """Three steps of two layers of leaky neurons; the step function has a surrogate's derivative."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(24, 3)

    def forward(self, x):
        potential, total = torch.zeros(x.shape[0], 24), torch.zeros(x.shape[0], 3)
        for _ in range(3):
            potential = 0.9 * potential + self.inner(x)
            spikes = Surrogate.apply(potential - 0.3, 2.0)
            potential = potential - 0.3 * spikes
            total = total + self.outer(spikes)
        return total


def _described(value):
    return {"type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "data": value.flatten().tolist()}


def _node(tmp_path, step, batches):
    """The losses of a training loop in Node."""
    if shutil.which("node") is None or not (FOLDER / "node_modules" / "onnxruntime-node").is_dir():
        missing("node", "npm's onnxruntime-node is not installed: `make node` does it where npm is")
    step.save(tmp_path / "step.onnx")
    names = (*step.layout.inputs, *step.layout.targets)
    (tmp_path / "batches.json").write_text(json.dumps([dict(zip(names, map(_described, batch), strict=True)) for batch in batches]))
    command = ["node", str(ROOT / "examples" / "train.mjs"), str(tmp_path / "step.onnx"), str(tmp_path / "batches.json")]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_node_trains_as_python_does(tmp_path):
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = export_training_step(
        _network(), batches[0][:1], loss=F.cross_entropy, targets=batches[0][1:], optimizer="adamw", hyperparameters={"lr": 0.01}
    )
    losses = _node(tmp_path, step, batches)
    assert {node.domain for node in onnx.load(tmp_path / "step.onnx").graph.node} == {""}
    expected, _ = run(step, batches)
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def test_node_trains_a_function_with_a_backward_of_its_own(dynamo, tmp_path):
    """200 steps of AdamW on the same file: Node beside Python's onnxruntime, and beside eager from a start that is off by rounding."""
    torch.manual_seed(0)
    model, task = _Spiking().train(), torch.randn(8, 3)
    inputs = [torch.randn(32, 8) for _ in range(200)]
    batches = [(x, (x @ task).argmax(-1)) for x in inputs]
    step = export_training_step(
        model,
        batches[0][:1],
        loss=F.cross_entropy,
        targets=batches[0][1:],
        optimizer="adamw",
        hyperparameters={"lr": 0.01},
        dynamo=dynamo,
        portable=True,
    )
    assert {call.kind for call in step.portable} == {"function"}
    losses = _node(tmp_path, step, batches)
    assert len(losses) == 200
    np.testing.assert_allclose(losses[:20], run(step, batches[:20])[0], rtol=1e-4)
    curves = np.array([_eager(model, batches, shift) for shift in (0, 1e-6, -1e-6, 2e-6, -2e-6)])
    smooth = np.ones(20) / 20
    curve, envelope = np.convolve(losses, smooth, "valid"), np.array([np.convolve(c, smooth, "valid") for c in curves])
    width = 3 * (envelope.max(0) - envelope.min(0)).max() + 1e-3  # a spike more or less makes a curve of its own
    assert (curve > envelope.min(0) - width).all()
    assert (curve < envelope.max(0) + width).all()
    assert curve[-1] < 0.6 * curve[0]


def _eager(model, batches, shift):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + shift)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
