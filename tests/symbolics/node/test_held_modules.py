"""What a call leaves behind in a module is put back, and said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symbolics.node.held_modules import Held, apart


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.seen = nn.Linear(2, 2), 1, [1]


def _renamed(module):
    module.other = module.__dict__.pop("seen")


def _in_another_order(module):
    module.scale = module.__dict__.pop("scale")


CHANGES = {
    "nothing": (lambda module: None, []),
    "an equal object": (lambda module: setattr(module, "seen", [1]), ["seen"]),
    "an equal number of another type": (lambda module: setattr(module, "scale", True), ["scale"]),
    "another attribute": (lambda module: setattr(module, "more", 1), ["more"]),
    "one less": (lambda module: delattr(module, "scale"), ["scale"]),
    "another name for the last one": (_renamed, ["seen", "other"]),
    "another order": (_in_another_order, []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_are_put_back(name):
    change, found = CHANGES[name]
    module = Block()
    held, _ = Held.of(module)
    before = dict(vars(module))
    change(module)
    assert held.changed() == found
    assert list(vars(module)) == list(before)
    assert all(vars(module)[key] is value for key, value in before.items())


@pytest.mark.parametrize("which", ["state", "argument", "in a list", "keyword", "neither"])
def test_a_result_that_was_given_is_a_view_of_it(which):
    state, x, listed, keyword, new = (torch.zeros(2) for _ in range(5))
    result = {"state": state, "argument": x, "in a list": listed, "keyword": keyword, "neither": new}[which]
    found = apart(result, ((state,), (x, [listed], 3, "text", None), {"z": keyword}))
    assert (found is result) == (which == "neither")
    assert found.data_ptr() == result.data_ptr()
    alone = {"state": state, "argument": x}.get(which, new)
    assert (apart(alone, ((state,), (x, 3, True, None), {})) is alone) == (alone is new)
    assert apart(listed, ((state,), (x, [listed]), {})) is not listed
