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


def _works(call, *args):
    try:
        return isinstance(call(*args), torch.Tensor)
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


def check(model, *args):
    program = exporter.export(model, args, dynamo=False)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )  # hundreds of small operators: to open them is the test
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    found = session.run(None, {value.name: x.numpy() for value, x in zip(session.get_inputs(), args, strict=True)})
    for i, (mine, its) in enumerate(zip(found, model(*args), strict=True)):
        assert mine.dtype == its.numpy().dtype, i
        np.testing.assert_allclose(mine, its.numpy(), rtol=1e-6, atol=1e-6, err_msg=str(i))


TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32)
COUNTS = (operator.lshift, operator.rshift, operator.pow, torch.float_power)  # their second operand is small and not negative
BINARY = (
    *COUNTS, operator.or_, operator.xor, operator.and_, operator.floordiv, operator.mod, operator.truediv, operator.add, operator.sub, operator.mul,
    operator.ior, operator.ixor, operator.iand, operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod, operator.itruediv,
    operator.lt, operator.ge, operator.eq, torch.fmod, torch.maximum, torch.minimum, lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: torch.where(a > 1, a, b), lambda a, b: a.where(a > 1, b),
)  # fmt: skip
UNARY = (
    operator.invert, operator.neg, abs, torch.square, torch.sign, torch.floor, torch.ceil, torch.round, torch.trunc, torch.relu, lambda a: a.clone().neg_(),
    lambda a: a.clone().bitwise_not_(), torch.max, torch.amin, lambda a: a.max(0).values, lambda a: a.cumsum(0),
)  # fmt: skip
FIRST, SECOND, SMALL = [200, 7, -6, 5], [3, -2, -4, 1], [2, 3, 1, 1]


def _of(dtype, values):
    return torch.tensor(values).remainder(2).bool() if dtype is torch.bool else torch.tensor(values).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_spelling_with_every_other_type(dtype):
    """Of bits, of shifts, of divisions, of powers, in place and with a number on either side; each as far as eager mode takes it."""

    class All(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = []
            for f in BINARY:
                numbers = (2, True) if f in COUNTS else (3, -3, True, 2.5)
                tried = [
                    lambda x, *others, f=f, i=i: f(x.clone(), others[i]) for i in range(2 * len(TYPES)) if (i < len(TYPES)) == (f in COUNTS)
                ]
                tried += [lambda x, *_, f=f, n=n: f(x.clone(), n) for n in numbers]
                tried += [lambda *xs, f=f, n=n: f(n, xs[1 + TYPES.index(dtype) + (f not in COUNTS) * len(TYPES)]) for n in numbers]
                self.calls += [call for call in tried if _works(call, *args)]
            self.calls += [call for f in UNARY if _works(call := lambda x, *_, f=f: f(x), *args)]

        def forward(self, *args):
            return tuple(call(*args) for call in self.calls)

    args = (
        _of(dtype, FIRST),
        *(_of(other, SMALL) for other in TYPES),
        *(_of(other, SECOND).where(_of(other, SECOND) != 0, 1) for other in TYPES),
    )
    model = All()
    assert len(model.calls) > 120
    check(model, *args)


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


def _masks(x):
    m = x.round() > 1
    m += x < -1
    return (x > 1) + (x < -1), (x < 0) + True, m, ((x > 1) + (x < -1)).float(), (x > 1) + (x < -1).int()


class Cut(torch.autograd.Function):
    """Its gradient is cut off by masks that are added, as nncf's quantisers do it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - ((x < -1) + (x > 1)).float())


def test_sums_of_booleans(dynamo):
    x = torch.randn(3, 5) * 2
    given, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = exporter.load(exporter.export(Calls(_masks), (x,), dynamo=dynamo))(x)
    for one, other in zip(found, _masks(x), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    loaded = exporter.load(exporter.export(Calls(lambda x: Cut.apply(x)), (x,), dynamo=dynamo, portable=True))
    loaded(given).sum().backward()
    Cut.apply(mine).sum().backward()
    assert torch.equal(given.grad, mine.grad)
