"""Sizes that are computed from open ones, in front of a portable Function: the same as in eager mode at all sizes, or a PythonOp that says why."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.torch_version import TorchVersion

import exporter
from symbolics.errors import PythonopWarning

pad = torch.nn.functional.pad


def function(forward, backward):
    class Called(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*(one for one in args if isinstance(one, torch.Tensor)))
            ctx.others = sum(not isinstance(one, torch.Tensor) for one in args)
            return forward(*args)

        @staticmethod
        def backward(ctx, g):
            return *backward(g, *ctx.saved_tensors), *[None] * ctx.others

    return Called


MEAN = function(lambda x: x.sum(0) / x.shape[0], lambda g, x: ((g * x.shape[0]).expand_as(x),))
BOTH = function(
    lambda x, y: x.sum(0) * x.shape[0] + y.sum(0) / y.shape[0], lambda g, x, y: (g.expand_as(x) * y.shape[0], g.expand_as(y) * x.shape[0])
)
BEHIND = function(lambda x, y: torch.cat([x, y]).cumsum(0), lambda g, x, y: (g[: x.shape[0]] * 2, g[x.shape[0] :] * 3))
TWICE = function(lambda x, y: torch.cat([y, y]) + x, lambda g, x, y: (g * 2, g[: y.shape[0]] * 3))
TAIL = function(lambda x, y: x[1:] * y, lambda g, x, y: (pad(g, [0, 0, 1, 0]) * 2, g * x[:-1]))
PADDED = function(lambda x, k: pad(x, [0, 0, 0, k]), lambda g, x: (g[: x.shape[0]] * 2,))
ASKED = function(lambda x, k: x * 2 if k else x * 3, lambda g, x: (g * 2,))
ZEROS = function(lambda x, k: torch.cat([x, x.new_zeros(k, 3)]) * k, lambda g, x: (g[: x.shape[0]],))
QUARTER = function(lambda x: x if x.shape[0] // 4 == 1 else x * 2, lambda g, x: (g,))
FOUR = function(lambda x: x * torch.arange(4.0)[:, None] if x.shape[0] == 4 else x * 2, lambda g, x: (g,))

#: name -> the Function, its arguments of x (n, 3), numbers of rows (the first one is the example's), and what a warning says if it stays a PythonOp.
TABLE = {
    "n // 4": (MEAN, lambda x: (x[: x.shape[0] // 4],), (8, 4, 9, 20), ""),
    "n // 8": (MEAN, lambda x: (x[: x.shape[0] // 8],), (16, 24, 8, 33), ""),
    "a view": (MEAN, lambda x: (x.view(x.shape[0] // 4, 4, 3).flatten(1),), (8, 4, 20), ""),
    "n - 1": (MEAN, lambda x: (x[1:],), (5, 2, 9), ""),
    "2 n": (MEAN, lambda x: (torch.cat([x, x]),), (5, 1, 9), ""),
    "pooled": (MEAN, lambda x: (x[: (x.shape[0] + 2) // 2 - 1],), (6, 2, 9), ""),
    "min": (MEAN, lambda x: (x[: torch.sym_min(x.shape[0], 6)],), (5, 9, 2), ""),
    "mod": (MEAN, lambda x: (x[: x.shape[0] % 5],), (8, 9, 6), ""),
    "windows": (MEAN, lambda x: (x.unfold(0, 4, 2).flatten(1),), (8, 4, 13), ""),
    "flat": (MEAN, lambda x: (x.flatten()[:, None],), (8, 1, 3), ""),
    "two": (BOTH, lambda x: (x[1:], x[: x.shape[0] // 2]), (8, 9, 2), ""),
    "concatenated inside": (BEHIND, lambda x: (x * 2, x[: x.shape[0] // 2]), (8, 9, 2), ""),
    "n beside 2 n": (TWICE, lambda x: (torch.cat([x, x]), x * 3), (8, 9, 1), ""),
    "n - 1 beside n": (TAIL, lambda x: (x * 2, x[:-1]), (8, 9, 2), ""),
    "what to pad": (PADDED, lambda x: (x * 2, -x.shape[0] % 4), (7, 8, 9, 1), ""),
    "n // 2 as argument": (ZEROS, lambda x: (x * 2, x.shape[0] // 2), (8, 4, 1), ""),
    "a branch on an argument": (ASKED, lambda x: (x * 2, -x.shape[0] % 4), (7, 8, 9), "size that is input 1; in forward at .*test_computed_sizes:"),
    "a branch on a quarter": (QUARTER, lambda x: (torch.cat([x, x]),), (8, 3), "axis 0 of tensor input 0; in forward at "),
    "a size of a constant": (FOUR, lambda x: (x[1:],), (8, 5), "axis 0 of tensor input 0; in forward at "),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, called, arguments):
        super().__init__()
        self.called, self.arguments, self.weight = called, arguments, torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.called.apply(*(one * self.weight if isinstance(one, torch.Tensor) else one for one in self.arguments(x)))


def same(model, program, called, x):
    loaded = exporter.load(program, allow=[called])
    found, expected = [], []
    for one, results in ((loaded, found), (model, expected)):
        given = x.clone().requires_grad_()
        y = one(given)
        one.zero_grad()
        y.sin().sum().backward()
        results += [y.detach(), given.grad, one.get_parameter("weight").grad]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TABLE)
def test_a_computed_size(name):
    called, arguments, sizes, says = TABLE[name]
    model = Model(called, arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PythonopWarning)
        program = exporter.export(model, (torch.randn(sizes[0], 3),), portable=True, dynamo=True, dynamic_shapes={"x": {0: "n"}})
    assert [call.kind for call in program.portable] == ["PythonOp" if says else "function"]
    assert not says or any(re.search(says, str(one.message)) for one in caught)
    for rows in sizes:
        same(model, program, called, torch.randn(rows, 3))


class Strided(torch.nn.Module):
    """Four convolutions: (n - 1) // 2 + 1 four times over, of both axes."""

    def __init__(self):
        super().__init__()
        self.called = function(
            lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3]),
            lambda g, x: ((g / (x.shape[2] * x.shape[3]))[:, :, None, None].expand_as(x),),
        )
        self.layers = torch.nn.Sequential(*[torch.nn.Conv2d(2, 2, 3, 2, 1) for _ in range(4)])

    def forward(self, x):
        return self.called.apply(self.layers(x))


