"""Logarithms to the bases 2 and 10: to the last bit at the powers, and nowhere worse than the quotient of two logarithms."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from tests.support import Calls
from tests.symbolics.quirks.test_extremes import alike

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

INF, NAN = math.inf, math.nan
EXTREMES = torch.tensor([INF, NAN, 0.0, -0.0, -1.0, -INF, 1.0])
#: The exponents of a type's smallest and greatest power of two, and of ten, all of whose digits it has.
RANGES = {
    torch.float32: ((-149, 127), (-37, 38)),
    torch.float64: ((-1074, 1023), (-307, 308)),
    torch.float16: ((-24, 15), (-4, 4)),
}


def _ran(function, dynamo, *args):
    program = exporter.export(Calls(function), args, dynamo=dynamo)
    return [value.detach() for value in exporter.load(program)(*args)]


def _powers(dtype):
    (low, high), (least, most) = RANGES[dtype]
    two = torch.tensor([math.ldexp(1.0, k) for k in range(low, high + 1)], dtype=torch.float64).to(dtype)
    ten = torch.tensor([float(f"1e{k}") for k in range(least, most + 1)], dtype=torch.float64).to(dtype)
    return two, ten


@pytest.mark.parametrize("dtype", RANGES, ids=str)
def test_powers_are_exact(dtype, dynamo):
    two, ten = _powers(dtype)
    extremes = EXTREMES.to(dtype)
    found = _ran(lambda x, y, z: (x.log2(), torch.log10(y), torch.log2(input=z), z.clone().log10_()), dynamo, two, ten, extremes)
    for mine, its in zip(found, (two.log2(), ten.log10(), extremes.log2(), extremes.log10()), strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def test_ceil_beside_a_power_of_two(dynamo):
    """A neighbour's logarithm may round to a whole number, of which eager's ceil makes no next one."""
    two, _ = _powers(torch.float32)
    beside = torch.cat([torch.nextafter(two, torch.full((), to)) for to in (INF, 0.0)])
    (found,) = _ran(lambda x: (2.0 ** torch.ceil(torch.log2(x)),), dynamo, beside)
    assert torch.equal(found, 2.0 ** torch.ceil(torch.log2(beside)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_number_is_further_off_than_by_a_quotient(dtype, dynamo):
    generator = torch.Generator().manual_seed(0)
    most = math.log(torch.finfo(dtype).max) * 0.98
    x = torch.cat(
        [(torch.rand(500_000, generator=generator, dtype=dtype) * 2 - 1) * most, torch.randn(500_000, generator=generator, dtype=dtype)]
    ).exp()
    found = _ran(lambda x: (torch.log2(x), torch.log10(x), torch.log(x)), dynamo, x)
    for mine, base in zip(found, (2, 10)):
        its = {2: torch.log2, 10: torch.log10}[base](x)
        scale = torch.nextafter(its.abs(), torch.full_like(x, INF)) - its.abs()
        before = found[2] / torch.tensor(base, dtype=dtype).log()
        off, was = (((value - its).abs() / scale) for value in (mine, before))
        assert off.max() <= was.max() and off.sum() < was.sum()


def test_slopes(dynamo):
    x = torch.tensor([8192.0, 1e-40, 3.7, 1e38, -3.0, 0.0, INF])
    alike(lambda x: (torch.log2(x), torch.log10(x)), [x], dynamo)
    alike(lambda x: (torch.log2(x), torch.log10(x)), [torch.tensor(8.0)], dynamo)
    alike(lambda x: (torch.log2(x), torch.log10(x)), [x.double()], dynamo)


def test_integers(dynamo):
    x = torch.tensor([1, 8, 1000, 8192])
    found = _ran(lambda x: (torch.log2(x), x.log10(), torch.log2(x.to(torch.uint8) + 1)), dynamo, x)
    for mine, its in zip(found, (x.log2(), x.log10(), torch.log2(x.to(torch.uint8) + 1)), strict=True):
        assert torch.equal(mine, its)


def test_whole_powers_are_exact(dynamo):
    for dtype, (low, high) in ((torch.float32, (-149, 128)), (torch.float64, (-1074, 1024))):
        x = torch.arange(low, high, dtype=dtype)
        for mine in _ran(lambda x: (torch.exp2(x), 2.0**x, 2**x), dynamo, x):
            assert torch.equal(mine, torch.exp2(x))


def test_sums_of_powers(dynamo):
    """log2(2^k + 2^k) is k + 1, as exactly as a number says it."""
    x = torch.arange(-200.0, 200)
    (found,) = _ran(lambda x: (torch.logaddexp2(x, x),), dynamo, x)
    assert torch.equal(found, x + 1)


class Scale(torch.autograd.Function):
    """The next power of two, as quantisers have their scales."""

    @staticmethod
    def forward(ctx, x):
        return 2.0 ** torch.ceil(torch.log2(x))

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_scales_of_quantisers(dynamo):
    x = torch.tensor([8192.0, 2.0**-15, 0.5, 1024.0, 1000.0, 1e9])
    model = Calls(lambda x: (Scale.apply(x), torch.floor(torch.log10(x))))
    program = exporter.export(model, (x,), portable=True, dynamo=dynamo)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for mine, its in zip(session.run(None, {session.get_inputs()[0].name: x.numpy()}), model(x), strict=True):
        np.testing.assert_array_equal(mine, its.numpy())
