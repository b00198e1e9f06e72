"""Large parameters: they are the module's own memory, whatever becomes of the file, and so are their gradients."""

from __future__ import annotations

import os

import onnx
import pytest
import torch
from torch import nn

import exporter
from exporter.module import load
from exporter.runtime.tensors import LARGE
from symbolics.errors import FormatError
from tests.zoo.functions import Cube

N = 1100  # N x N numbers of float32 are more than LARGE


class Wide(nn.Module):
    """A large weight, small ones, a Function between them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(N, N, dtype=dtype)
        self.last = nn.Linear(N, 3, bias=False, dtype=dtype)

    def forward(self, x):
        return self.last(Cube.apply(self.first(x)))


def saved(folder, model, dynamo=False, **options):
    path = folder / "model.onnx"
    x = torch.randn(4, N, dtype=model.last.weight.dtype)
    exporter.export(model, (x,), dynamo=dynamo).save(path, **options)
    return path, x


def allowed(path):
    return exporter.load(path, allow=["tests.zoo.functions:*"]).train()


def assert_same(found, expected):
    for (name, a), (_, b) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
            continue
        tolerance = 1e-5 * b.grad.abs().max().item()  # sums of products of thousand terms, some of which nearly cancel
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def step(module, x):
    module(x).square().sum().backward()


# ------------------------------------------------------------------------------------------------------------- the file
@pytest.mark.parametrize("fate", ["removed", "cut off", "written over"])
def test_what_becomes_of_the_file_changes_nothing(tmp_path, fate):
    model = Wide()
    path, x = saved(tmp_path, model, external_data=True)
    module = allowed(path)
    (data,) = tmp_path.glob("*.data")
    if fate == "removed":
        data.unlink()
        path.unlink()
    elif fate == "cut off":
        os.truncate(data, 0)
        os.truncate(path, 0)
    else:
        with open(data, "r+b") as file:  # in place: what was mapped would have these bytes
            file.write(b"\x7f" * data.stat().st_size)
    torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-5)
    step(module, x)
    step(model, x)
    assert_same(module, model)
    for (name, found), expected in zip(module.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected), name


class Masked(Wide):
    """With a constant that is neither parameter nor buffer, and larger than what stays inside a file."""

    def forward(self, x):
        return super().forward(x + torch.arange(N, device=x.device) % 3)


@pytest.mark.parametrize("most", [None, 0], ids=["read with the parameters", "left in the file"])
def test_constants_of_a_file_that_is_removed(tmp_path, monkeypatch, most):
    model = Masked()
    path, x = saved(tmp_path, model, dynamo=True, external_data=True)
    external = [t for t in onnx.load(path, load_external_data=False).graph.initializer if t.external_data]
    assert len(external) > len(list(model.parameters()))  # the constant is one of them
    if most is not None:
        monkeypatch.setattr(load, "_MOST_CONSTANTS", most)
    module = allowed(path)
    step(module, x)
    step(model, x)
    assert_same(module, model)
    module = allowed(path)
    next(tmp_path.glob("*.data")).unlink()
    module.zero_grad()
    if most is None:
        step(module, x)
        assert_same(module, model)
    else:
        with pytest.raises(FormatError, match="is not there: keep it beside the model"):
            step(module, x)


def test_data_that_is_cut_off_while_it_is_read(tmp_path, monkeypatch):
    path, _ = saved(tmp_path, Wide(), external_data=True)
    (data,) = tmp_path.glob("*.data")
    checked = load.check_complete

    def cut(model):
        checked(model)
        os.truncate(data, data.stat().st_size // 2)

    monkeypatch.setattr(load, "check_complete", cut)
    with pytest.raises(
        FormatError, match=r"the initializer '[a-z.]+' is damaged: the data of .* lies at \d+ and before: the file was cut off"
    ):
        allowed(path)


def test_the_next_call_reads_what_an_optimizer_wrote(tmp_path):
    model = Wide()
    path, x = saved(tmp_path, model, external_data=True)
    module = allowed(path)
    before = next(tmp_path.glob("*.data")).read_bytes()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (module, model)]
    for _ in range(3):
        for each, optimizer in zip((module, model), optimizers, strict=True):
            optimizer.zero_grad()
            step(each, x)
            optimizer.step()
        torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for each in (module, model):
            each.get_parameter("last.weight").fill_(0.5)
    torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-4)
    assert next(tmp_path.glob("*.data")).read_bytes() == before


# --------------------------------------------------------------------------------------------------------- the gradients
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trained", [False, True], ids=["forward file", "training file"])
def test_gradients_are_nobody_elses(tmp_path, dtype, trained):
    model = Wide(dtype)
    path, x = saved(tmp_path, model)
    module = allowed(exporter.build_gradient_graph(path) if trained else path)
    assert module.get_parameter("first.weight").nbytes >= LARGE
    step(module, x)
    step(model, x)
    assert_same(module, model)
    kept = {name: (p.grad, p.grad.clone(), p.grad.data_ptr()) for name, p in module.named_parameters()}
    assert kept["first.weight"][2] % 64 == 0
    for each in (module, model):  # others are made while these live
        each.zero_grad()
        step(each, 2 * x)
    assert_same(module, model)
    for name, (grad, copy, _) in kept.items():
        assert torch.equal(grad, copy), name
        grad.fill_(7)
    assert_same(module, model)
    del kept, grad
    for each in (module, model):  # now in what these have left
        each.zero_grad()
        step(each, 3 * x)
    assert_same(module, model)


def test_gradients_add_up_and_a_graph_is_retained(tmp_path):
    model = Wide()
    path, x = saved(tmp_path, model)
    module = allowed(path)
    for each in (module, model):
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        step(each, -x)
    assert_same(module, model)


def test_the_gradient_of_an_input_of_any_size(tmp_path):
    model, path = Wide(), tmp_path / "model.onnx"
    exporter.export(model, (torch.randn(4, N),), dynamic_shapes=({0: "n"},)).save(path)
    module = allowed(path)
    for count in (2, 1500):
        inputs = [torch.ones(count, N, requires_grad=True) for _ in range(2)]
        for each, x in zip((module, model), inputs, strict=True):
            each.zero_grad()
            (each(x).sum() * 0.01).backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
        assert_same(module, model)


def test_some_gradients_alone(tmp_path):
    model = Wide()
    path, x = saved(tmp_path, model)
    module = allowed(path)
    for each in (module, model):
        each.get_parameter("last.weight").requires_grad_(False)
        step(each, x)
    assert module.get_parameter("last.weight").grad is None
    assert_same(module, model)
    found, expected = (torch.autograd.grad(each(x).sum(), each.get_parameter("first.weight"))[0] for each in (module, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_gradient(tmp_path):
    model = Wide()
    path, x = saved(tmp_path, model)
    module = allowed(path)
    for each in (module, model):
        (g,) = torch.autograd.grad(each(x).square().sum(), each.get_parameter("last.weight"), create_graph=True)
        g.square().sum().mul(1e-6).backward()
    assert_same(module, model)
