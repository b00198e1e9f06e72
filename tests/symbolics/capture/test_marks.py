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
from tests.zoo.functions import Double
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


@pytest.mark.usefixtures("quick_verify")
def test_a_change_through_a_look_is_a_change_of_the_tensor(dynamo):
    """Of x.detach() and x.data, and of views of them: x has the new values, and the gradients that it had."""

    class Changed(nn.Module):
        def forward(self, x):
            a, b, c, d = x * 1, x * 2, x * 3, x * 4
            a.detach().mul_(2)
            look = b.data
            look[:, 1].mul_(2)
            look[0] += x[0]
            c.data = c.data.sign()
            old = d.data
            d.data = old.sign()
            old.mul_(3)
            return a.sin() + b.sin() + look + c.sin() + d.sin() + old

    report = exporter.verify(Changed(), (torch.randn(3, 4),), dynamo=dynamo)
    assert report.ok, report


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (y := x.exp()) + y.data.mul_(2),  # the backward of exp reads its result
        lambda x: (y := x * 1) * x + y.data.mul_(2),
        lambda x: Double.apply(y := x * 1) + y.detach().mul_(2),
    ],
)
def test_a_change_of_what_a_backward_may_read_is_refused(dynamo, forward):
    class Changed(nn.Module):
        def forward(self, x):
            return forward(x)

    with pytest.raises(exporter.ExportError, match=r"called in module <root>.*after autograd may have kept it"):
        exporter.export(Changed(), (torch.randn(3, 4),), dynamo=dynamo)


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


def _asserted(x, condition):
    torch._assert(condition, "no")
    return x * 2


# They ask for overrides by overrides.has_torch_function, and take what is no tensor.
SIZES = {
    "_assert": lambda x: _asserted(x, x.shape[0] > 0),
    "_assert of a number": lambda x: _asserted(x, 3),
    "sym_max": lambda x: x * torch.sym_max(x.shape[0], 2) * torch.sym_max(2, 3),
    "sym_min": lambda x: x * torch.sym_min(x.shape[0], 2),
    "sym_int": lambda x: x * torch.sym_int(x.shape[0] / 2),
    "sym_float": lambda x: x * torch.sym_float(x.shape[0]),
    "sym_ite": lambda x: x * torch.sym_ite(x.shape[0] > 2, 5, 7),
    "sym_sum": lambda x: x * torch.sym_sum([x.shape[0], x.shape[1]]),
    "sym_not": lambda x: x * (2 if torch.sym_not(x.shape[0] > 5) else 3),
}


@pytest.mark.parametrize("name", METHODS | SIZES)
def test_functions_that_are_written_in_python(name, dynamo):
    class Model(nn.Module):
        def forward(self, x):
            return (METHODS | SIZES)[name](x * 1.5)

    x = torch.randn(3, 4)
    program = exporter.export(Model(), (x,), dynamo=dynamo)
    (found,) = exporter.reference_evaluator(program).run(None, {program.model.graph.inputs[0].name: x.numpy()})
    np.testing.assert_allclose(found, Model()(x), rtol=1e-5, atol=1e-6)


UNSEEN = {
    "mul_": lambda h: h.mul_(2),
    "clamp_": lambda h: h.clamp_(min=0),
    "copy_": lambda h: h.copy_(h * 2),
    "zero_": lambda h: h.zero_(),
    "setitem": lambda h: h.__setitem__(0, 5.0),
    "setitem of itself": lambda h: h.__setitem__((slice(None), 0), h[:, 1]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_autograd_does_not_see_a_change_in_place_under_no_grad(name, dynamo):
    class Model(nn.Module):
        def forward(self, x):
            h = x * 3
            with torch.no_grad():
                UNSEEN[name](h)
            return h * h + h

    x, z = (torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_() for _ in range(2))
    y, expected = exporter.load(exporter.export(Model(), (x,), dynamo=dynamo))(x), Model()(z)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


class Units(torch.Tensor):
    """A class with a __torch_function__ of its own, which stops gradients of what it scales, and calls all else as torch does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, *rest = args
            with torch.no_grad():
                scale = x.as_subclass(torch.Tensor).abs().amax() + 1
            return torch.nn.functional.linear(x.as_subclass(torch.Tensor) / scale, *rest)
        if func is torch.tanh:
            return torch.tanh(args[0].detach().as_subclass(torch.Tensor)) + args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


class OfUnits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        x = (x * 2).as_subclass(Units)
        y = torch.nn.functional.linear(x + 1, self.linear.weight, self.linear.bias)
        return torch.tanh(y.as_subclass(Units)).as_subclass(torch.Tensor) + x.as_subclass(torch.Tensor)


def test_what_a_tensor_class_calls_is_seen():
    """torch.export has no as_subclass; tests/exporter/forward/test_plain_tensors.py has a class that both take."""
    model, x = OfUnits(), torch.randn(2, 3)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=False))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, given in zip((model, loaded), inputs, strict=True):
        module(given).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
