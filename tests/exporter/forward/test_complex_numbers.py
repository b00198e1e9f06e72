"""Complex numbers that torch.onnx writes as real ones: an export says so, with the line and the way out."""

from __future__ import annotations

import pytest
import torch

import exporter
from exporter import ExportError
from tests.support import Calls

FFT, IFFT = torch.fft.rfft, torch.fft.irfft
WAYS = {
    "1j * k * f": lambda u: IFFT(1j * torch.arange(9, dtype=u.dtype) * FFT(u), n=16),
    "cat with zeros": lambda u: IFFT(torch.cat([FFT(u)[..., :4], torch.zeros(2, 5, dtype=FFT(u).dtype)], -1), n=16),
    "ones": lambda u: IFFT(FFT(u) * torch.ones(9, dtype=FFT(u).dtype), n=16),
    "full": lambda u: torch.view_as_real(FFT(u) + torch.full((9,), 2 + 1j, dtype=FFT(u).dtype)),
    "1j * u": lambda u: torch.view_as_real(u + 1j * u),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WAYS)
def test_an_export_says_so(name, dtype):
    with pytest.raises(ExportError) as error:
        exporter.export(Calls(WAYS[name]), (torch.randn(2, 16, dtype=dtype),))
    text = str(error.value)
    assert "aten::" in text and "cannot translate it to ONNX" in text and "\n  at " in text
    assert "compute with real numbers (docs/operators/fft.md: Write a Fourier layer)" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_those_that_are_made_of_real_ones_are_written(dtype):
    def forward(u):
        k = torch.arange(9, dtype=u.dtype)
        f = FFT(u) * torch.complex(torch.zeros_like(k), k) + k * FFT(u) * torch.polar(k, k)
        return IFFT(torch.view_as_complex(torch.view_as_real(f)) * k.to(f.dtype), n=16)

    u = torch.randn(2, 16, dtype=dtype)
    torch.testing.assert_close(exporter.load(exporter.export(Calls(forward), (u,)))(u), forward(u), rtol=1e-3, atol=1e-2)


REAL_NUMBERS = {
    "times": lambda f: 2.5 * f * 3 / 4,
    "plus": lambda f: 1 - (f + 2) - 0.5,
    "over": lambda f: 1 / (f + 3),
    "sum": lambda f: f.sum(-1, keepdim=True) / f.shape[-1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REAL_NUMBERS)
def test_real_numbers_beside_complex_ones_are_right(name, dtype):
    def forward(x):
        return torch.view_as_real(REAL_NUMBERS[name](torch.view_as_complex(x)))

    x = torch.randn(3, 4, 2, dtype=dtype)
    torch.testing.assert_close(exporter.load(exporter.export(Calls(forward), (x,)))(x), forward(x))
