"""Remainders and rounded quotients of floats, whose values are those of an exact fmod: at multiples, at zeros, of either sign."""

from __future__ import annotations

import math
import operator

import pytest
import torch

import exporter
from tests.support import Calls
from tests.symbolics.quirks.test_extremes import alike

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

INF, NAN = math.inf, math.nan
EDGES = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, INF, -INF, NAN, 1e30, -1e30]
DIVISORS = (-1.1, 0.7, 1, -2, 0.3, 1e-3, -INF)


def _in_place(name, x, *others):
    y = x.clone()
    return getattr(y, name)(*others) if len(others) else y


SPELLINGS = (
    torch.remainder, torch.floor_divide, lambda x, y: torch.div(x, y, rounding_mode="floor"), operator.mod, operator.floordiv,
    lambda x, y: x.clone().remainder_(y), lambda x, y: x.clone().floor_divide_(y), lambda x, y: x.clone().div_(y, rounding_mode="floor"),
    lambda x, y: operator.imod(x.clone(), y), lambda x, y: operator.ifloordiv(x.clone(), y), lambda x, y: torch.remainder(other=y, input=x),
)  # fmt: skip


def _equal(function, args, dynamo):
    found = exporter.load(exporter.export(Calls(function), args, dynamo=dynamo))(*args)
    for i, (mine, its) in enumerate(zip(found, function(*args), strict=True)):
        assert mine.dtype == its.dtype, i
        assert torch.equal(mine.isnan(), its.isnan()), i
        differ = (mine != its) & ~its.isnan()
        assert not differ.any(), (i, [value[differ][:3] for value in (mine, its)])


def _pairs(dtype, number):
    """Random ones, and multiples: as they are rounded, a little more, a little less."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(number, generator=generator, dtype=torch.float64).to(dtype)
    x = (torch.randn(number, generator=generator, dtype=torch.float64) * 100).to(dtype)
    multiples = torch.randint(-200, 200, (number,), generator=generator) * y
    edges = torch.tensor(EDGES, dtype=torch.float64).to(dtype)
    x = torch.cat(
        [
            x,
            multiples.to(dtype),
            torch.nextafter(multiples.to(dtype), torch.full((), INF, dtype=dtype)),
            edges.repeat_interleave(len(EDGES)),
        ]
    )
    return x, torch.cat([y, y, y, edges.repeat(len(EDGES))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pairs(dtype, dynamo):
    """Quotients of a half type are as TorchScript and torchlib write them: eager mode rounds each of its steps."""
    pairs = _pairs(dtype, 300_000 if dtype is torch.float32 else 20_000)
    half = dtype in (torch.float16, torch.bfloat16)
    _equal(lambda x, y: (torch.remainder(x, y),) if half else (torch.remainder(x, y), torch.floor_divide(x, y)), pairs, dynamo)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_numbers(dtype, dynamo):
    x = torch.cat([torch.arange(-60, 60, dtype=dtype) * number for number in (1.1, 0.7, 0.3)] + [torch.tensor(EDGES).to(dtype)])
    functions = (operator.mod,) if dtype is torch.float16 else (operator.mod, operator.floordiv)
    _equal(lambda x: tuple(f(x, y) for f in functions for y in DIVISORS), (x,), dynamo)
    _equal(lambda x: tuple(f(y, x) for f in functions for y in (7.7, -3, 2.2)), (x,), dynamo)


def test_every_spelling(dynamo):
    x, y = torch.tensor([2.2, -3.3, 5.5, -6.6]), torch.tensor([1.1, -1.1, 1.1, 1.1])
    _equal(lambda x, y: tuple(f(x, divisor) for f in SPELLINGS for divisor in (y, -1.1, 2)), (x, y), dynamo)
    _equal(lambda x, y: (x % y, y // x, x % 2, x // 3), (torch.tensor([7, -6, 3, 0]), torch.tensor([1.1, 2.5, -3.3, 0.0])), dynamo)
    _equal(lambda x: (x % 1.1, x // 1.1, x % -0.5), (torch.tensor(5.5),), dynamo)
    _equal(lambda x: (x % 0.7, x // 0.7, x % 2), (torch.tensor([7, -6, 3, 0]),), dynamo)


def test_a_quotient_of_sizes(dynamo):
    x = torch.randn(7, 3)
    _equal(lambda x: (x * (x.shape[0] // 2), x * (x.shape[0] % 4), x + x.shape[1] // 0.7), (x,), dynamo)


def test_slopes(dynamo):
    x, y = torch.tensor([2.3, -3.4, 5.6, -6.5, 0.3]), torch.tensor([1.1, -1.2, 1.3, 1.4, -2.0])
    alike(torch.remainder, [x, y], dynamo)
    alike(lambda x: (x % -1.1, x % 2 + torch.div(x, 0.7, rounding_mode="floor")), [x], dynamo)
    alike(lambda x, y: x + torch.div(x, y, rounding_mode="floor"), [x, y], dynamo)


class Wraps(torch.autograd.Function):
    """Angles in [-pi, pi)."""

    @staticmethod
    def forward(ctx, x):
        return (x + math.pi) % (2 * math.pi) - math.pi

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_portable(dynamo):
    x = torch.arange(-20.0, 20) * math.pi
    program = exporter.export(Calls(lambda x: Wraps.apply(x)), (x,), portable=True, dynamo=dynamo)
    torch.testing.assert_close(exporter.load(program)(x), Wraps.apply(x), rtol=0, atol=0)
