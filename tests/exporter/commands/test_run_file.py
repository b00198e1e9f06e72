"""What `pythonop run` does, as a function."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from exporter.commands.run_file import run_file
from symbolics.errors import RunError, TrustError
from tests.exporter.runtime.build import forward, record
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]


@pytest.fixture
def path(tmp_path):
    onnx.save(forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True))), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("engine", ["onnxruntime", "reference", "auto"])
def test_runs_and_describes(path, engine, tmp_path):
    x = np.full((3, 4), 0.5, np.float32)
    found = run_file(path, allow=ALLOW, inputs={"x0": x}, output=tmp_path / "y.npz", engine=engine, times=3)
    assert found["outputs"][0]["shape"] == [3, 4]
    assert found["outputs"][0]["mean"] == pytest.approx(np.sin(0.5))
    assert found["live_contexts"] == 0
    with np.load(tmp_path / "y.npz") as saved:
        np.testing.assert_allclose(saved["op0_0"], np.sin(x), rtol=1e-6)


def test_made_up_inputs_follow_the_seed_and_the_dims(path):
    first, again, other = (run_file(path, allow=ALLOW, seed=seed, dims={"x0_0": 7}) for seed in (1, 1, 2))
    assert first["outputs"] == again["outputs"] != other["outputs"]
    assert first["inputs"][0]["shape"] == [7, 2]


def test_refusals(path, tmp_path):
    with pytest.raises(TrustError, match="allow="):
        run_file(path)
    with pytest.raises(RunError, match="no input 'z'"):
        run_file(path, allow=ALLOW, inputs={"z": np.zeros(1)})
    with pytest.raises(RunError, match="cannot write"):
        run_file(path, allow=ALLOW, output=tmp_path / "missing" / "y.npz")
    with pytest.raises(RunError, match="at least once"):
        run_file(path, allow=ALLOW, times=0)
