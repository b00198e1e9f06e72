"""Parameters of a tensor class that wraps others, as torchao's quantised weights: the file has what is inside them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import exporter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

aten = torch.ops.aten


class Steps(torch.Tensor):
    """Levels of int8 times a step for each row; knows few operators, and equal is none of them."""

    @staticmethod
    def __new__(cls, levels, step):
        return torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=step.dtype)

    def __init__(self, levels, step):
        self.levels, self.step = levels, step

    def __tensor_flatten__(self):
        return ["levels", "step"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["levels"], inner["step"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.levels.to(weight.step.dtype) * weight.step, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].levels), func(args[0].step))
        raise NotImplementedError(f"{func}")


class Scaled(Steps):
    """Scales what it multiplies by its own largest element, through which no gradient goes, and stops half of the rest."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, weight, *bias = args
        with torch.no_grad():
            scale = x.abs().amax()
        return nn.functional.linear(x / scale + x.detach(), weight.levels.to(weight.step.dtype) * weight.step, *bias)


class Pair(torch.Tensor):
    """A float tensor that is the sum of two."""

    @staticmethod
    def __new__(cls, one, two):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, requires_grad=one.requires_grad)

    def __init__(self, one, two):
        self.one, self.two = one, two

    def __tensor_flatten__(self):
        return ["one", "two"], "a context"

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        assert context == "a context"
        return cls(inner["one"], inner["two"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.mul or func is torch.mul:
            x, w = args
            return x * w.one + x * w.two if isinstance(w, cls) else w * x.one + w * x.two
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].one), func(args[0].two))
        raise NotImplementedError(f"{func}")


def quantised(linear, kind=Steps):
    with torch.no_grad():
        step = linear.weight.abs().amax(1, keepdim=True) / 127
        linear.weight = nn.Parameter(kind((linear.weight / step).round().to(torch.int8), step), requires_grad=False)
    return linear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = quantised(nn.Linear(5, 6)), nn.Linear(6, 2)
        self.register_buffer("gain", Pair(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])))

    def forward(self, x):
        return torch.mul(self.last(torch.relu(self.first(x))), self.gain)


def _state(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(each), type(each), each.requires_grad) for name, each in tensors], [type(module) for module in model.modules()]


@pytest.fixture(params=[True, False], ids=["dynamo", "torchscript"])
def dynamo(request):
    return request.param


def test_the_file_has_what_is_inside(dynamo, tmp_path):
    model, x = Net(), torch.randn(4, 5)
    expected, before = model(x).detach().numpy(), _state(model)
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert _state(model) == before
    np.testing.assert_array_equal(model(x).detach().numpy(), expected)
    program.save(tmp_path / "m.onnx")
    session = exporter.inference_session(tmp_path / "m.onnx")
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], expected, rtol=1e-5, atol=1e-6)
    loaded = exporter.load(tmp_path / "m.onnx")
    state = loaded.state_dict()
    assert state["first.parametrizations.weight.original0"].dtype is torch.int8
    torch.testing.assert_close(state["first.parametrizations.weight.original1"], model.first.weight.step)
    loaded(x).square().sum().backward()
    model(x).square().sum().backward()
    for name in ("first.bias", "last.weight", "last.bias"):
        torch.testing.assert_close(loaded.get_parameter(name).grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


def test_it_equals_eager_in_a_fresh_process(dynamo):
    model = Net()
    before = _state(model)
    report = exporter.verify(model, (torch.randn(4, 5),), dynamo=dynamo)
    assert report.ok, str(report)
    assert _state(model) == before


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Pair(*(torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))))
        for part in (self.weight.one, self.weight.two):  # a Parameter detaches what is inside
            part.requires_grad_()

    def forward(self, x):
        return torch.mul(x, self.weight)


def test_gradients_reach_floats_inside(dynamo):
    model, x = Summed(), torch.randn(2, 3)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    loaded(x).square().sum().backward()
    model(x).square().sum().backward()
    for name, part in (("original0", model.weight.one), ("original1", model.weight.two)):
        torch.testing.assert_close(loaded.get_parameter(f"parametrizations.weight.{name}").grad, part.grad)


def test_what_the_class_calls_is_seen(dynamo):
    """Its no_grad() and detach() stop gradients, as in eager mode."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 5), quantised(nn.Linear(5, 6), Scaled)), torch.randn(4, 5)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, given in zip((model, loaded), inputs, strict=True):
        module(given).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-6)
    for name in ("0.weight", "0.bias", "1.bias"):
        torch.testing.assert_close(loaded.get_parameter(name).grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Pair(torch.ones(3), torch.ones(3)))

    def forward(self, x):
        return torch.mul(x, self.weight)


def test_one_that_is_trained_as_a_whole_is_refused(dynamo):
    model, x = Whole(), torch.randn(2, 3)
    before = _state(model)
    with pytest.raises(exporter.ExportError, match=r"(?s)'weight' is of .*tensor class Pair.*trained as a whole.*way out"):
        exporter.export(model, (x,), dynamo=dynamo)
    assert _state(model) == before
    model.weight.requires_grad_(False)
    np.testing.assert_allclose(exporter.load(exporter.export(model, (x,), dynamo=dynamo))(x).detach(), model(x), rtol=1e-6)


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x @ (weight.levels.to(weight.step.dtype) * weight.step).t()

    @staticmethod
    def backward(ctx, g):
        return g, None


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = quantised(nn.Linear(3, 3, bias=False))

    def forward(self, x):
        return Applied.apply(x, self.linear.weight)


def test_a_function_that_takes_one_is_inlined_or_refused(dynamo):
    model, x = Calls(), torch.randn(2, 3)
    before = _state(model)
    with pytest.raises(exporter.ExportError, match="argument weight is of .*tensor class Steps, which wraps other tensors.*inline="):
        exporter.export(model, (x,), dynamo=dynamo)
    assert _state(model) == before, "after an error, too"
    session = exporter.inference_session(exporter.export(model, (x,), dynamo=dynamo, inline=[Applied]))
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], model(x).detach().numpy(), rtol=1e-5)


class Products(nn.Module):
    """As int8 layers compute: rounded rows times int8 columns, in int32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.randint(-127, 128, (16, 8), generator=torch.Generator().manual_seed(0)).to(torch.int8))

    def forward(self, x):
        return torch._int_mm(x.round().clamp(-128, 127).to(torch.int8), self.levels).to(torch.float32) * 0.5


def test_products_of_int8(dynamo):
    model, x = Products(), torch.randn(32, 16) * 50
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert "MatMulInteger" in {node.op_type for node in program.model.graph}
    session = exporter.inference_session(program)
    np.testing.assert_array_equal(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], model(x).numpy())


def test_a_copy_of_a_model_is_what_the_model_is(dynamo):
    """deepcopy inside the export meets the plain tensors."""
    model, x = Net(), torch.randn(4, 5)
    exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo, dynamic_shapes=({0: "batch"},))
