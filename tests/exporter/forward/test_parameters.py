"""Parameters survive: names, bits, ties, kinds; never folded, transposed away or merged."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import exporter
from exporter.forward.case import Case
from exporter.verification.eager import EagerStep, in_float64
from symbolics.node.metadata import read_state
from tests.support import nodes
from tests.zoo.everything import Everything


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_name_maps_to_its_bits(dynamo, training, tmp_path):
    model = Everything().train(training)
    before = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    x = torch.randn(5, 4)
    program = exporter.export(model, (x,), dynamo=dynamo)
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    program.save(tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    initializers = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    state = read_state({p.key: p.value for p in proto.metadata_props})
    assert set(state) == set(before)
    assert set(model.state_dict()) == {name for name, entry in state.items() if entry.persistent}
    for name, tensor in before.items():
        entry = state[name]
        assert initializers[entry.initializer].tobytes() == tensor.numpy().tobytes(), name
        assert entry.kind == ("parameter" if name in dict(model.named_parameters(remove_duplicate=False)) else "buffer")
        assert entry.trainable == (entry.kind == "parameter" and name != "frozen")
        assert entry.persistent == (name != "passing")
        if entry.trainable:
            assert (entry.initializer == name) == (name != "tied.weight")
    assert state["tied.weight"].initializer == "first.weight"
    used = {name for node in proto.graph.node for name in node.input}
    expected = {
        "first.weight",
        "first.bias",
        "twin.weight",
        "twin.bias",
        "matrix",
        "product.0",
        "product.1",
        "norm.weight",
        "norm.bias",
        "frozen",
        "kept",
        "passing",
    }
    assert expected <= used, "each parameter is used where it was used, none is folded away"
    assert [i.name for i in proto.graph.input] == [program.model.graph.inputs[0].name]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name]), f"exporting changed {name}"


def test_the_rest_is_optimized(dynamo):
    class Foldable(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return x * (torch.ones(4) * 2 + 1) * self.weight

    names = [n.op_type for n in nodes(exporter.export(Foldable(), (torch.randn(2, 4),), dynamo=dynamo).model)]
    assert names == ["Mul", "Mul"]


def test_optimize_false(dynamo):
    if not dynamo:
        with exporter.hook() as handle:
            torch.onnx.export(Everything(), (torch.randn(5, 4),), None, dynamo=False, do_constant_folding=False)
        assert "Constant" in [n.op_type for n in nodes(handle.program.model)]
    else:
        program = exporter.export(Everything(), (torch.randn(5, 4),), optimize=False)
        assert {"first.weight", "product.1"} <= set(program.model.graph.initializers)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, momentum=0.7, eps=0.1),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.BatchNorm1d(4).double(),
    ],
    ids=["plain", "no affine", "momentum", "no stats", "double"],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_norm(norm, training, dynamo, tmp_path):
    import copy

    import onnxruntime

    model = nn.Sequential(copy.deepcopy(norm)).train(training)
    x = torch.randn(6, 4, dtype=next(iter(model.state_dict().values()), torch.zeros(())).dtype) * 3 + 2
    program = exporter.export(model, (x,), dynamo=dynamo)
    program.save(tmp_path / "norm.onnx")
    (got,) = onnxruntime.InferenceSession(str(tmp_path / "norm.onnx")).run(None, {program.model.graph.inputs[0].name: x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, copy.deepcopy(model)(x).numpy(), rtol=1e-4, atol=1e-5)


def test_external_data(tmp_path, dynamo):
    model = Everything()
    program = exporter.export(model, (torch.randn(5, 4),), dynamo=dynamo)
    program.save(tmp_path / "model.onnx", external_data=True)
    data = [p.name for p in tmp_path.glob("model.onnx.*.data")]
    assert len(data) == any(v.const_value.nbytes > 256 for v in program.model.graph.initializers.values())
    loaded = onnx.load(tmp_path / "model.onnx")
    assert (
        onnx.numpy_helper.to_array(next(i for i in loaded.graph.initializer if i.name == "matrix")).tobytes()
        == model.matrix.detach().numpy().tobytes()
    )
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", *data}


class Counts(nn.Module):
    """State that forward changes, beside that of BatchNorm, which a file keeps: a buffer, and an attribute."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.kept = torch.zeros(4)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.kept = self.kept + self.mean
        return self.norm(x - self.kept)


def test_changes_of_state_that_the_file_loses_are_warned_of(dynamo):
    with pytest.warns(exporter.PythonopWarning) as caught:
        exporter.export(Counts(), (torch.randn(3, 4),), dynamo=dynamo)
    (message,) = [str(w.message) for w in caught if issubclass(w.category, exporter.PythonopWarning)]
    assert "cannot carry: 'kept' (it is an attribute of a module, not a buffer)." in message
    assert "return the new value from forward" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        exporter.export(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)), (torch.randn(3, 4),), dynamo=dynamo)


class Rotated(nn.Module):
    """Complex numbers of three kinds: a parameter, a buffer, and what a convolution is made of."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 1, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.rand(6)))
        self.conv = nn.Conv1d(2, 3, 3, dtype=torch.complex64)

    def forward(self, x):
        return torch.view_as_real(self.conv(torch.view_as_complex(x)) * self.turn * self.scale)


def test_complex_state():
    model, x = Rotated(), torch.randn(2, 2, 8, 2)
    program = exporter.export(model, (x,))
    onnx.checker.check_model(program.model_proto, full_check=True)
    module = exporter.load(program)
    theirs, ours = model(x), module(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    theirs.square().sum().backward(), ours.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(module.get_parameter(name), torch.view_as_real(parameter))
        torch.testing.assert_close(module.get_parameter(name).grad, torch.view_as_real(parameter.grad), rtol=1e-4, atol=1e-4)


def test_complex_state_as_verify_has_it():
    step = EagerStep.run(Case(Rotated(), (torch.randn(2, 2, 8, 2),)))
    assert step.gradients["parameter gradient", "scale"].shape == (3, 1, 2)
    assert in_float64(Case(Rotated(), (torch.randn(2, 2, 8, 2),)), step, None) is None


_GLOBAL = nn.Linear(4, 4)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = [nn.Parameter(torch.randn(4, 4))]

    def forward(self, x):
        return x @ self.weights[0]


class Global(nn.Module):
    def forward(self, x):
        return _GLOBAL(x)


@pytest.mark.parametrize(
    ("model", "says"), [(Listed(), r"1 parameter that is not its own \(shape \[4, 4\]"), (Global(), "2 parameters that are")]
)
def test_parameters_that_are_not_the_models_are_not_lost_in_silence(model, says):
    with pytest.warns(exporter.PythonopWarning, match=f"the model computes with {says}"):
        exporter.export(model, (torch.randn(2, 4),))
    with pytest.raises(exporter.ExportError, match="a parameter that is not the model's"):
        exporter.export(model, (torch.randn(2, 4),), dynamo=False)


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.MultiheadAttention(4, 2),
        Everything(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_those_that_are_the_models_are_told_from_others(model):
    args = (torch.randn(5, 4),) * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model computes with")
        exporter.export(model, args)
