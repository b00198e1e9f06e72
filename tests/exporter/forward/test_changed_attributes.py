"""What an opaque module changes in the lists, dicts, sets, arrays and dataclasses that it holds: each call of a file begins as the export did."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError, PythonopWarning
from tests.zoo import modules as M

HERE = f"{__name__}:"


@dataclasses.dataclass
class Seen:
    times: int = 0
    sizes: list[int] = dataclasses.field(default_factory=list)


class Object:
    def __init__(self):
        self.sizes = []


def in_a_set(held):
    held.add(len(held))
    return len(held)


def in_a_list(held):
    held.append(1)
    return len(held)


def in_a_dict(held):
    held["n"] = held.get("n", 0) + 1
    return held["n"]


def in_an_array(held):
    held[1] += 1
    return float(held[1])


def in_a_dataclass(held):
    held.times += 1
    return held.times


KINDS = {
    "a list": (list, in_a_list),
    "a set": (set, in_a_set),
    "a dict": (dict, in_a_dict),
    "an array": (lambda: np.zeros(3), in_an_array),
    "a dataclass": (Seen, in_a_dataclass),
    "a list of a dataclass": (Seen, lambda held: in_a_list(held.sizes)),
    "a list of an object": (Object, lambda held: in_a_list(held.sizes)),
    "a dict in a tuple": (lambda: (1, [{}]), lambda held: in_a_dict(held[1][0])),
}


class Counts(nn.Module):
    """Multiplies by how often it was called."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.held, self.linear = kind, KINDS[kind][0](), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * KINDS[self.kind][1](self.held)


def picture(held):
    return repr(vars(held)) if type(held) is Object else repr(held)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:forward changes state that the file cannot carry")
def test_each_call_begins_as_the_export_did(kind, dynamo):
    model, x = M.Net(Counts(kind)).eval(), torch.randn(3, 4)
    before = picture(model.block.held)
    first = copy.deepcopy(model)(x)
    with pytest.warns(PythonopWarning, match=r"Counts in module block: its forward sets held.*which it may read in the next call"):
        program = exporter.export(model, (x,), opaque=[Counts], dynamo=dynamo)
    assert picture(model.block.held) == before
    loaded = exporter.load(program, allow=[f"{HERE}*", f"{HERE}Object"]).eval()
    for _ in range(3):
        torch.testing.assert_close(loaded(x), first)


class Fills(nn.Module):
    """Keeps what it makes of a size."""

    def __init__(self):
        super().__init__()
        self.made, self.linear = {}, nn.Linear(4, 4)

    def forward(self, x):
        if len(x) not in self.made:
            self.made[len(x)] = torch.arange(float(len(x)))[:, None]
        return self.linear(x) * self.made[len(x)]


@pytest.mark.filterwarnings("ignore:.*its forward sets made")
def test_tensors_that_a_dict_is_filled_with_are_made_anew(dynamo):
    model, x = M.Net(Fills()), torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim("n", min=2)}}
    loaded = exporter.load(exporter.export(model, (x,), opaque=[Fills], dynamo=dynamo, dynamic_shapes=shapes), allow=[f"{HERE}*"])
    assert model.block.made == {}
    for size in (3, 5, 3):
        x = torch.randn(size, 4)
        torch.testing.assert_close(loaded(x), model(x))


def test_a_dict_that_has_tensors_already_is_refused():
    model, x = M.Net(Fills()), torch.randn(3, 4)
    model(x)
    with pytest.raises(ExportError, match=r"its attribute 'made' holds a tensor that is no buffer.*\n.*empty it before the export"):
        exporter.export(model, (x,), opaque=[Fills])
