"""portable= and opaque= of one export, on both exporters."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from symbolics.errors import PythonopWarning
from tests.exporter.commands.test_doctor_file import HERE, OPAQUE, Net, doctor


@pytest.mark.parametrize("dynamo", [True, False])
def test_portable_and_opaque_together(dynamo, tmp_path):
    """The Function becomes standard operators, what opaque= names stays, and both commands say so."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    with pytest.warns(PythonopWarning):  # portable= says what cannot be
        program = exporter.export(model, (x,), portable=True, opaque=OPAQUE, dynamo=dynamo)
    program.save(tmp_path / "model.onnx")
    found = json.loads(doctor(tmp_path / "model.onnx", "--json").stdout)
    assert {each["function"] for each in found["python"]} == {f"{HERE}:Branch", "aten::linalg_solve.default"}
    assert {call.function: call.kind for call in program.portable}[f"{HERE}:Double"] == "function"
    text = CliRunner().invoke(main, ["inspect", str(tmp_path / "model.onnx")]).stdout
    assert "2 PythonOp" in text
    module = exporter.load(tmp_path / "model.onnx", allow=found["allow"])
    inputs = [x.clone().requires_grad_() for _ in "ab"]
    for side, given in zip((model, module), inputs, strict=True):
        side(given).square().sum().backward()
    torch.testing.assert_close(module(x), model(x))
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-3, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)