def test_behind_strides():
    torch.manual_seed(0)
    model = Strided()
    program = exporter.export(
        model, (torch.randn(2, 2, 64, 48),), portable=True, dynamo=True, dynamic_shapes={"x": {0: "n", 2: "h", 3: "w"}}
    )
    assert [call.kind for call in program.portable] == ["function"]
    loaded = exporter.load(program)
    for height, width in ((64, 48), (96, 64), (33, 80)):
        x = torch.randn(3, 2, height, width)
        found, expected = loaded(x), model(x)
        torch.testing.assert_close(found, expected)
        of_found = torch.autograd.grad(found.sin().sum(), [loaded.get_parameter(name) for name, _ in model.named_parameters()])
        of_expected = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
        torch.testing.assert_close(of_found, of_expected, rtol=1e-3, atol=1e-5)


#: Forwards of two tensors (n, 5) and (n, 1): operators that torch makes of others, among them.
OF_TWO = {
    "mul": lambda a, b: a * b,
    "addcmul": lambda a, b: torch.addcmul(torch.ones(5), a, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.exp()),
    "lerp": lambda a, b: torch.lerp(a, a * 2, b),
    "baddbmm": lambda a, b: torch.baddbmm(b[None], a[None], torch.ones(1, 5, 5))[0],
    "pad": lambda a, b: pad(a, [1, 0, 1, 0])[1:, 1:] * b,
}


class OfTwo(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.called = function(forward, lambda g, a, b: (g * b, pad((g * a).sum(-1, keepdim=True), [0, 0, 1, 0])[1:]))

    def forward(self, x, y):
        return self.called.apply(x, y)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", OF_TWO)
def test_one_name_is_one_size(name, dynamo):
    model, batch = OfTwo(OF_TWO[name]), torch.export.Dim("batch", min=2, max=100) if name in ("mul", "lerp") else "batch"
    options = {"portable": [model.called], "dynamo": dynamo, "dynamic_shapes": {"x": {0: batch}, "y": {0: batch}}}
    loaded = exporter.load(exporter.export(model, (torch.randn(4, 5), torch.randn(4, 1)), **options))
    for rows in (4, 7, 2):
        given = torch.randn(rows, 5, requires_grad=True), torch.randn(rows, 1, requires_grad=True)
        y, z = loaded(*given), model(*given)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), given), torch.autograd.grad(z.sin().sum(), given))


def test_sizes_have_their_names_in_messages():
    options = {"portable": True, "dynamo": True, "dynamic_shapes": {"x": {0: "rows"}, "y": {0: "lines"}}}
    with pytest.warns(
        PythonopWarning,
        match=r"size of tensor a \(rows\) must match the size of tensor b \(lines\) .*\(in forward at .*test_computed_sizes:\d+\): give two axes",
    ):
        exporter.export(OfTwo(OF_TWO["mul"]), (torch.randn(4, 5), torch.randn(4, 1)), **options)


def test_other_messages_name_line_and_way_out():
    forwards = {
        r"values of a tensor \(in forward at .*:\d+\): torch.where": lambda x: x * 2 if x.sum() > 0 else x,
        r"cannot translate it .*aten.linalg_qr.*: with other operators of torch's it is portable": lambda x: torch.linalg.qr(x)[0],
    }
    if TorchVersion(torch.__version__) < "2.15":  # later ones trace such sizes
        forwards[r"sizes of its results depend .* \(in forward\): keep the size"] = lambda x: x[x > 0]
    for says, forward in forwards.items():
        with pytest.warns(PythonopWarning, match=says):
            exporter.export(Model(function(forward, lambda g, x: (x,)), lambda x: (x,)), (torch.ones(4, 3),), portable=True)
    with pytest.warns(PythonopWarning, match=r"values of a tensor \(in backward at "):
        exporter.export(
            Model(function(lambda x: x * 2, lambda g, x: (g if x.sum() > 0 else x,)), lambda x: (x,)), (torch.ones(4, 3),), portable=True
        )
