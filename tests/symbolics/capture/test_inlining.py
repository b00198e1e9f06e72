"""Where gradients stop around a Function that is inlined: what it does to its own boundary stops nothing, what its modules do stops as in eager."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError, PythonopWarning
from tests.support import Calls
from tests.symbolics.capture import functions as f
from tests.trains import assert_step_alike


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Stable(Plain):
    """As performer's softmax kernel: what is subtracted is a constant to autograd."""

    def forward(self, x):
        h = self.linear(x)
        return torch.exp(h - h.amax(-1, keepdim=True).detach())


class Gated(Plain):
    def forward(self, x):
        h = self.linear(x)
        with torch.no_grad():
            gate = torch.sigmoid(h)
        return h * gate


class Recomputes(torch.autograd.Function):
    """A reversible block as people write it: backward runs the module again, with gradients on."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        with torch.no_grad():
            y = module(x.detach())
        ctx.save_for_backward(x)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(leaf), g)
        return None, leaf.grad


class Invertible(Recomputes):
    """As torch_geometric's InvertibleFunction and memcnn: detach_ of what it returns."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        with torch.no_grad():
            outputs = (module(x),)
        ctx.save_for_backward(x)
        (y,) = tuple(output.detach_() for output in outputs)
        return y


def decorated(forward):
    """As torch.cuda.amp.custom_fwd: what stands in for forward closes over it."""

    @functools.wraps(forward)
    def run(*args):
        return forward(*args)

    return run


class Decorated(Recomputes):
    """As memcnn: the forward of its class is what a decorator was given, and nothing that the Function is given to run."""

    @staticmethod
    @decorated
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x.detach()).detach()


class Around(Recomputes):
    """Runs a module that calls another Function of the kind: the outer one goes on to stop nothing."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x).detach()


class Inner(Plain):
    def forward(self, x):
        return Recomputes.apply(self.linear, x) * 2


class Net(nn.Module):
    def __init__(self, function, module):
        super().__init__()
        self.first, self.module, self.function = nn.Linear(4, 4), module, function

    def forward(self, x):
        return self.function.apply(self.module, self.first(x))


@pytest.mark.parametrize("module", [Plain, Stable, Gated])
@pytest.mark.parametrize("function", [Recomputes, Invertible, Decorated])
def test_gradients_stop_where_eager_stops_them(function, module, dynamo):
    check(Net(function, module()), dynamo)


def test_a_function_inside_a_function(dynamo):
    check(Net(Around, Inner()), dynamo)


class Block(nn.Module):
    """As revtorch's and reformer_pytorch's: a module with a backward_pass, whose forward turns gradients off."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        one, two = x.chunk(2, -1)
        with torch.no_grad():
            one = one + self.inner(two)
        return torch.cat([one, two], -1)

    def backward_pass(self, y, g):
        one, two = y.chunk(2, -1)
        with torch.enable_grad():
            leaf = two.detach().requires_grad_()
            found = self.inner(leaf)
            torch.autograd.backward(found, g.chunk(2, -1)[0])
        return torch.cat([one - found.detach(), two], -1), g + torch.cat([torch.zeros_like(one), leaf.grad], -1)


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        y = block(x)
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx, g):
        return None, ctx.block.backward_pass(ctx.y, g)[1]


class Halves(Stable):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_a_module_that_has_a_backward_of_its_own_stops_nothing(dynamo):
    check(Net(Reverses, Block(Halves())), dynamo)


class Holder:
    def __init__(self, run):
        self.run = run

    def __call__(self, x):
        return self.run(x)


