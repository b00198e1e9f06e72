"""Opaque modules with complex parameters and buffers: in a file each is its real and imaginary parts."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import exporter
from exporter.files.trust import unregister
from symbolics.errors import ArgumentError, ExportError, FormatError, RunError
from tests.support import nodes

ALLOW = [f"{__name__}:*"]
BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


class Spectrum(nn.Module):
    """Turns a spectrum, by parameters of which two are one, one is frozen, and one is real; it remembers two values."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.again = self.turn
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)
        self.gain = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("last", torch.zeros(4, dtype=torch.complex64))

    def forward(self, x):
        y = torch.fft.fft(x * self.gain) * self.turn + self.again.square() * self.frozen + self.last
        if self.training:
            self.seen.add_(y.detach().mean(0))
            self.last = y.detach()[0] * 1j
        return torch.fft.ifft(y).real


class Point(nn.Module):
    """A complex parameter without dimensions, of doubles."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.tensor(0.5 + 2j, dtype=torch.complex128))

    def forward(self, x):
        return torch.stack([(x.double() * self.z).real.exp(), self.z.abs().expand_as(x)]).float()


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), block

    def forward(self, x):
        return self.block(self.first(x))


def pulled(x, block):
    return block(x) * 2


class Calls(Net):
    def forward(self, x):
        return pulled(self.first(x), self.block)


def real(tensor):
    return None if tensor is None else torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def run(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y, x.grad, {name: real(p.grad) for name, p in model.named_parameters()}, {name: real(b) for name, b in model.named_buffers()}


def made(block=Spectrum, net=Net):
    torch.manual_seed(0)
    return net(block()), torch.randn(3, 4)


@BOTH
@pytest.mark.parametrize("block", [Spectrum, Point])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_as_in_eager(block, training, dynamo):
    model, x = made(block)
    model.train(training)
    program = exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo, opaque=[block])
    assert len(nodes(program.model, "PythonOp")) == 1
    module = exporter.load(program, allow=ALLOW)
    assert {name: p.requires_grad for name, p in module.named_parameters()} == {n: p.requires_grad for n, p in model.named_parameters()}
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run(module, x), run(model, x), rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize(
    ("optimizer", "settings"), [("sgd", {"lr": 0.05, "momentum": 0.9}), ("adamw", {"lr": 0.05, "weight_decay": 0.1})], ids=["sgd", "adamw"]
)
def test_training_steps(optimizer, settings, dynamo):
    """As torch's optimizers take complex numbers: their parts, one by one."""
    model, x = made()
    target = torch.randn(3, 4)
    options = {"dynamo": dynamo, "opaque": [Spectrum]}
    step = exporter.export_training_step(
        copy.deepcopy(model), (x,), loss=nn.functional.mse_loss, targets=(target,), optimizer=optimizer, hyperparameters=settings, **options
    )
    trainer = exporter.Trainer(step, allow=ALLOW)
    module = exporter.load(exporter.export(copy.deepcopy(model), (x,), **options), allow=ALLOW)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    own = [(each, kind(each.parameters(), **settings)) for each in (model, module)]
    for _ in range(4):
        trainer.step({"x": x, "target": target})
        for each, updates in own:
            updates.zero_grad()
            nn.functional.mse_loss(each(x), target).backward()
            updates.step()
    for name, value in model.state_dict().items():
        if name != "block.frozen":
            torch.testing.assert_close(torch.as_tensor(trainer.state_dict()[name]), real(value), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(module.state_dict()[name], real(value), rtol=1e-3, atol=1e-5)


def test_second_derivatives():
    model, x = made(Point)
    module = exporter.load(exporter.export(copy.deepcopy(model), (x,), opaque=[Point]), allow=ALLOW)
    found = []
    for each in (module, model):
        (first,) = torch.autograd.grad(
            each(x).square().sum(), each.block.z if each is model else each.get_parameter("block.z"), create_graph=True
        )
        parts = torch.view_as_real(first) if first.is_complex() else first
        parts.square().sum().backward()
        found.append({name: real(p.grad) for name, p in each.named_parameters()})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_an_optimizer_that_has_run():
    model, x = made(Point)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    options = {"loss": nn.functional.mse_loss, "targets": (torch.zeros(2, 3, 4),), "dynamo": False, "opaque": [Point]}
    step = exporter.export_training_step(model, (x,), optimizer=optimizer, **options)
    for slot in ("exp_avg", "exp_avg_sq"):
        assert step.initial[f"state.block.z.{slot}"].tolist() == real(optimizer.state[model.block.z][slot]).tolist()
    with pytest.raises(ArgumentError, match=r"adafactor takes no complex parameters.*block\.z"):
        exporter.export_training_step(model, (x,), optimizer="adafactor", **options)


@BOTH
def test_registered_and_among_the_arguments_of_a_function(dynamo):
    model, x = made(Spectrum, Calls)
    program = exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo, opaque=[pulled])
    module = exporter.load(program, allow=[f"{__name__}:pulled", *ALLOW])
    torch.testing.assert_close(run(module, x), run(model, x), rtol=1e-4, atol=1e-5)
    model, x = made(Point)
    exporter.register(model.block, "tests.a_point")
    try:
        module = exporter.load(exporter.export(model, (x,), dynamo=dynamo, opaque=[model.block]), allow=ALLOW)
        torch.testing.assert_close(run(module, x), run(model, x), rtol=1e-4, atol=1e-5)
    finally:
        unregister("tests.a_point")


class Gives(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


class Takes(nn.Module):
    def forward(self, x):
        return self.block(torch.fft.fft(x)) if hasattr(self, "block") else x.real * 2


class Around(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        y = self.block(torch.view_as_complex(x.reshape(-1, 2, 2)) if isinstance(self.block, Takes) else x)
        return y.real


@BOTH
@pytest.mark.parametrize("block", [Gives, Takes])
def test_complex_arguments_and_results_are_named(block, dynamo):
    with pytest.raises(ExportError, match=rf"(?s):{block.__name__}, called in module block.*complex") as caught:
        exporter.export(Around(block()), (torch.randn(3, 4),), dynamo=dynamo, opaque=[block])
    assert len(str(caught.value).splitlines()) <= 10


@pytest.fixture(scope="module")
def proto():
    model, x = made()
    return exporter.export(model, (x,), dynamo=False, opaque=[Spectrum]).model_proto


@pytest.mark.parametrize("complex_", [[99], [0, 0], [1, 0], [2], [-1]], ids=str)
def test_a_tampered_file_is_refused(proto, complex_):
    """Number 2 is the gain, of real numbers without a last dimension of 2."""
    proto = copy.deepcopy(proto)
    node = next(node for node in proto.graph.node if node.op_type == "PythonOp")
    (attribute,) = (attribute for attribute in node.attribute if attribute.name == "call")
    call = json.loads(attribute.s)
    assert call["module"]["complex"] == [0, 1, 3, 4]
    call["module"]["complex"] = complex_
    attribute.s = json.dumps(call).encode()
    with pytest.raises(
        RunError if complex_ == [2] else FormatError, match="complex tensor of a module.*4" if complex_ == [2] else "contradict"
    ):
        exporter.load(proto, allow=ALLOW)(torch.randn(3, 4))
