"""Gradients by tensors that functions give back as they are: who read them before such a call, and who read its result, read one tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import exporter
from tests.support import Calls
from tests.trains import loaded
from tests.zoo.functions import SavesNothing

#: Each gives its 3x3 floats back, or has a step inside that does.
BOTH = {
    "contiguous": lambda x: x.contiguous(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to_other": lambda x: x.to(x),
    "cpu": lambda x: x.cpu(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "flatten": lambda x: x.flatten(1),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_2d_list": lambda x: torch.atleast_2d([x, x])[1],
    "atleast_1d_two": lambda x: torch.atleast_1d(x, x)[0],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[0],
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, False),
    "conj": torch.conj,
    "positive": lambda x: +x,
    "real": lambda x: x.real,
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "sum_to_size": lambda x: x.sum_to_size(3, 3),
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "hstack": lambda x: torch.hstack([x, x])[:, :3],
    "vstack": lambda x: torch.vstack([x, x])[:3],
    "several": lambda x: x.to(torch.float32).type_as(x).contiguous(),
}
DYNAMO = {"column_stack": lambda x: torch.column_stack([x, x])[:, :3], "row_stack": lambda x: torch.row_stack([x, x])[:3]}


class Net(nn.Module):
    def __init__(self, ways):
        super().__init__()
        self.layer, self.ways = nn.Linear(3, 3), ways

    def forward(self, x):
        h, energy, read = self.layer(x), 0.0, []
        for i, way in enumerate(self.ways.values()):
            y = h * (1 + 0.1 * i)
            before = y.sin()
            energy = energy + (way(y) * before * y.cos()).sum()
            read.append(y)
        return torch.stack(torch.autograd.grad(energy, read, create_graph=True))


def test_what_reads_it_before_and_after(dynamo):
    ways = {**BOTH, **(DYNAMO if dynamo else {})}
    model = Net(ways)
    module = loaded(model, (torch.randn(3, 3),), dynamo=dynamo, allow=())
    x = torch.randn(3, 3)
    ours, theirs = module(x), model(x)
    assert not [name for name, g, want in zip(ways, ours, theirs, strict=True) if not torch.allclose(g, want, atol=1e-5)]
    for result in (ours, theirs):
        result.sin().sum().backward()
    torch.testing.assert_close(module.get_parameter("layer.weight").grad, model.layer.weight.grad, rtol=1e-3, atol=1e-3)


class Hooked(nn.Module):
    def forward(self, x):
        y = x * 2
        before = y.sin()
        after = y.type_as(y)
        y.register_hook(double)
        return before * after


def double(g):
    return 2 * g


def test_a_hook_on_what_was_given_back(dynamo):
    """Autograd runs it on the whole gradient of the tensor, of whatever name it was read by."""
    model = Hooked()
    module = loaded(model, (torch.randn(3),), dynamo=dynamo, allow=[f"{__name__}:double", "symbolics.capture.gradient_hooks"])
    ours, theirs = (x.clone().requires_grad_() for x in torch.randn(3).expand(2, 3))
    module(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


class Chain(nn.Module):
    """By a tensor, by what was made of it, by a parameter, and by a gradient, in one call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        z = y.sin()
        (inner,) = torch.autograd.grad((z * y).square().sum(), y, create_graph=True)
        return torch.autograd.grad((inner * z).sum(), [z, y, x, inner, self.layer.weight], create_graph=True)


def test_by_a_tensor_and_what_was_made_of_it(dynamo):
    model = Chain()
    module = loaded(model, (torch.randn(3, 3),), dynamo=dynamo, allow=())
    x = torch.randn(3, 3, requires_grad=True)
    ours, theirs = module(x), model(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for results in (ours, theirs):
        sum(each.sin().sum() for each in results).backward()
    torch.testing.assert_close(module.get_parameter("layer.weight").grad, model.layer.weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_the_list_has_all_that_torch_gives_back():
    """A sweep over torch's functions of one tensor and little beside: what gives its argument back has a row, by its name or that of another spelling."""
    known = {*BOTH, "conj_physical", "dequantize", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "to_dense", "__pos__"}
    arguments = [(), (1,), (0.5, False), (torch.float32,), ((3, 3),)]
    found = set()
    for space, functions in torch.overrides.get_overridable_functions().items():
        for function in functions:
            name = getattr(function, "__name__", "")
            in_place = name.endswith("_") or "inplace" in getattr(getattr(function, "__code__", None), "co_varnames", ())
            if (in_place and "dropout" not in name) or name.startswith("__i") or getattr(space, name, None) is not function:
                continue
            for rest in arguments:
                x = torch.randn(3, 3, requires_grad=True)
                try:
                    results = pytree.tree_leaves(function(x, *rest))
                except Exception:
                    continue
                if any(each is x for each in results) and x._version == 0:
                    found.add(name)
    assert {"contiguous", "flatten", "broadcast_tensors"} <= found <= known, found


GRU = nn.GRU(6, 5, batch_first=True)
#: Composite operators that ask for sizes: what is computed to see whether they give their argument back settles none.
ASKING = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(8, 9), mode="bilinear"),
    "gru": lambda x: GRU(x[:, 0])[0],
    "sum_to_size": lambda x: x.sum(1, keepdim=True).sum_to_size(x.shape[0], 1, 4, 6),
    "stft": lambda x: torch.view_as_real(torch.stft(x.flatten(1), 16, window=torch.ones(16), return_complex=True)),
    "norms": lambda x: F.group_norm(F.instance_norm(x), 2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ASKING)
def test_an_open_axis_stays_open_beside_a_Function(name):
    model = Calls(lambda x: SavesNothing.apply(ASKING[name](x)))
    program = exporter.export(model, (torch.randn(3, 2, 4, 6),), dynamic_shapes=(({0: "batch"},),))
    assert str(program.model.graph.inputs[0].shape[0]) == "batch"
    x = torch.randn(5, 2, 4, 6)
    torch.testing.assert_close(exporter.load(program, allow=[SavesNothing])(x), model(x), rtol=1e-4, atol=1e-4)
