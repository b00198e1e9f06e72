"""Helpers of public packages in torch: the same bits as the packages' own."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import while_loop
from transformers.models.ibert import quant_modules

import exporter
from symbolics.portable.helpers import helpers_in_torch

BATCH_FREXP = quant_modules.batch_frexp


@pytest.fixture
def in_torch():
    with helpers_in_torch():
        assert quant_modules.batch_frexp.__module__ == "symbolics.portable.helpers", "transformers' batch_frexp is another one"
        return quant_modules.batch_frexp


@pytest.mark.parametrize("max_bit", [31, 8, 53])
@pytest.mark.parametrize("shape", [(1, 1, 4000), (4000,), (1,)])
def test_scales_of_ibert(shape, max_bit, in_torch):
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(shape, dtype=torch.float64, generator=generator).exp() * torch.randn(
        shape, dtype=torch.float64, generator=generator
    )
    ties = (torch.randint(2**max_bit, shape, generator=generator).double() + 0.5) * 2.0**-31
    for x in (scales, ties, -ties, 0 * scales):
        for ours, theirs in zip(in_torch(x, max_bit), BATCH_FREXP(x, max_bit), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_afterwards_the_package_has_its_own_again():
    original = quant_modules.batch_frexp
    with helpers_in_torch():
        assert quant_modules.batch_frexp is not original
    assert quant_modules.batch_frexp is original


@pytest.mark.parametrize("raises", [False, True])
def test_a_helper_that_became_another_one_is_left_alone(raises, monkeypatch):
    original = quant_modules.batch_frexp

    def other(x, max_bit=31):
        if raises:
            raise TypeError("it takes three arguments now")
        m, e = original(x, max_bit)
        return m + (m == 2**30 + 1).long(), e

    monkeypatch.setattr(quant_modules, "batch_frexp", other)
    with helpers_in_torch():
        assert quant_modules.batch_frexp is other


class _Converges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return while_loop(
            lambda z, n: n < 3, lambda z, n: (torch.tanh(z + x), n + 1), (torch.zeros_like(x), torch.zeros((), dtype=torch.int64))
        )[0]

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Loops(torch.nn.Module):
    def forward(self, x):
        return _Converges.apply(x)


@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_torch_can_still_be_compiled_behind_an_attempt():
    """It fails under a tracer, and torch knew it as one that fails from then on, in other models, too."""
    torch.compiler.reset()
    x = torch.randn(4)
    program = exporter.export(_Loops(), (x,), portable=True)
    (call,) = program.portable
    assert call.kind == "PythonOp" and "torch's while_loop" in call.reason and "no rule" not in call.reason
    torch.testing.assert_close(_Converges.forward(None, x), torch.tanh(torch.tanh(torch.tanh(x) + x) + x))
