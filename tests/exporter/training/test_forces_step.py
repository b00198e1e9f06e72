"""A training step on forces of a model with Functions: their backward is differentiated, in the file of the step as in eager."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import Cube


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        x = x.requires_grad_()
        energy = Cube.apply(self.linear(x)).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -gradient


def loss(found, forces):
    return (found[1] - forces).square().mean() + found[0].square() * 1e-3


@pytest.mark.parametrize("artifacts", [False, True], ids=["file", "artifacts"])
def test_it_is_saved_and_steps_as_eager(tmp_path, dynamo, artifacts):
    torch.manual_seed(0)
    model, x, forces = Field(), torch.randn(5, 3), torch.randn(5, 3)
    options = {"loss": loss, "targets": (forces,), "optimizer": "sgd", "hyperparameters": {"lr": 0.01}, "dynamo": dynamo}
    step = exporter.export_training_step(model, (x.clone(),), **options)
    assert any(node.op_type == "PythonOpBackward" for node in step.model.graph)
    if artifacts:
        exporter.write_artifacts(step, exporter.export(model, (x.clone(),), dynamo=dynamo), tmp_path)
        trainer = exporter.Trainer.load(tmp_path, allow=["tests.*"])
    else:
        step.save(tmp_path / "step.onnx")  # which onnx.checker passes and onnxruntime opens
        onnx.checker.check_model(str(tmp_path / "step.onnx"))
        trainer = exporter.Trainer.load(tmp_path / "step.onnx", allow=["tests.*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        found = float(trainer.step({"x": x, "target": forces}))
        optimizer.zero_grad()
        wanted = loss(model(x.clone()), forces)
        wanted.backward()
        optimizer.step()
        assert found == pytest.approx(float(wanted), rel=1e-5)
