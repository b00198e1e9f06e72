"""Loaded modules under create_graph, gradcheck and torch.func: eager's numbers at every order, or an error of ours."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck

import exporter
from symbolics.errors import RunError, UnsupportedOperatorError
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*", "tests.exporter.module.test_higher:*"]


class Power(Function):
    """As torch.func takes it; the backward reads an input and an output."""

    @staticmethod
    def forward(x, power):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * ctx.power * y / x, None


class Pair(Function):
    """Two inputs, two outputs, one of which is saved."""

    @staticmethod
    def forward(ctx, a, b):
        y = a * b
        ctx.save_for_backward(a, b, y)
        return y, y * a

    @staticmethod
    def backward(ctx, g, h):
        a, b, y = ctx.saved_tensors
        return g * b + 2 * h * y, g * a + h * a * a


class Calls(nn.Module):
    """A layer around a function of one tensor."""

    def __init__(self, function, size=3):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.function = function

    def forward(self, x):
        return self.function(self.inner(x)) * x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 2
        return torch.softmax(scores, -1) @ self.v(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(2, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def positive(x):
    return x.square() + 0.5


torch.manual_seed(3)
#: name -> (model, shape of its input, portable)
MODELS = {
    "mlp": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (2, 3), False),
    "silu and layer norm": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 1)), (2, 3), False),
    "gelu": (nn.Sequential(nn.Linear(3, 3), nn.GELU(approximate="tanh")), (2, 3), False),
    "log_softmax": (nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(-1)), (2, 3), False),
    "attention": (Attention(), (1, 3, 4), False),
    "batch norm in eval": (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Sigmoid()), (2, 3), False),
    "GRU": (Recurrent(nn.GRU), (1, 2, 2), False),
    "LSTM": (Recurrent(nn.LSTM), (1, 2, 2), False),
    "norm and division": (Calls(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1)), (2, 3), False),
    "logsumexp": (Calls(lambda x: x.logsumexp(-1, keepdim=True)), (2, 3), False),
    "saved input": (Calls(F.SavesInput.apply), (2, 3), False),
    "saved output": (Calls(F.SavesOutput.apply), (2, 3), False),
    "a chain that runs as one": (Calls(lambda x: F.SavesInput.apply(F.SavesOutput.apply(F.SavesInput.apply(x)))), (2, 3), False),
    "setup_context": (Calls(lambda x: F.SetupContext.apply(x, 3)), (2, 3), False),
    "setup_context, saved output": (Calls(lambda x: Power.apply(positive(x), 3)), (2, 3), False),
    "two in, two out": (Calls(lambda x: sum(Pair.apply(x, x.sin()))), (2, 3), False),
    "one tensor in two arguments": (Calls(lambda x: Pair.apply(x, x)[1]), (2, 3), False),
    "two Functions that meet": (Calls(lambda x: F.SavesInput.apply(x) * F.SavesOutput.apply(x).exp()), (2, 3), False),
    "input on ctx": (Calls(F.KeepsInputOnCtx.apply), (2, 3), False),
    "largest": (Calls(lambda x: F.IntegerOutput.apply(x * x)[0][:, None]), (2, 3), False),
    "portable saved input": (Calls(F.SavesInput.apply), (2, 3), True),
    "portable saved output": (Calls(F.SavesOutput.apply), (2, 3), True),
    "portable pair": (Calls(lambda x: sum(Pair.apply(x, x.sin()))), (2, 3), True),
    "some portable": (Calls(lambda x: F.SavesInput.apply(F.SavesOutput.apply(x)).cos()), (2, 3), ["SavesInput"]),
}
_loaded = {}


def loaded(name, dynamo=False):
    """(model, loaded, input) in float64; made once."""
    if (name, dynamo) not in _loaded:
        model, shape, portable = MODELS[name]
        model, x = model.double().eval(), torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = exporter.export(model, (x,), dynamo=dynamo, portable=portable)
        _loaded[name, dynamo] = model, exporter.load(program, allow=ALLOW).eval(), x
    model, module, x = _loaded[name, dynamo]
    return model, module, x.clone().requires_grad_()


def contexts(module):
    gc.collect()
    return len(module._onnx.plans.store)


# ------------------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("name", MODELS)
def test_gradcheck_and_gradgradcheck(name):
    _, module, x = loaded(name)
    assert gradcheck(module, (x,))
    assert gradgradcheck(module, (x,))
    assert contexts(module) == 0


@pytest.mark.parametrize("name", ["mlp", "attention", "a chain that runs as one", "two in, two out"])
def test_gradgradcheck_of_the_other_exporter(name):
    _, module, x = loaded(name, dynamo=True)
    assert gradgradcheck(module, (x,))


def penalty(module, x):
    """A loss with a gradient in it: as WGAN's."""
    module.zero_grad()
    y = module(x)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.sum() + (g.square().sum() - 1) ** 2


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_penalty_trains_parameters_as_eager_does(name):
    model, module, x = loaded(name)
    theirs = x.detach().clone().requires_grad_()
    for m, leaf in ((module, x), (model, theirs)):
        penalty(m, leaf).backward()
    torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-6, atol=1e-9)  # GELU has a constant of float32
    for (key, ours), want in zip(module.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad, rtol=1e-6, atol=1e-9, msg=key)
    assert contexts(module) == 0


