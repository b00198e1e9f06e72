"""backward() and .grad inside a forward that is exported."""

from __future__ import annotations

import pytest
import torch

import exporter
from symbolics.errors import ExportError, PythonopWarning
from tests.symbolics.capture.test_gradients_in_forward import X, exported, results
from tests.zoo import differentiating as zoo


def leaf(x):
    return x.detach().requires_grad_()


def twice(x):
    z = leaf(x)
    z.square().sum().backward()
    held = z.grad
    (3 * z).sum().backward()
    return held, z.grad  # one tensor: the second backward adds to it


def with_cotangent(x):
    z = leaf(x)
    (z**2).backward(x)
    return z.grad


def by_function(x):
    z = leaf(x)
    torch.autograd.backward([z.sum(), (z * z).sum()])
    return z.grad


def set_back(x):
    z = leaf(x)
    z.sum().backward()
    z.grad = None
    (5 * z).sum().backward()
    return z.grad


def none_before(x):
    z = leaf(x)
    assert z.grad is None
    h = z * 2
    h.sum().backward()
    assert h.grad is None
    return z.grad


def retained(x):
    h = leaf(x) * 2
    h.retain_grad()
    h.square().sum().backward()
    return h.grad


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("function", [twice, with_cotangent, by_function, set_back, none_before, retained], ids=lambda f: f.__name__)
def test_as_in_eager(function, dynamo):
    got, want = results(exported(function, dynamo=dynamo)), function(X)
    for y, z in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(torch.from_numpy(y), z)


def test_the_grad_of_parameters_is_warned_of():
    class Model(zoo.Net):
        def forward(self, x):
            z = leaf(x)
            self.scalar(z).backward()
            return z.grad

    with pytest.warns(PythonopWarning, match=r"at .*test_accumulation:\d+ adds to the .grad of 4 parameters"):
        exporter.export(Model(), (X,), dynamo=False)


def test_a_grad_that_was_there_before(dynamo):
    held = torch.ones(3, dtype=zoo.F64, requires_grad=True)
    held.grad = torch.ones(3, dtype=zoo.F64)
    with pytest.raises(ExportError, match="it was there before this forward"):
        exported(lambda x: x * held.grad, dynamo=dynamo)
