"""torch's windows under torch.onnx.export(dynamo=True): the values and types of eager mode."""

from __future__ import annotations

import torch

import exporter
from tests.support import Calls

WINDOWS = (torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window)


def _all(x):
    made = [
        window(size, periodic=periodic, dtype=dtype)
        for window in WINDOWS
        for periodic in (True, False)
        for size, dtype in ((5, None), (1, torch.float64), (4, torch.float16))
    ]
    return [x * 1, torch.hamming_window(6, True, 0.5, 0.4), torch.kaiser_window(6, True, 8.0), *made]


def test_as_in_eager():
    x = torch.ones(1)
    torch.testing.assert_close(list(exporter.load(exporter.export(Calls(_all), (x,)))(x)), _all(x), rtol=0, atol=0)