class Replays(nn.Module):
    """Checkpoints as people write them: what is run under no_grad, and again in backward, is a function over parameters."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.linear, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x):
        linear, scale = self.linear, self.scale * 2

        def gated(module, t):
            h = module(t)
            return h * h.detach() + t.detach() * scale  # eager's backward stops here, too

        run = {
            "closure": lambda t: self.linear(t).tanh(),
            "tensor": lambda t: t * scale,
            "default": lambda t, inner=linear: inner(t),
            "stops": lambda t: gated(linear, t),
            "partial": functools.partial(gated, linear),
            "object": Holder(lambda t: linear(t).sin()),
        }.get(self.kind, linear)
        if self.kind == "class of a call":
            return _made(run).apply(None, self.first(x))
        return Recomputes.apply(run, self.first(x))


def _made(run):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, nothing, x):
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx, g):
            ctx.module = run
            return Recomputes.backward(ctx, g)

    return Made


@pytest.mark.parametrize("kind", ["closure", "tensor", "default", "stops", "partial", "object", "class of a call"])
def test_what_an_inlined_function_runs_keeps_its_gradients(kind, dynamo):
    check(Replays(kind), dynamo, inline=["*"])


class Adjoint(torch.autograd.Function):
    """As torchdiffeq's odeint_adjoint: the module's parameters are arguments, and backward has gradients of its own for them."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        _, *parameters = ctx.saved_tensors
        return None, g * 2, *(torch.ones_like(p) for p in parameters)


def test_a_backward_that_answers_for_the_parameters_itself_is_told_of(dynamo):
    class Solves(Net):
        def forward(self, x):
            return self.function.apply(self.module, self.first(x), *self.module.parameters())

    with pytest.warns(PythonopWarning, match=r"Adjoint.*and not what its backward computes.*exporter\.verify.*functional_call"):
        exporter.export(Solves(Adjoint, Plain()), (torch.randn(3, 4),), dynamo=dynamo)
    with pytest.warns(PythonopWarning, match=r"Recomputes.*derivative of its forward\.$"):
        exporter.export(Net(Recomputes, Plain()), (torch.randn(3, 4),), dynamo=dynamo)


def check(model, dynamo, **options):
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PythonopWarning)
        loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo, **options))
    assert_step_alike(loaded, model, (x,))


@pytest.mark.parametrize("function", [torch.exp, lambda x: (x * x.detach()).sum(), f.Mapped.apply], ids=["exp", "detach", "a Function"])
def test_gradients_through_vmap(function, dynamo):
    class Model(nn.Module):
        def forward(self, x):
            return torch.func.vmap(function)(x * 2)

    x, z = (torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_() for _ in range(2))
    inline = [f.Mapped] if function == f.Mapped.apply else ()
    y, expected = exporter.load(exporter.export(Model(), (x,), dynamo=dynamo, inline=inline))(x), Model()(z)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def _cubes(x):
    return (x**3).sum()


class Derived(torch.autograd.Function):
    """Its forward is a derivative that torch.func takes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.func.grad(_cubes)(x)

    @staticmethod
    def backward(ctx, g):
        return 6 * ctx.saved_tensors[0] * g


@pytest.mark.parametrize(
    "function",
    [
        Derived.apply,
        torch.func.grad(_cubes),
        lambda x: torch.func.vjp(torch.exp, x)[1](torch.ones_like(x))[0],
        torch.func.jacrev(_cubes),  # TorchScript kept the example's values
        torch.func.jacfwd(_cubes),  # as here
        torch.func.hessian(_cubes),
    ],
    ids=["inlined", "grad", "vjp", "jacrev", "jacfwd", "hessian"],
)
def test_derivatives_by_torch_func(function, dynamo):
    """Also in the forward of a Function that is inlined."""
    x, inline = torch.linspace(-1, 1, 6).reshape(2, 3), [Derived] if function == Derived.apply else ()
    program = exporter.export(nn.Sequential(OrderedDict(inner=Calls(function))), (x,), dynamo=dynamo, inline=inline)
    ours, theirs = ((2 * x).requires_grad_() for _ in range(2))
    y, z = exporter.load(program)(ours), function(theirs)
    torch.testing.assert_close(y, z)
    y.sum().backward()
    z.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_gradient_under_vmap(dynamo):
    x, function = torch.linspace(-1, 1, 6).reshape(2, 3), torch.func.vmap(torch.func.grad(_cubes))
    with pytest.raises(ExportError, match=r"^torch\.func\.grad.* called in module inner at tests\S+:\d+: .*which stays one node"):
        exporter.export(nn.Sequential(OrderedDict(inner=Calls(function))), (x,), dynamo=dynamo)
    # What comes after it is as if nothing had been.
    for later in (lambda x: torch.func.jvp(torch.exp, (x,), (x,))[1], Derived.apply):
        y = exporter.load(exporter.export(Calls(later), (x,), dynamo=dynamo), allow=[Derived])(2 * x)
        torch.testing.assert_close(y, later(2 * x))
