"""``pythonop gradient --feed-weights``: a training loop in another language feeds the new weights in each run."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from tests.exporter.commands.test_cli_files import cli


@pytest.mark.parametrize("wrt", [[], ["--wrt", "weight"]], ids=["all", "one"])
def test_weights_are_fed(tmp_path, wrt):
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    exporter.export(model, (x,), input_names=["x"], output_names=["y"]).save(tmp_path / "model.onnx")
    result = cli("gradient", tmp_path / "model.onnx", "-o", tmp_path / "training.onnx", "--feed-weights", *wrt)
    assert result.exit_code == 0, result.output
    session = onnxruntime.InferenceSession(tmp_path / "training.onnx")
    assert {value.name for value in session.get_overridable_initializers()} == ({"weight"} if wrt else {"weight", "bias"})
    seed, names = np.ones((5, 3), np.float32), [value.name for value in session.get_outputs()]
    for scale in (None, 2.0):
        fed = {} if scale is None else {"weight": (scale * model.weight).detach().numpy()}
        found = dict(zip(names, session.run(None, {"x": x.numpy(), "y_grad": seed, **fed}), strict=True))
        weight = model.weight.detach() * (scale or 1.0)
        np.testing.assert_allclose(found["y"], torch.nn.functional.linear(x, weight, model.bias).detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["weight_grad"], (torch.ones(3, 5) @ x).numpy(), rtol=1e-5, atol=1e-6)
