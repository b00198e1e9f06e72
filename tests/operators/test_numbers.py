"""What the net calls wrong, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from tests.operators.numbers import Other, kink, reference


def _differs(model: Callable[..., Any], x: torch.Tensor, found: torch.Tensor) -> list[bool]:
    _, _, (expected, *_) = reference(model, [x], [], [torch.ones_like(model(x))])
    return expected.differs(found).tolist()


def test_a_unit_in_the_last_place_passes_and_a_ten_thousandth_does_not():
    x = tensor([0.5, 1.0, 2.0])
    assert _differs(torch.exp, x, torch.exp(x) * (1 + 2**-23)) == [False] * 3
    assert _differs(torch.exp, x, torch.exp(x) * tensor([1.0, 1.0001, 1.0])) == [False, True, False]


def test_a_program_may_lose_what_its_inputs_do_not_hold():
    """sin(1e4) moves by a thousandth of the last place of 1e4; the sum of numbers that cancel by the last place of the largest."""
    x = tensor([1e4])
    assert _differs(torch.sin, x, torch.sin(x) + 1e-3) == [False]
    assert _differs(torch.sin, tensor([1.0]), torch.sin(tensor([1.0])) + 1e-3) == [True]
    y = tensor([1e4, 1.0, -1e4])
    assert _differs(lambda t: t.sum(), y, tensor(1.001)) is False
    assert _differs(lambda t: t.sum(), tensor([1.0, 1.0, -1.0]), tensor(1.001)) is True


@pytest.mark.parametrize("function", [torch.floor, torch.round, torch.sign])
def test_a_jump_is_no_excuse(function: Callable[..., torch.Tensor]):
    x = tensor([2.0, 0.5, 0.0])
    assert _differs(function, x, function(x)) == [False] * 3
    assert _differs(function, x, function(x) - 1) == [True] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_nan_inf_and_nothing_are_no_numbers_near(value: float):
    x = tensor([-7.0])
    assert _differs(torch.special.log_ndtr, x, tensor([value])) == [True]


def test_what_eager_in_float32_cannot_hold_may_be_either():
    x = tensor([100.0])  # exp: inf in float32, and 2.7e43 in float64
    assert _differs(torch.exp, x, tensor([float("inf")])) == [False]
    assert _differs(torch.exp, x, tensor([1e30])) == [True]


def test_an_integer_is_equal_or_wrong():
    assert _differs(torch.argmax, tensor([1.0, 3.0]), tensor(1)) is False
    assert _differs(torch.argmax, tensor([1.0, 3.0]), tensor(0)) is True


def _kink(function: Callable[..., torch.Tensor], tensors: list[float], found: list[float], eager: list[float]) -> bool:
    others = {i: Other(tensor([f]), tensor([e]), tensor([True])) for i, (f, e) in enumerate(zip(found, eager))}
    return kink(function, [tensor([x]) for x in tensors], [torch.ones(1)], others)


def _ends_at_0(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return 2 * x


def _nowhere(x: torch.Tensor) -> torch.Tensor:
    """Minus infinity wherever it is looked at."""
    return torch.log(x * 0)


@pytest.mark.parametrize(
    ("function", "x", "found", "eager", "is_kink"),
    [
        (torch.relu, 0.0, 1.0, 0.0, True),
        (torch.relu, 0.0, 2.0, 0.0, False),  # no slope of it
        (torch.relu, 0.0, float("nan"), 0.0, False),
        (torch.relu, 1.0, 0.0, 1.0, False),  # there is one derivative here
        (torch.relu, 1.0, 1.0, 0.5, True),  # the file is right, and eager is not
        (torch.relu, 1.0, 1.0001, 1.0, False),
        (torch.abs, 0.0, 0.5, 0.0, True),
        (_ends_at_0, 0.0, 2.0, float("inf"), True),  # one slope, which is not eager's
        (_ends_at_0, 0.0, 1.0, float("inf"), False),
        (torch.exp, 0.0, 0.0, 1.0, False),
        (torch.log, 0.0, float("nan"), float("inf"), False),  # its slope there is eager's
        (_nowhere, 1.0, float("nan"), float("inf"), True),
        (_nowhere, 1.0, 0.0, float("inf"), False),
    ],
)
def test_a_kink_is_decided_by_the_slopes_on_both_sides(
    function: Callable[..., torch.Tensor], x: float, found: float, eager: float, is_kink: bool
):
    assert _kink(function, [x], [found], [eager]) == is_kink


def test_equals_share_a_gradient():
    assert _kink(torch.maximum, [1.0, 1.0], [1.0, 0.0], [0.5, 0.5])
    assert not _kink(torch.maximum, [1.0, 1.0], [1.0, 1.0], [0.5, 0.5])
    assert not _kink(torch.maximum, [1.0, 1.0], [0.0, 0.0], [0.5, 0.5])
    assert _kink(lambda x, y: torch.relu(x) + torch.relu(-y), [0.0, 0.0], [1.0, -1.0], [0.0, 0.0])  # none along both together


def test_a_gradient_is_measured_like_an_output():
    x = tensor([0.3, 0.6])
    eager, _, (_, gradient) = reference(torch.sin, [x], [0], [torch.ones(2)])
    assert torch.equal(eager.gradients[0], torch.cos(x))
    assert gradient.differs(torch.cos(x)).tolist() == [False, False]
    assert gradient.differs(torch.cos(x) + 1e-4).tolist() == [True, True]
