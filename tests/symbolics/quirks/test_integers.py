"""Integers with Python's numbers on TorchScript: values and types as in eager mode."""

from __future__ import annotations

import operator

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from tests.support import Calls

OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.lt, operator.ge, operator.eq,
    torch.fmod, lambda a, b: torch.clamp(a, min=b), lambda a, b: a.clamp_max(b), lambda a, b: torch.where(a > 1, a, b), lambda a, b: a.add(other=b),
)  # fmt: skip


class Many(torch.nn.Module):
    """Each operator with a number on either side, as far as eager mode takes it."""

    def __init__(self, x, number):
        super().__init__()
        self.calls = [call for f in OPERATORS for call in (lambda a, f=f: f(a, number), lambda a, f=f: f(number, a)) if _works(call, x)]

    def forward(self, x):
        return tuple(call(x) for call in self.calls)


def _works(call, x):
    try:
        return isinstance(call(x), torch.Tensor)
    except (RuntimeError, TypeError, AttributeError):
        return False


@pytest.mark.parametrize("number", [0.5, 2, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_integer_and_a_number(dtype, number):
    x = torch.tensor([1, 5, 2, 3], dtype=dtype)
    model = Many(x, number)
    assert len(model.calls) > 20
    check(model, x)


@pytest.mark.parametrize("number", [0.5, 2])
def test_a_truth_value_and_a_number(number):
    x = torch.tensor([True, False])
    check(Calls(lambda x: (x + number, x * number, x < number, torch.clamp(x, max=number))), x)


def test_functions_of_floats():
    x = torch.tensor([1, 2, 3])
    check(Calls(lambda x: (torch.sin(x * 2), x.sqrt(), torch.sigmoid(x), torch.exp(x), torch.log1p(x), torch.atan2(x, x))), x)


def test_sizes_are_numbers():
    x = torch.randn(3, 5, dtype=torch.float64)
    check(Calls(lambda x: (x * (x.shape[1] ** -0.5), x / x.shape[0] * 0.1)), x)


def check(model, x):
    program = exporter.export(model, (x,), dynamo=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {value.name: x.numpy() for value in session.get_inputs()})
    for mine, its in zip(found, model(x), strict=True):
        assert mine.dtype == its.numpy().dtype
        np.testing.assert_allclose(mine, its.numpy(), rtol=1e-6, atol=1e-6)


def test_places_in_the_middle_of_pixels(dynamo):
    def centre(x):
        ys, xs = torch.meshgrid(torch.arange(x.shape[2]) + 0.5, torch.arange(x.shape[3]) + 0.5, indexing="ij")
        return torch.einsum("bchw,hw->bc", x, ys) + torch.einsum("bchw,hw->bc", x, xs)

    x = torch.randn(2, 1, 3, 4)
    program = exporter.export(Calls(centre), (x,), dynamo=dynamo)
    torch.testing.assert_close(exporter.load(program)(x), centre(x), rtol=1e-4, atol=1e-5)


def test_ranges_of_floats(dynamo):
    def ranges(x):
        return x * 1, torch.arange(0, 3.5), torch.arange(0, x.shape[0] / 2), torch.arange(0, 4), torch.arange(0, 2.5, dtype=torch.int64)

    x = torch.randn(5)
    torch.testing.assert_close(tuple(exporter.load(exporter.export(Calls(ranges), (x,), dynamo=dynamo))(x)), ranges(x))