@pytest.mark.parametrize("name", ["mlp", "saved output", "two in, two out", "portable pair"])
def test_the_third_order(name):
    model, module, x = loaded(name)

    def third(m):
        g = m(x).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return g

    torch.testing.assert_close(third(module), third(model), rtol=1e-9, atol=1e-9)
    assert contexts(module) == 0


class Stops(nn.Module):
    """Half of it is a constant to every derivative."""

    def forward(self, x):
        with torch.no_grad():
            still = x.sin()
        return (x.detach() ** 2 * x**3 + still * x**2).sum()


def test_gradients_of_every_order_stop_where_eager_stops_them(dynamo):
    model, x = Stops(), torch.randn(3, dtype=torch.float64, requires_grad=True)
    loaded = exporter.load(exporter.export(model, (x.detach(),), dynamo=dynamo))
    ours, theirs = loaded(x), model(x)
    for _ in range(3):
        ours, theirs = (torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (ours, theirs))
        torch.testing.assert_close(ours, theirs)
    assert theirs.abs().max() > 0


def test_convolution_and_batch_norm_in_float32():
    """onnxruntime has no convolution of doubles."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 1)).eval()
    x = torch.randn(2, 1, 4, 4, requires_grad=True)
    module = exporter.load(exporter.export(model, (x.detach(),), dynamo=False)).eval()
    double, theirs = model.double(), x.detach().double().requires_grad_()
    penalty(module, x).backward()
    penalty(double, theirs).backward()
    torch.testing.assert_close(x.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)
    for ours, want in zip(module.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), want.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5)], ids=str)
def test_a_second_order_goes_through_the_batchs_own_statistics(shape):
    """As nn.BatchNorm in train() has it; its gradient reads the statistics that the node gives out for the buffers."""
    norm = (nn.BatchNorm1d(3)).double().train()
    loaded = exporter.load(exporter.export(copy.deepcopy(norm), (torch.randn(shape, dtype=torch.float64),))).train()
    x, weights = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    found = []
    for module in (loaded, norm):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((module(leaf) ** 3).sum(), leaf, create_graph=True)
        (gradient * weights).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # ONNX's epsilon is a float32


class Noisy(Function):
    """Draws in forward and backward, and counts both."""

    runs = backwards = 0

    @staticmethod
    def forward(ctx, x):
        Noisy.runs += 1
        ctx.noise = torch.rand_like(x)
        ctx.save_for_backward(x)
        return x**3 * ctx.noise

    @staticmethod
    def backward(ctx, g):
        Noisy.backwards += 1
        (x,) = ctx.saved_tensors
        return g * x**2 * ctx.noise * torch.rand_like(x)


def test_every_order_sees_what_one_forward_and_one_backward_have_drawn():
    model = Calls(Noisy.apply).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = exporter.load(exporter.export(model, (x.detach(),), dynamo=False, eager_check=False), allow=ALLOW)
    results = []
    for m in (module, model):
        m(x)  # the first run of a node looks at what forward does
        Noisy.runs = Noisy.backwards = 0
        torch.manual_seed(5)
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        results.append((g.detach(), h, Noisy.runs, Noisy.backwards))
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=1e-9, atol=1e-9)
    assert results[0][2:] == results[1][2:] == (1, 2)  # of y, whose gradient the product with x is differentiated by, too


def test_once_differentiable_is_an_error_that_names_the_function():
    model, x = Calls(F.Once.apply), torch.randn(2, 3, requires_grad=True)
    module = exporter.load(exporter.export(model, (x.detach(),), dynamo=False), allow=ALLOW)
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)  # the first order is there, as in eager
    with pytest.raises(RunError, match=r"functions:Once.*@once_differentiable"):
        g.sum().backward()


def test_what_has_no_second_order_says_so_when_it_is_asked_for():
    from tests.zoo.portable import OnceSquare

    model, x = Calls(OnceSquare.apply), torch.randn(2, 3, requires_grad=True)
    module = exporter.load(exporter.export(model, (x.detach(),), dynamo=False, portable=True))
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedOperatorError, match="once_differentiable"):
        g.sum().backward()


# ------------------------------------------------------------------------------------------- graphs, changes and memory


def test_a_second_backward_needs_retain_graph():
    _, module, x = loaded("two in, two out")
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    g.sum().backward(retain_graph=True)
    first = x.grad.clone()
    g.sum().backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        g.sum().backward()
    del g
    assert contexts(module) == 0


def test_the_forward_may_be_used_up_while_the_gradient_lives():
    model, module, x = loaded("two in, two out")
    found = []
    for m in (module, model):
        y = m(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.sum(), x, retain_graph=True)[0])
        if m is module:
            y.sum().backward()  # frees what the forward left, but for what the gradient needs
            found.append(torch.autograd.grad(g.sum(), x)[0])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=1e-9)
    del y, g, m
    assert contexts(module) == 0


def test_graphs_that_nobody_differentiates_leave_no_context():
    _, module, x = loaded("a chain that runs as one")
    for _ in range(3):
        (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        assert contexts(module) == 2
        del g
        assert contexts(module) == 0


def test_a_tensor_changed_in_place_is_torchs_error():
    _, module, x = loaded("two in, two out")
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        g.sum().backward()


def test_a_parameter_that_nothing_reads_may_change():
    """The bias of the first layer is in no gradient of the second order."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    module = exporter.load(exporter.export(model, (torch.randn(2, 3, dtype=torch.float64),), dynamo=False))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with torch.no_grad():
        module.get_parameter("1.bias").add_(1)
    g.sum().backward()
    assert x.grad is not None


def test_hooks_see_gradients_of_both_orders():
    model, module, x = loaded("saved input")
    seen = {}
    for m in (module, model):
        found = seen[m] = []
        y = m(x)
        y.register_hook(lambda g, found=found: found.append(("y", g.detach().clone())))
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.register_hook(lambda h, found=found: found.append(("g", h.detach().clone())))
        g.square().sum().backward()
    assert [name for name, _ in seen[module]] == [name for name, _ in seen[model]] == ["y", "g", "y"]
    for (_, ours), (_, theirs) in zip(seen[module], seen[model], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_plain_backward_makes_no_higher_order():
    model = nn.Linear(3, 3)
    module = exporter.load(exporter.export(model, (torch.randn(2, 3),), dynamo=False))
    module(torch.randn(2, 3)).sum().backward()
    (orders,) = [plan.orders for plan in module._onnx.plans._plans.values() if plan.orders is not None]
    assert not orders.first
    x = torch.randn(2, 3, requires_grad=True)
    torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert sorted(len(plan.orders.first) for plan in module._onnx.plans._plans.values() if plan.orders is not None) == [0, 1]
