"""len(x) of an open axis on both exporters, and what it is elsewhere."""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
import pytest
import torch

import exporter
from tests.support import Calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def sums(x, index):
    return torch.zeros([len(x), *x.shape[1:]]).index_add(0, index, x) / len(x)


def counted(x, index):
    return torch.arange(len(x)) + index


def cut(x, index):
    return x[: len(x) // 2], x[len(x) - 1]


def of_what_is_computed(x, index):
    both = torch.cat([x, x])
    return both.reshape(len(both) // 2, -1)


def nested(x, index):
    def inside():
        return x.new_ones(len(index), 1)

    return inside() + x


def of_known_axes(x, index):
    """A number, as Python knows it: of which a list may be made, and a range."""
    return sum(row * [1, 2][len(x[0]) - 2] for row in [x] * len(x.T)) + len([x]) + len("ab")


def in_a_branch(x, index):
    def longer(x):
        return x / len(x) + len([x, x])

    return torch.cond(x.sum() > 0, longer, lambda x: x * len(x), (x,)) + index[:, None]


def of_what_is_no_tensor(x, index):
    return x * len(np.ones(3)) + len({1: 2}) + len(x.shape) + index[:, None]


BOTH = [(function, dynamo) for function in (sums, counted, cut, nested, of_known_axes) for dynamo in (True, False)]


@pytest.mark.parametrize(
    ("function", "dynamo"),
    [*BOTH, (of_what_is_no_tensor, False), (of_what_is_no_tensor, True), (in_a_branch, True), (of_what_is_computed, True)],
)  # a trace of TorchScript warns of that
def test_an_open_axis_stays_open(function, dynamo):
    rows = torch.export.Dim("rows", min=2)
    program = exporter.export(
        Calls(function),
        (torch.randn(6, 2), torch.arange(6)),
        dynamo=dynamo,
        dynamic_shapes=(({0: rows}, {0: rows}),),
        input_names=["x", "index"],
    )
    session = exporter.inference_session(program.model_proto)
    for count in (6, 9, 2):
        x, index = torch.randn(count, 2), torch.arange(count).flip(0)
        expected = function(x, index)
        found = session.run(None, {"x": x.numpy(), "index": index.numpy()} if len(session.get_inputs()) == 2 else {"x": x.numpy()})
        for ours, eager in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            np.testing.assert_allclose(ours, eager.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_without_open_axes_it_is_a_number(dynamo):
    seen = []
    exporter.export(Calls(lambda x: seen.append(type(len(x))) or x * len(x)), (torch.ones(3),), dynamo=dynamo)
    assert set(seen) == {int}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_no_module_of_python_keeps_it(dynamo):
    """Nor where the export fails; and who has a `len` of his own keeps it."""
    own = types.ModuleType("tests.own_len")
    own.len = own_len = lambda x: 3
    sys.modules["tests.own_len"] = own
    before = {name for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType) and "len" in vars(module)}

    def fails(x):
        assert own.len is own_len
        raise LookupError(len(x))

    try:
        with pytest.raises(Exception, match="3"):
            exporter.export(Calls(fails), (torch.ones(3),), dynamo=dynamo)
    finally:
        del sys.modules["tests.own_len"]
    assert own.len is own_len
    assert {name for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType) and "len" in vars(module)} <= before


def test_two_exports_at_a_time_each_take_theirs_away():
    from symbolics.quirks.pytorch.lengths import lengths_stay_open

    model, here = Calls(torch.relu), sys.modules[__name__]
    with contextlib.ExitStack() as first:
        first.enter_context(lengths_stay_open(model))
        with lengths_stay_open(model):
            assert "len" in vars(here)
        assert "len" in vars(here)
    assert "len" not in vars(here)
