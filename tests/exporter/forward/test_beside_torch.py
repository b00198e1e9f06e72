"""What torch.onnx.export alone makes of plain models, and ours once made otherwise; tests/end_to_end/alone has the whole table."""

from __future__ import annotations

import copy
import io

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import Double


def _under_the_hook(model, args, dynamo, **options):
    file = io.BytesIO()
    with exporter.hook():
        torch.onnx.export(model, args, file, dynamo=dynamo, **options)
    return onnx.load_from_string(file.getvalue())


def _run(model, *args):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], (arg.numpy() for arg in args), strict=True)))


def test_names_of_inputs_that_go_on_with_the_parameters(dynamo):
    """As in torch's own tutorial: ["image", "learned_0", ...]."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4)
    made = _under_the_hook(model, (x,), dynamo, input_names=["image", *(f"learned_{i}" for i in range(4))], output_names=["scores"])
    assert [value.name for value in made.graph.input] == ["image"]
    assert {value.name for value in made.graph.initializer} >= set(model.state_dict())
    np.testing.assert_allclose(_run(made, x)[0], model(x).detach(), rtol=1e-5, atol=1e-6)


class _Called(nn.Linear):
    def __call__(self, x, factor=2.0):
        return super().__call__(x + 1) * factor


def test_a_model_whose_class_has_a_call_of_its_own(dynamo):
    """forward() was told from what surrounds it: its result was there twice."""
    model, x = _Called(4, 3), torch.randn(5, 4)
    model.register_forward_hook(lambda module, args, result: result.sin())
    before = dict(vars(model))
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert type(model) is _Called and dict(vars(model)) == before
    loaded = exporter.load(program)
    torch.testing.assert_close(loaded(x), model(x))
    for net in (loaded, model):
        net(x).square().sum().backward()
    torch.testing.assert_close(dict(loaded.named_parameters())["weight"].grad, model.weight.grad)


def test_an_error_leaves_a_model_with_a_call_of_its_own_as_it_was():
    class Broken(_Called):
        def forward(self, x):
            raise ValueError("no")

    model = Broken(4, 3)
    with pytest.raises(Exception, match="no"):
        exporter.export(model, (torch.randn(5, 4),), dynamo=False)
    assert type(model) is Broken and "forward" not in vars(model)


def test_a_complex_result():
    """Its declared rank was taken for a wrong one: onnx.checker refused the file."""

    class Net(nn.Module):
        def forward(self, x):
            return x * 2, x.abs()

    x = torch.randn(3, 4, dtype=torch.cfloat)
    program = exporter.export(Net(), (x,))
    got = _run(program.model_proto, torch.view_as_real(x))
    np.testing.assert_allclose(got[0], torch.view_as_real(x * 2), rtol=1e-6)
    np.testing.assert_allclose(got[1], x.abs(), rtol=1e-6)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_result_without_a_gradient_keeps_its_name(around):
    class Net(nn.Linear):
        @around()
        def forward(self, x):
            return super().forward(x)

    model, x = Net(4, 3), torch.randn(5, 4)
    alone = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    program = exporter.export(model, (x,))
    assert [value.name for value in program.model.graph.outputs] == [value.name for value in alone.model.graph.outputs]
    assert not exporter.load(program)(x).requires_grad


def test_a_quantised_model_on_torchscript():
    """torch has translations of its quantised operators, from opset 10 on, and traces such a model beforehand."""
    from torch.ao import quantization

    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 3), quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    quantization.prepare(model, inplace=True)
    model(torch.randn(64, 4))
    model, x = quantization.convert(model), torch.randn(5, 4)
    got = _run(exporter.export(model, (x,), dynamo=False).model_proto, x)[0]
    np.testing.assert_allclose(got, model(x), atol=2 * float(model[1].scale))


class _Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 100))

    def forward(self, x):
        return Double.apply(x) @ self.weight


@pytest.mark.parametrize("option", [{"keep_initializers_as_inputs": True}, {"external_data": True}, {}])
def test_save_does_what_the_export_was_told_of_the_file(option, dynamo, tmp_path):
    """export() took these options and dropped them."""
    exporter.export(_Doubled(), (torch.randn(5, 4),), dynamo=dynamo, **option).save(tmp_path / "m.onnx")
    made = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert len(made.graph.input) == (2 if "keep_initializers_as_inputs" in option else 1)
    assert len(made.graph.initializer) == 1
    assert len(list(tmp_path.iterdir())) == (2 if "external_data" in option else 1)


def test_parameters_that_are_left_out_are_inputs(dynamo):
    """As in torch; the nodes read what was not there."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), torch.randn(5, 4)
    made = _under_the_hook(model, (x,), dynamo, export_params=False, input_names=["x"])
    state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    assert [value.name for value in made.graph.input] == ["x", *state]
    np.testing.assert_allclose(_run(made, x, *state.values())[0], model(x).detach(), rtol=1e-5, atol=1e-6)


