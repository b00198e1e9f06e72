"""New tensors of a model whose default type is float64: outputs and gradients are eager's, with sizes that are fixed and that are open."""

from __future__ import annotations

import pytest
import torch

import exporter

FACTORIES = {
    "zeros": lambda n: torch.zeros(n) + 0.1,
    "zeros of a tuple": lambda n: torch.zeros((n,)) + 0.1,
    "ones": lambda n: torch.ones(n) / 3,
    "full": lambda n: torch.full((n,), 0.1),
    "full by name": lambda n: torch.full(size=(n,), fill_value=0.1),
    "full of integers": lambda n: torch.full((n,), 2) / 3,
    "empty": lambda n: torch.empty(n).fill_(0.1),
    "arange of floats": lambda n: torch.arange(0.1, 0.1 + 7.0, 0.25)[:n],
    "arange of integers": lambda n: torch.arange(n) / 3,
    "linspace": lambda n: torch.linspace(0.1, 1, n),
    "logspace": lambda n: torch.logspace(0.1, 1, 5).sum() + torch.zeros(n),
    "logspace of one step": lambda n: torch.logspace(torch.tensor(0.1), 1, 1) + torch.zeros(n),
    "eye": lambda n: torch.eye(3)[0].sum() * 0.1 + torch.zeros(n),
    "eye of booleans": lambda n: torch.eye(3, dtype=torch.bool).sum() * 0.1 + torch.zeros(n),
    "index_add": lambda n: torch.zeros(n).index_add(0, torch.tensor([0, 0, 1]), torch.tensor([0.1, 0.2, 0.3])),
    "new_zeros": lambda n: torch.ones(1).new_zeros(n) + 0.1,
    "asked for": lambda n: torch.zeros(n, dtype=torch.float32) + 0.1,
}


class Model(torch.nn.Module):
    def __init__(self, factory):
        super().__init__()
        self.linear, self.factory = torch.nn.Linear(3, 1), factory

    def forward(self, x):
        return self.linear(x)[:, 0] * self.factory(x.shape[0])


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("open_", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", FACTORIES)
def test_new_tensors(name, dynamo, open_, tmp_path):
    torch.manual_seed(0)
    model, x = Model(FACTORIES[name]), torch.randn(5, 3)
    shapes = ({0: torch.export.Dim("n", min=3, max=25)},) if open_ else None
    exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=shapes).save(tmp_path / "model.onnx")
    module = exporter.load(tmp_path / "model.onnx")
    for given in (x, torch.randn(8 if open_ else 5, 3)):
        found, expected = module(given), model(given)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    model.zero_grad()
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, model.linear.weight.grad, rtol=1e-12, atol=1e-13)
