"""Backwards of ATen's operators against ATen's own, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from symbolics.portable.decompositions import DECOMPOSITIONS

aten = torch.ops.aten
CONVOLUTIONS = [
    (transposed, groups, stride, padding, dilation)
    for transposed, groups, stride, padding, dilation in itertools.product((False, True), (1, 2), (1, 2, 3), (0, 1), (1, 2))
]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("transposed", "groups", "stride", "padding", "dilation"), CONVOLUTIONS)
def test_convolution(transposed, groups, stride, padding, dilation, rank):
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[9, 8, 7][:rank], dtype=torch.float64)
    w = torch.randn(*((4, 3) if transposed else (6, 4 // groups)), *[3, 2, 3][:rank], dtype=torch.float64)
    extra = [stride - 1 if transposed else 0] * rank
    how = ([stride] * rank, [padding] * rank, [dilation] * rank, transposed, extra, groups)
    y = aten.convolution.default(x, w, None, *how)
    g = torch.randn_like(y)
    arguments = (g, x, w, [y.shape[1]], *how, [True, True, True])
    expected = aten.convolution_backward.default(*arguments)
    for ours, theirs in zip(DECOMPOSITIONS[aten.convolution_backward.default](*arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_convolution_of_what_is_wanted():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    g = torch.randn(1, 3, 3, 3)
    assert [t is None for t in DECOMPOSITIONS[aten.convolution_backward.default](g, x, w, [3], *how, [False, True, False])] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("unbatched", [False, True])
def test_max_pool(unbatched):
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64)
    x = x[0] if unbatched else x
    y, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    arguments = (torch.randn_like(y), x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)
    own = DECOMPOSITIONS[aten.max_pool2d_with_indices_backward.default]
    torch.testing.assert_close(own(*arguments), aten.max_pool2d_with_indices_backward.default(*arguments))


@pytest.mark.parametrize(("kernel", "stride", "padding", "include", "divisor"), [
    ([3, 2], [2, 3], [1, 0], True, None), ([2, 2], [], [0, 0], False, None), ([3], [1], [1], False, 5), ([2, 2], [2, 2], [0, 0], True, None),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (3, 8, 9)], ids=["batch", "no batch"])
def test_avg_pool(kernel, stride, padding, include, divisor, shape):
    x = torch.randn(*shape, dtype=torch.float64)
    y = aten.avg_pool2d.default(x, kernel, stride, padding, False, include, divisor)
    arguments = (torch.randn_like(y), x, kernel, stride, padding, False, include, divisor)
    own = DECOMPOSITIONS[aten.avg_pool2d_backward.default]
    torch.testing.assert_close(own(*arguments), aten.avg_pool2d_backward.default(*arguments))


def test_an_avg_pool_whose_windows_count_differently_is_left_alone():
    x = torch.randn(2, 3, 8, 8)
    g = torch.randn(2, 3, 5, 5)
    assert DECOMPOSITIONS[aten.avg_pool2d_backward.default](g, x, [2, 2], [2, 2], [1, 1], False, False, None) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_mantissas_and_exponents(dtype):
    """Of every power of two and its neighbours, subnormal ones included."""
    powers = torch.tensor([2.0**k for k in range(-1074, 1024)], dtype=torch.float64)
    edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    x = torch.cat(
        [powers, powers.nextafter(torch.zeros(())), -powers.nextafter(torch.full((), torch.inf)), torch.randn(99).double(), edges]
    ).to(dtype)
    ours, theirs = DECOMPOSITIONS[aten.frexp.Tensor](x), aten.frexp.Tensor(x)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "offset", "dims"),
    [((4, 4), 0, (0, 1)), ((3, 5), 2, (0, 1)), ((5, 3), -1, (-2, -1)), ((3, 2, 4), 1, (2, 0)), ((2, 3), 5, (0, 1))],
)
def test_diagonal_scatter(shape, offset, dims):
    x = torch.randn(shape, dtype=torch.float64)
    values = torch.randn_like(x.diagonal(offset, *dims))
    ours = DECOMPOSITIONS[aten.diagonal_scatter.default](x, values, offset, *dims)
    torch.testing.assert_close(ours, aten.diagonal_scatter.default(x, values, offset, *dims))
    ours = DECOMPOSITIONS[aten.diagonal_backward.default](values, shape, offset, *dims)
    torch.testing.assert_close(ours, aten.diagonal_backward.default(values, shape, offset, *dims))
