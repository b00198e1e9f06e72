"""Two tensors side by side."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from exporter.differences import weights
from exporter.differences.weights import WeightChange, compare_tensors


def compared(a, b):
    return compare_tensors("w", ir.tensor(np.asarray(a)), ir.tensor(np.asarray(b)))


def test_equal_bits_are_no_difference():
    values = np.float32([1, np.nan, np.inf, -0.0])
    assert compared(values, values.copy()) is None
    assert compared(np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64)) is None
    assert compared(["a", "b"], ["a", "b"]) is None


def test_sizes_of_differences():
    found = compared(np.float32([1, 2, 4]), np.float32([1, 2.5, 3]))
    assert found == WeightChange("w", "float[3]", "float[3]", 1.0, 0.25, 1, 3)


@pytest.mark.parametrize(
    ("a", "b", "size"),
    [
        ([np.nan], [1], math.inf),
        ([np.inf], [-np.inf], math.inf),
        ([0.0], [-0.0], 0.0),  # other bits, the same number
        ([np.inf], [np.inf], None),
    ],
)
def test_what_is_no_finite_number(a, b, size):
    found = compared(np.float64(a), np.float64(b))
    assert (found.max_abs if found else None) == size


def test_zero_in_the_first_has_no_relative_size():
    assert compared(np.float32([0]), np.float32([1])).max_rel == math.inf


def test_other_types_and_shapes():
    assert compared(np.float32([1]), np.float64([1])) == WeightChange("w", "float[1]", "double[1]", 0.0, 0.0, 0, 1)
    assert compared(np.float32([1]), np.float32([[1]])) == WeightChange("w", "float[1]", "float[1, 1]")
    assert compared(["a", "b"], ["a", "c"]) == WeightChange("w", "string[2]", "string[2]", None, None, 1, 2)


def test_a_large_tensor_is_compared_in_parts(monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 7)
    a = np.arange(100, dtype=np.float32)
    b = a.copy()
    b[[3, 99]] += [0.5, 2]
    found = compared(a, b)
    assert (found.max_abs, found.equal, found.elements) == (2.0, 98, 100)
