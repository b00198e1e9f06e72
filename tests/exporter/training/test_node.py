"""A training step without PythonOps needs no Python: npm's onnxruntime-node runs the same file to the same losses."""

from __future__ import annotations

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

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# `make node` puts the package there.
FOLDER = Path(os.environ.get("PYTHONOP_NODE_DIR", Path(sys.prefix, "node")))


def _network():
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(36, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).train()


def _described(value):
    return {"type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "data": value.flatten().tolist()}


def test_node_trains_as_python_does(tmp_path):
    if shutil.which("node") is None or not (FOLDER / "node_modules" / "onnxruntime-node").is_dir():
        missing("node", "npm's onnxruntime-node is not installed: `make node` does it where npm is")
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = export_training_step(
        _network(), batches[0][:1], loss=F.cross_entropy, targets=batches[0][1:], optimizer="adamw", hyperparameters={"lr": 0.01}
    )
    step.save(tmp_path / "step.onnx")
    assert {node.domain for node in onnx.load(tmp_path / "step.onnx").graph.node} == {""}
    (tmp_path / "batches.json").write_text(json.dumps([{"input": _described(x), "target": _described(y)} for x, y in batches]))
    command = ["node", str(ROOT / "examples" / "train.mjs"), str(tmp_path / "step.onnx"), str(tmp_path / "batches.json")]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    expected, _ = run(step, batches)
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
