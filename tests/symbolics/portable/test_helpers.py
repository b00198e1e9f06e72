"""Helpers of public packages in torch: the same bits as the packages' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.ibert import quant_modules

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
