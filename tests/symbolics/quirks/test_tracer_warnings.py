"""No warning of torch's tracer points at a line of ours: it would say nothing that a user can act on."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch

import exporter
import symbolics
from tests.support import Calls
from tests.symbolics.quirks.test_extremes import BOTH, ROWS, TWICE

OURS = tuple(str(pathlib.Path(str(package.__file__)).parent) for package in (exporter, symbolics))

SIZES = {
    "index_add": lambda x, i: torch.zeros(4, 3).index_add(0, i, x),
    "index_reduce": lambda x, i: torch.zeros(4, 3).index_reduce(0, i, x, "mean"),
    "index_fill": lambda x, i: (x * 2).index_fill(0, i, x.sum()),
    "scatter_reduce": lambda x, i: torch.zeros(4, 3).scatter_reduce(0, i[:, None].expand_as(x), x, "mean", include_self=False),
    "a branch": lambda x, i: x * 2 if x.shape[0] == 3 else x,
    "all elements": lambda x, i: x * 2 if x.numel() != 6 else x,
    "in": lambda x, i: x * 2 if 2 in x.shape else x,
    "numbers": lambda x, i: x * int(x.shape[0]) * len(x) + torch.as_tensor(x.shape[0]),
    "parts": lambda x, i: sum(x.unbind(0)) + torch.tensor([1.0, 2, 3]),
    "nothing": lambda x, i: x.sum(0, keepdim=True).repeat(x.shape[0], 1) + x.new_zeros(x.shape),
}


def pointing_at_us(function, args, **options):
    """Where the warnings of torch's tracer point, of those in our files."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Calls(function), args, dynamo=False, **options)
    said = [each for each in caught if issubclass(each.category, torch.jit.TracerWarning)]
    return sorted({f"{each.filename}:{each.lineno}" for each in said if each.filename.startswith(OURS)})


@pytest.mark.parametrize("case", BOTH)
def test_none_of_what_torch_writes_wrongly(case):
    function, *args = BOTH[case]
    assert pointing_at_us(function, tuple(args)) == []


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("opened", [True, False])
def test_none_of_sizes(case, opened):
    options = {"dynamic_axes": {"x": {0: "rows"}, "i": {0: "rows"}}, "input_names": ["x", "i"]} if opened else {}
    assert pointing_at_us(SIZES[case], (ROWS[:3].clone(), TWICE), **options) == []


def test_what_the_model_does_is_warned_of_at_its_line():
    with pytest.warns(torch.jit.TracerWarning, match="takes the value") as caught:
        exporter.export(Calls(lambda x: x * 2 if x.sum() > 0 else x), (ROWS,), dynamo=False)
    assert {each.filename for each in caught if issubclass(each.category, torch.jit.TracerWarning)} == {__file__}


class TakesGradients(torch.nn.Module):
    def forward(self, x):
        y = torch.log1p((x * x).abs()).sum() + torch.expm1(x).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]


def test_a_gradient_in_forward_through_what_has_no_slope():
    """torch warns where it has to go back through an operator of ours that has no backward; such a part is detached before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(TakesGradients(), (torch.randn(3).requires_grad_(),), dynamo=False)
    assert [str(each.message) for each in caught if "autograd kernel" in str(each.message)] == []
