"""torch's own ONNXProgram under a hook: it runs, on onnxruntime and onnx.reference, and verify=True compares."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import PythonopWarning
from tests.exporter.commands.cli_targets import Model


def hooked(model, args, **options):
    with exporter.hook():
        return torch.onnx.export(model, args, dynamo=True, verbose=False, **options)


@pytest.fixture(scope="module")
def made():
    model, x = Model(), torch.randn(2, 3)
    return hooked(model, (x,)), model, x


def test_calling_it(made):
    program, model, x = made
    (y,) = program(x)
    torch.testing.assert_close(y, model(x).detach())
    assert isinstance(program, torch.onnx.ONNXProgram)


def test_its_sessions(made):
    program, model, x = made
    program.initialize_inference_session()
    torch.testing.assert_close(program(x)[0], model(x).detach())
    seen = []
    program.initialize_inference_session(
        lambda serialized: seen.append(serialized) or exporter.inference_session(program.model, ["tests.*"])
    )
    torch.testing.assert_close(program(x)[0], model(x).detach())
    assert isinstance(seen[0], bytes)
    torch.testing.assert_close(program.call_reference(x)[0], model(x).detach())
    (inner,) = program.compute_values([program.model.graph.node(-1).inputs[0].name], (x,))
    assert inner.shape == (2, 3)
    program.release()


def test_a_class_that_no_import_finds():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    class Local(nn.Module):
        def forward(self, x):
            return Triple.apply(x)

    assert hooked(Local(), (torch.ones(2),))(torch.ones(2))[0].tolist() == [3, 3]


def test_verify_says_nothing_where_outputs_are_equal():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        hooked(Model(), (torch.randn(2, 3),), verify=True)


def test_verify_says_what_differs():
    class Differs(nn.Module):
        def forward(self, x):
            return x * 2 if torch.compiler.is_exporting() else x * 3

    with pytest.warns(PythonopWarning, match=r"verify=True: the output \w+ differs.*exporter\.verify"):
        hooked(Differs(), (torch.ones(2),), verify=True)


def test_without_a_hook_nothing_changes():
    program = torch.onnx.export(nn.Linear(3, 2), (torch.ones(2, 3),), dynamo=True, verbose=False)
    assert type(program) is torch.onnx.ONNXProgram