def test_no_names_of_inputs_are_forwards_own(dynamo):
    made = _under_the_hook(nn.Linear(4, 3), (torch.randn(5, 4),), dynamo, input_names=())
    assert [value.name for value in made.graph.input] == ["input"]


class _Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self.layer(x)) * self.scale if bool(x.sum() > 0) else x + 1
        return x


def test_a_compiled_model_is_verified(quick_verify):
    model, x = torch.jit.trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(3, 4)), torch.randn(3, 4)
    report = exporter.verify(model, (x,), dynamo=False)
    assert report.ok and {row.kind for row in report.rows} >= {"output", "parameter gradient"}
    program = exporter.export(model, (x,), dynamo=False, dynamic_shapes={"input": {0: "n"}})
    assert [value.name for value in program.model.graph.inputs] == ["input"]
    assert str(program.model.graph.inputs[0].shape[0]) == "n"


def test_a_scripted_model_with_a_loop():
    model, x = torch.jit.script(_Steps()), torch.randn(3, 4)
    loaded = exporter.load(exporter.export(model.eval(), (x, torch.tensor(2)), dynamo=False))
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }
    for steps in (0, 1, 3):
        for each in (x, x.abs() + 1):
            model.zero_grad(), loaded.zero_grad()
            one, two = model(each, steps), loaded(each, torch.tensor(steps))
            torch.testing.assert_close(two, one)
            if steps:
                one.square().sum().backward(), two.square().sum().backward()
                for name, parameter in loaded.named_parameters():
                    torch.testing.assert_close(parameter.grad, dict(model.named_parameters())[name].grad)


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class _Detaches(nn.Module):
    def forward(self, x):
        return x.detach() * 2


class _Doubles(nn.Module):
    def forward(self, x):
        return Double.apply(x)


def test_what_a_scripted_model_would_lose():
    x = torch.randn(3, 4)
    with pytest.warns(exporter.errors.PythonopWarning, match="count"):
        exporter.export(torch.jit.script(_Counts()).eval(), (x,), dynamo=False)
    with pytest.raises(exporter.ExportError, match=r"ScriptModule that calls aten::detach: its gradient"):
        exporter.export(torch.jit.script(_Detaches()), (x,), dynamo=False)
    with pytest.raises(exporter.ExportError, match=r"ScriptModule that calls Double"):
        exporter.export(torch.jit.trace(_Doubles(), x), (x,), dynamo=False)


class _Namesakes(nn.Module):
    """A parameter, a tied one and two buffers with the names of arguments."""

    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.tied = self.weight
        self.register_buffer("x", torch.randn(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, weight, count):
        self.count += 1
        return self.layer(x * self.weight + weight * self.x * self.tied) * self.count + count


@pytest.mark.parametrize("names", [None, ["weight", "x", "layer.bias"]])
def test_arguments_with_the_names_of_parameters(names, dynamo, tmp_path):
    """The file was invalid, or its metadata named what it lacks."""
    model, args = _Namesakes().train(), (torch.randn(3, 4), torch.randn(3, 4), torch.tensor(2.0))
    exporter.export(copy.deepcopy(model), args, dynamo=dynamo, input_names=names).save(tmp_path / "m.onnx")
    assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.input] == (names or ["x", "weight", "count"])
    loaded = exporter.load(tmp_path / "m.onnx")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for _ in range(2):
        one, two = model(*args), loaded(*args)
        torch.testing.assert_close(two, one)
        for result in (one, two):
            result.square().mean().backward()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_a_step_of_arguments_with_the_names_of_parameters():
    model, args = _Namesakes().eval(), (torch.randn(3, 4), torch.randn(3, 4), torch.tensor(2.0))
    options = {"loss": lambda result: result.square().mean(), "optimizer": "sgd", "dynamo": False}
    with pytest.raises(exporter.ExportError, match=r"'count' of forward has the name of a parameter(?s:.*)input_names"):
        exporter.export_training_step(model, args, **options)
    trainer = exporter.Trainer(exporter.export_training_step(copy.deepcopy(model), args, input_names=["a", "b", "c"], **options))
    expected = model(*args).square().mean().item()
    assert float(trainer.step(dict(zip("abc", (arg.numpy() for arg in args), strict=True)))) == pytest.approx(expected, rel=1e-5)
