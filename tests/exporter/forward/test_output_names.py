"""Names of inputs and outputs: those that were asked for, by export() and under the hook, or an error."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class _Several(nn.Module):
    """Outputs: a value, one in a dict, the input itself, a parameter; and a buffer that changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        return y, {"twice": 2 * y}, x, self.linear.bias


X = torch.ones(2, 4)


def _exported(names, dynamo, hooked):
    if not hooked:
        return exporter.export(_Several(), (X,), output_names=names, dynamo=dynamo)
    with exporter.hook() as hook:
        torch.onnx.export(_Several(), (X,), None if dynamo else io.BytesIO(), output_names=names, dynamo=dynamo)
    return hook.program


@pytest.mark.parametrize("hooked", [False, True], ids=["export", "hook"])
def test_outputs_have_the_names_that_were_asked_for(dynamo, hooked):
    program = _exported(["a", "b", "c", "d"], dynamo, hooked)
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert [value.name for value in program.model.graph.inputs] == ["x"]
    assert [value.name for value in program.model.graph.outputs] == ["a", "b", "c", "d", "calls.next"]
    a, b, c, d = exporter.inference_session(program.model).run(["a", "b", "c", "d"], {"x": X.numpy()})
    model = _Several()
    for found, expected in zip((a, b, c, d), (model(X)[0], 2 * model(X)[0], X, model.linear.bias), strict=True):
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-6)
    assert _exported(["a"], dynamo, hooked).model.graph.outputs[0].name == "a"


def test_an_input_that_is_returned_keeps_its_name(dynamo):
    assert [value.name for value in _exported(None, dynamo, False).model.graph.inputs] == ["x"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("abcd", "give a list of names"),
        (["a", ""], "give a list of names"),
        (["a", "a"], "'a' twice"),
        (["x"], "which an input, a parameter or a buffer"),
        (["calls"], "which an input, a parameter or a buffer"),
        (["a", "linear.bias"], "which an input, a parameter or a buffer"),
        (list("abcde"), "5 names, and the model has 4 outputs|number of output names provided"),
        (list("abcdefghi"), "9 names, and the model has 4 outputs|number of output names provided"),
    ],
    ids=str,
)
def test_names_that_no_output_can_have(names, text, dynamo):
    with pytest.raises(ArgumentError, match=text):
        _exported(names, dynamo, False)
