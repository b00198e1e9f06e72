"""Where PyTorch stops gradients, the file has a mark, through optimization, and a plain runtime still runs it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from symbolics.node.names import MARK_COUNT_KEY
from tests.support import nodes
from tests.zoo.stopped import STOPPED, FrozenParameter, Gumbel, Ste


@pytest.mark.parametrize(("model", "behind"), STOPPED, ids=[c[0].__name__ for c in STOPPED])
def test_marks(model, behind, dynamo, tmp_path):
    model = model()
    if isinstance(model, Gumbel) and not dynamo:
        pytest.xfail("torch's TorchScript exporter has no aten::exponential_")
    x = torch.randn(3, 4) * 3
    program = exporter.export(model, (x,), dynamo=dynamo)
    marks = nodes(program.model, "StopGradient")
    assert [m.inputs[0].producer().op_type for m in marks] == behind
    assert program.model.metadata_props[MARK_COUNT_KEY] == str(len(behind))
    assert bool(program.model.functions) == bool(behind), "the mark has a body, once it is needed"
    onnx.checker.check_model(program.model_proto, full_check=True)
    if model.__class__ is not Gumbel:
        program.save(tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
        (got,) = session.run(None, {program.model.graph.inputs[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_told_from_trainable_ones(dynamo):
    from symbolics.node.metadata import read_state

    program = exporter.export(FrozenParameter(), (torch.randn(3, 4),), dynamo=dynamo)
    state = read_state(program.model.metadata_props)
    assert {name: entry.trainable for name, entry in state.items()} == {
        "frozen.weight": False,
        "frozen.bias": False,
        "linear.weight": True,
        "linear.bias": True,
    }


@pytest.mark.parametrize("optimize", [True, False])
def test_marks_survive_torchs_options(optimize):
    with exporter.hook():
        program = torch.onnx.export(Ste(), (torch.randn(3, 4),), dynamo=True, optimize=optimize, verbose=False)
    assert len(nodes(program.model, "StopGradient")) == 1


def test_a_change_through_detach_is_refused(dynamo):
    class Aliased(nn.Module):
        def forward(self, x):
            x = x * 1
            x.detach().mul_(2)
            return x

    with pytest.raises(exporter.ExportError, match=r"mul_, called in module <root>.*memory.*detach\(\)\.clone"):
        exporter.export(Aliased(), (torch.randn(3, 4),), dynamo=dynamo)


def test_the_model_is_as_it_was(dynamo):
    model = Ste()
    before = dict(model.__dict__)
    exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo)
    assert model.__dict__.keys() == before.keys()
    assert model.forward.__func__ is Ste.forward


METHODS = {
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),  # a Python method that calls the method of the same name in C
    "split": lambda x: x.split(2, 1)[0],
    "norm": lambda x: x.norm(dim=1),
    "rsub": lambda x: 1 - x,
    "rpow": lambda x: 2.0**x,
    "rdiv": lambda x: 1 / (x.abs() + 1),
    "floordiv": lambda x: x.abs() // 2 + x,  # of negative floats torch's TorchScript exporter truncates
    "len": lambda x: x * len(x),
    "unique": lambda x: x.sum() + torch.arange(4).unique().sum(),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_tensor_that_are_written_in_python(name, dynamo):
    class Model(nn.Module):
        def forward(self, x):
            return METHODS[name](x * 1.5)

    x = torch.randn(3, 4)
    program = exporter.export(Model(), (x,), dynamo=dynamo)
    (found,) = exporter.reference_evaluator(program).run(None, {program.model.graph.inputs[0].name: x.numpy()})
    np.testing.assert_allclose(found, Model()(x), rtol=1e-5, atol=1e-6)
