"""Values that leave torch in a forward: named with their line on TorchScript, and without a gradient on both exporters."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import exporter

HOW = {
    "numpy": (lambda x: torch.from_numpy(np.sin(x.detach().numpy())), ".numpy()"),
    "asarray": (lambda x: torch.from_numpy(np.asarray(x.detach()) * 2), "NumPy"),
    "item": (lambda x: x / x.abs().max().item(), ".item()"),
    "float": (lambda x: x * float(x.sum()), "float()"),
    "tolist": (lambda x: x * x.sum(0).tolist()[0], ".tolist()"),
    "if": (lambda x: x * 2 if x.sum() > -1e9 else x, "an `if`"),
    "in": (lambda x: x * 2 if 0.5 in x else x, "`in`"),
    "is_nonzero": (lambda x: x * 2 if x[0, 0].is_nonzero() else x, "is_nonzero()"),
    "equal": (lambda x: x * 2 if torch.equal(x, x.round()) else x, "torch.equal()"),
    "allclose": (lambda x: x * 2 if x.allclose(x.round()) else x, "torch.allclose()"),
    "address": (lambda x: x * (x.data_ptr() > 0), ".data_ptr()"),
    "storage": (lambda x: x * float(x.untyped_storage()[0]), ".untyped_storage()"),
    "copy": (lambda x: (copy.copy(x.detach()), x)[1], "copy.copy()"),
    "pickle": (lambda x: x * len(pickle.dumps(x.detach())), ".untyped_storage()"),
    "dlpack": (lambda x: x + torch.from_dlpack(x.detach()), "DLPack"),
    "apply": (lambda x: x + x.detach().clone().apply_(math.sin), ".apply_()"),
    "as many as are positive": (lambda x: sum((x for _ in range(torch.nonzero(x > 0).shape[0])), x), "an index"),
    "as many as a mask lets through": (lambda x: x * int(x[x > 0].size(0)), "int()"),
}


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(3, 3), how

    def forward(self, x):
        return self.how(self.linear(x))


def iterate(x):
    z = torch.zeros_like(x)
    for _ in range(20):
        z = torch.tanh(0.5 * z + x)
        if z.sum() > 1e9:
            break
    return z * float(z.sum())


def test_a_loop_names_its_line_once_in_each_export():
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exporter.export(nn.Sequential(Net(iterate), Net(iterate)), (torch.randn(2, 3),), dynamo=False)
        said = [each.message for each in caught if each.category is torch.jit.TracerWarning]
        assert [(each.module, str(each).split(" takes")[0]) for each in said] == [
            (module, how) for module in ("0", "1") for how in ("an `if`, or bool(),", "float()")
        ]


@pytest.mark.parametrize(("how", "named"), HOW.values(), ids=HOW)
def test_the_line_is_named(how, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Net(how), (torch.randn(2, 3),), dynamo=False)
    said = [one for one in caught if named in str(one.message)]
    assert len(said) == 1
    assert said[0].category is torch.jit.TracerWarning  # who filters torch's own has silence, as before
    assert said[0].filename == __file__
    assert "test_taken_values.py:" in str(said[0].message) and "lambda x" in str(said[0].message)
    assert not any("We can't record the data flow of Python values" in str(one.message) for one in caught)


def test_sizes_are_no_values():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*takes the value", torch.jit.TracerWarning)
        exporter.export(Net(lambda x: sum((x * n for n in range(int(x.T.shape[0]))), x)), (torch.randn(2, 3),), dynamo=False)


@pytest.mark.parametrize(("name", "dynamo"), [("item", True), ("item", False), ("float", False)])  # float() fails under dynamo's fakes
def test_no_gradient_flows_through_them(name, dynamo):
    torch.manual_seed(0)
    model, x = Net(HOW[name][0]), torch.randn(2, 3)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    for side in (model, module):
        side(x).square().sum().backward()
    torch.testing.assert_close(module.get_parameter("linear.weight").grad, model.linear.weight.grad, rtol=1e-4, atol=1e-5)
