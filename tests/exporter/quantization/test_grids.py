"""Grids found from what a function computes: activations by their thresholds, weights bit by bit; and what is no grid, by its reason."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.quantization.grids import Grid, WeightGrid, find_grid, fit_weight

F = np.float32


def affine(s, low, high, z=0):
    return lambda x: ((np.clip(np.rint(x / F(s)) + F(z), low, high) - F(z)) * F(s)).astype(F)


def by_reciprocal(s, low, high):
    return lambda x: (np.clip(np.rint(x * (F(1) / F(s))), low, high) * F(s)).astype(F)


def floored(s, low, high):
    return lambda x: (np.clip(np.floor(x / F(s) + F(0.5)), low, high) * F(s)).astype(F)


def cut_first(s, low, high):
    return lambda x: (np.rint(np.clip(x / F(s), F(low), F(high))) * F(s)).astype(F)


FOUND = {
    "8 bits, signed": (affine(0.05, -128, 127), (0.05, 128, 0, 255)),
    "8 bits, unsigned": (affine(0.1, 0, 255), (0.1, 0, 0, 255)),
    "narrow": (affine(0.3, -127, 127), (0.3, 127, 0, 254)),
    "4 bits": (affine(0.7, -8, 7), (0.7, 8, 0, 15)),
    "2 bits": (affine(1.3, -2, 1), (1.3, 2, 0, 3)),
    "1 bit": (affine(1.0, 0, 1), (1.0, 0, 0, 1)),
    "all above zero": (affine(0.5, 3, 9), (0.5, 0, 3, 9)),
    "all below zero": (affine(0.5, -9, -3), (0.5, 9, 0, 6)),
    "tiny": (affine(1e-12, -128, 127), (1e-12, 128, 0, 255)),
    "large": (affine(1e6, -128, 127), (1e6, 128, 0, 255)),
    "a zero point": (affine(0.05, 0, 255, 77), (0.05, 77, 0, 255)),
    "by the reciprocal": (by_reciprocal(0.0123, -128, 127), (0.0123, 128, 0, 255)),
    "floor": (floored(0.05, -128, 127), (0.05, 128, 0, 255)),
    "cut before it is rounded": (cut_first(0.05, -8, 7), (0.05, 8, 0, 15)),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_grid_is_found_and_rounds_as_the_function_does(name):
    function, (scale, zero, low, high) = FOUND[name]
    grid = find_grid(function, [F(scale)])
    assert isinstance(grid, Grid), grid
    assert (grid.scale, grid.zero, grid.low, grid.high) == (F(scale), zero, low, high)
    # Without any hint of its scale, too.
    assert find_grid(function, []) == grid or abs(find_grid(function, []).scale - F(scale)) <= np.spacing(F(scale))
    # As onnxruntime would: each number that is no threshold gets the same level.
    x = (np.random.default_rng(0).uniform(-1.5, 1.5, 200_000) * 256 * scale).astype(F)
    written = ((np.clip(np.rint(x / grid.scale) + zero, low, high) - zero) * grid.scale).astype(F)
    assert (np.abs(written - function(x)) > scale / 2).mean() <= (1e-5 if grid.moved else 0)


def test_thresholds_are_counted():
    assert find_grid(affine(0.05, -128, 127), []).moved == 0
    grid = find_grid(by_reciprocal(0.0123, -128, 127), [])
    assert grid.floats == 1 and 0 < grid.moved < 255
    grid = find_grid(floored(0.5, -8, 7), [])  # ties of the odd levels, and one more where 0.5 is added to next to nothing
    assert grid.floats <= 2 and grid.moved == 8


REFUSED = {
    "no end": (lambda x: (np.rint(x / F(0.1)) * F(0.1)).astype(F), "nothing cuts it off"),
    "no rounding": (lambda x: np.clip(x, -1, 1).astype(F), "levels"),
    "a constant": (lambda x: np.zeros_like(x), "one number"),
    "16 bits": (affine(1e-4, -32768, 32767), "8 bits"),
    "9 bits": (affine(0.01, -256, 255), "512 levels"),
    "powers of two": (lambda x: np.sign(x) * F(2) ** np.clip(np.rint(np.log2(np.abs(x) + F(1e-30))), -4, 0).astype(F), "not evenly spaced"),
    "zero between two": (lambda x: (np.rint(np.clip(x * F(0.5) + F(0.5), 0, 1) * F(15)) / F(15) * 2 - 1).astype(F), "0.0 is not one of its levels"),
    "down": (lambda x: (np.clip(np.floor(x / F(0.1)), -8, 7) * F(0.1)).astype(F), "nearest"),
    "scaled": (lambda x: affine(0.1, -8, 7)(x) * F(3), "nearest"),
    "not a number": (lambda x: np.where(x > 1e5, np.nan, affine(0.1, -8, 7)(x)).astype(F), "nothing cuts it off"),
    "far from zero": (affine(0.1, 200, 290), "too far from 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_grid_says_why(name):
    function, reason = REFUSED[name]
    found = find_grid(function, [])
    assert isinstance(found, str) and reason in found


def weight_of(levels, scale):
    return (levels.astype(F) * np.asarray(scale, F)).astype(F)


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_weight_on_a_grid_is_found_bit_by_bit(axis, bits, hint):
    drawn = np.random.default_rng(bits)
    levels = drawn.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 50))
    scale = drawn.uniform(0.001, 0.1, {None: (), 0: (6, 1), 1: (1, 50)}[axis]).astype(F)
    if axis == 0:
        levels[2] = 0  # a channel that is switched off
    weight = weight_of(levels, scale)
    grid = fit_weight(weight, axis, [scale] if hint else [])
    assert isinstance(grid, WeightGrid), grid
    assert grid.levels.dtype == np.int8 and grid.zero == 0
    shape = {0: (-1, 1), 1: (1, -1)}.get(grid.axis, ())
    assert np.array_equal(grid.levels.astype(F) * grid.scale.reshape(shape), weight)


def test_weights_that_need_a_zero_point():
    grid = fit_weight(weight_of(np.arange(-55, 201).reshape(2, 128), 0.01), None, [])
    assert grid.levels.dtype == np.uint8 and grid.zero == 55
    assert np.array_equal((grid.levels.astype(F) - 55) * grid.scale, weight_of(np.arange(-55, 201).reshape(2, 128), 0.01))
    scales = np.array([[0.01], [0.02]], F)
    assert "-128 to 127" in fit_weight(weight_of(np.arange(-55, 201).reshape(2, 128), scales), 0, [scales])


@pytest.mark.parametrize("size", [5, 100, 256])
def test_rows_of_few_random_numbers_are_on_no_grid(size):
    """Euclid's algorithm comes to anything on these."""
    for seed in range(20):
        drawn = np.random.default_rng(seed).uniform(-0.1, 0.1, (16, size)).astype(F)
        assert "no uniform grid" in fit_weight(drawn, 0, [])


def test_weights_on_no_grid():
    drawn = np.random.default_rng(0).standard_normal((4, 9)).astype(F)
    assert "no uniform grid (4 of 4 channels)" in fit_weight(drawn, 0, [])
    near = weight_of(np.arange(36).reshape(4, 9), 0.01)
    near[1, 1] = np.nextafter(near[1, 1], F(1))
    assert isinstance(fit_weight(near, None, [F(0.01)]), str)  # one bit off is off
    assert "not finite" in fit_weight(np.array([[np.inf, 0.0]], F), None, [])
