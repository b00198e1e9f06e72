"""dynamo=True: an example whose open axes are 1 long gives the file that a longer one gives."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import exporter
from tests.zoo.functions import SavesOutput

OPEN = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}


class Stretched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        summed = grad * x
        for axis, size in enumerate(scale.shape):
            if size == 1:
                summed = summed.sum(axis, keepdim=True)
        return grad * scale, summed


class Net(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x):
        return SavesOutput.apply(self.function(x, *self.parts)) * 2


def attention(x, linear):
    batch, time, features = x.shape
    heads = linear(x).view(batch, time, 2, features // 2).transpose(1, 2)
    return (torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads).transpose(1, 2).reshape(batch, time, features)


MODELS = {
    "products": lambda: Net(lambda x: x @ x.mT),
    "mean of products": lambda: Net(lambda x: torch.tanh(x @ x.mT).mean(0)),
    "attention": lambda: Net(attention, nn.Linear(8, 8)),
    "nn.MultiheadAttention": lambda: Net(lambda x, module: module(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
    "LSTM": lambda: Net(lambda x, module: module(x)[0], nn.LSTM(8, 8, batch_first=True)),
    "einsum": lambda: Net(lambda x: torch.einsum("btd,bsd->bts", x, x)),
    "Conv1d": lambda: Net(lambda x, module: module(x.transpose(1, 2)), nn.Conv1d(8, 4, 3, padding=1)),
}


def checked(model, program, *sizes):
    loaded = exporter.load(program, allow=["tests.zoo.*"])
    for size in sizes:
        x = torch.randn(*size)
        results = []
        for each in (model, loaded):
            given = x.clone().requires_grad_()
            y = each(given)
            (y * torch.linspace(0.5, 1, y.numel()).reshape(y.shape)).sum().backward()
            results.append((y.detach(), given.grad))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [(1, 5, 8), (4, 1, 8), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_other_sizes_are_right(name, size):
    torch.manual_seed(0)
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        program = exporter.export(model, (torch.randn(*size),), dynamic_shapes=OPEN)
    checked(model, program, (3, 4, 8), (1, 6, 8), (2, 1, 8), size)


def test_a_step_of_such_an_example_trains_at_others():
    torch.manual_seed(0)
    model, x = Net(lambda x, linear: torch.tanh(linear(x) @ linear(x).mT).mean(0), nn.Linear(4, 4)), torch.randn(3, 5, 4)
    step = exporter.export_training_step(
        model, (torch.randn(1, 1, 4),), loss=lambda y: y.square().mean(), optimizer="sgd", hyperparameters={"lr": 1.0}, dynamic_shapes=OPEN
    )
    before = model.parts[0].weight.detach().clone()
    trainer = exporter.Trainer(step, allow=["tests.zoo.*"])
    trainer.step({"x": x})
    model(x).square().mean().backward()
    torch.testing.assert_close(before - trainer.state_dict()["parts.0.weight"], model.parts[0].weight.grad)


@pytest.mark.parametrize("target", [torch.tensor([1]), torch.randn(1, 3), torch.randn(1, 1)], ids=["label", "row", "number"])
def test_a_step_of_one_row_says_nothing(target, dynamo):
    """The target, which is not named, has as many rows."""
    model = nn.Linear(6, target.shape[-1] if target.is_floating_point() else 3)
    loss = nn.functional.mse_loss if target.is_floating_point() else nn.functional.cross_entropy
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        step = exporter.export_training_step(
            model, (torch.randn(1, 6),), loss=loss, targets=(target,), dynamic_shapes={"input": {0: "batch"}}, dynamo=dynamo
        )
    x, more = torch.randn(4, 6), target.expand(4, *target.shape[1:]).clone()
    torch.testing.assert_close(exporter.Trainer(step).step({"input": x, "target": more}), loss(model(x), more).item())


class Scaled(nn.Module):
    """A Function that sums along axes of size 1: what they are in the example says nothing of an open one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 1, 8) + 0.5)

    def forward(self, x):
        x = Stretched.apply(x, x.mean(1, keepdim=True))
        return Stretched.apply(x, self.scale)


@pytest.mark.parametrize("size", [(1, 5, 8), (4, 1, 8), (1, 1, 8)], ids=str)
def test_portable_functions(size, dynamo):
    model = Scaled()
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        program = exporter.export(model, (torch.randn(*size),), dynamic_shapes=OPEN, dynamo=dynamo, portable=True)
    checked(model, program, (3, 4, 8), (1, 6, 8), (2, 1, 8), size)


def test_a_model_of_one_row_says_that_its_portable_functions_may_hold_there_alone():
    with pytest.warns(exporter.PythonopWarning, match="open axis is 1, and a trace cannot tell"):
        exporter.export(Net(of_one), (torch.randn(3, 1, 8),), dynamic_shapes={"x": {1: Dim.DYNAMIC}}, dynamo=False, portable=True)


class Split(nn.Module):
    """As a Function behind heads that torch takes for one row: torch.export fails, with an error of its own inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        heads = self.linear(x).view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2)
        return SavesOutput.apply(heads @ heads.transpose(-1, -2))


def test_where_torch_fails_at_that_size():
    model = Split()
    checked(model, exporter.export(model, (torch.randn(1, 1, 4),), dynamic_shapes=OPEN), (3, 5, 4), (1, 1, 4))


def by_size(x):
    y = x @ x.mT
    return y * 2 if x.shape[0] == 1 else y - 1


def test_a_model_that_goes_another_way_there_keeps_its_example():
    model = Net(by_size)
    with pytest.warns(exporter.PythonopWarning) as caught:
        program = exporter.export(model, (torch.randn(1, 5, 8),), dynamic_shapes=OPEN)
    assert any("depends on the size of an open axis" in str(each.message) for each in caught)
    checked(model, program, (1, 5, 8))


def of_one(x):
    if x.shape[1] > 1:
        raise ValueError("one step at a time")
    return x @ x.mT


def test_what_takes_no_longer_ones_is_said():
    model = Net(of_one)
    with pytest.warns(exporter.PythonopWarning, match="open axis is 1, and torch.export has taken it for fixed"):
        program = exporter.export(model, (torch.randn(3, 1, 8),), dynamic_shapes={"x": {1: Dim.DYNAMIC}})
    checked(model, program, (3, 1, 8))


def test_a_recurrence_that_was_exported_before_with_other_open_sizes():
    """Torch takes what it has compiled before, and could capture the second model with Dynamo alone."""
    for opened in ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", exporter.PythonopWarning)
            exporter.export(MODELS["LSTM"](), (torch.randn(4, 5, 8),), dynamic_shapes={"x": opened})
