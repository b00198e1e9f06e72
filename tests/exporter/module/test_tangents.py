"""Forward mode through a loaded module, beside eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import exporter
from symbolics.errors import RunError
from tests.zoo import forward_mode as zoo

ALLOW = ["tests.zoo.forward_mode:*"]


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.scale = torch.nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x):
        h = self.norm(F.gelu(self.linear(x)))
        return zoo.SavesForForward.apply(h, self.scale.expand_as(h)).softmax(-1), h.detach() * 2, (h > 0).sum()


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x * x).tanh()


def pair(kind=Small, dynamo=True, train=False):
    torch.manual_seed(0)
    model, x = kind().train(train), torch.randn(3, 4)
    return model, exporter.load(exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo), allow=ALLOW).train(train), x


def duals(module, x, v, moves=()):
    """Outputs and tangents under forward_ad; ``moves``: parameter -> tangent."""
    with forward_ad.dual_level():
        given = {k: forward_ad.make_dual(p, moves[k]) for k, p in module.named_parameters() if k in moves}
        x = x if v is None else forward_ad.make_dual(x, v)
        found = torch.func.functional_call(module, given, (x,)) if given else module(x)
        return [tuple(forward_ad.unpack_dual(y)) for y in (found if isinstance(found, tuple) else (found,))]


def assert_alike(got, expected):
    for (y, t), (y0, t0) in zip(got, expected, strict=True):
        torch.testing.assert_close(y, y0, rtol=1e-5, atol=1e-5)
        assert (t is None) == (t0 is None)
        if t is not None:
            torch.testing.assert_close(t, t0, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_forward_ad(dynamo):
    model, module, x = pair(dynamo=dynamo)
    assert_alike(duals(module, x, torch.ones(3, 4)), duals(model, x, torch.ones(3, 4)))
    moves = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    assert_alike(duals(module, x, None, moves), duals(model, x, None, moves))
    assert_alike(duals(module, x, torch.ones(3, 4), moves), duals(model, x, torch.ones(3, 4), moves))


class Functional(torch.nn.Module):
    """Of Functions that torch.func takes in eager."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):
        return zoo.WithSetupContext.apply(self.linear(x), 3)


def test_func_jvp():
    model, module, x = pair(Functional)
    v = torch.randn(3, 4)
    assert_alike([torch.func.jvp(module, (x,), (v,))], [torch.func.jvp(model, (x,), (v,))])
    torch.testing.assert_close(torch.func.jacfwd(module)(x), torch.autograd.functional.jacobian(model, x), rtol=1e-4, atol=1e-5)


def test_gradients_stay():
    model, module, x = pair(train=True)
    for m in (model, module):
        (y, t), *_ = duals(m, x, torch.ones(3, 4))
        assert t is not None
        y.square().sum().backward()
    for (name, p), (_, q) in zip(module.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_gradient_of_a_tangent_is_refused():
    _, module, x = pair()
    (_, t), *_ = duals(module, x, torch.ones(3, 4))
    with pytest.raises(RunError, match="no gradient of its tangents"):
        t.sum().backward()


def test_no_grad_and_outside_of_a_level():
    model, module, x = pair()
    with torch.no_grad():
        assert_alike(duals(module, x, torch.ones(3, 4)), duals(model, x, torch.ones(3, 4)))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(module(x)[0]).tangent is None
    torch.testing.assert_close(module(x)[0], model(x)[0])


def test_batch_norm_in_training():
    model, module, x = pair(Normed, train=True)
    assert_alike(duals(module, x, torch.ones(3, 4)), duals(model, x, torch.ones(3, 4)))
    torch.testing.assert_close(module.norm.running_mean, model.norm.running_mean)
    with pytest.raises(RunError, match="eval"):
        torch.func.jvp(module, (x,), (x,))


def test_a_training_file():
    """Its stop-gradient marks are there still: h.detach() has no tangent."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(3, 4)
    module = exporter.load(exporter.build_gradient_graph(exporter.export(copy.deepcopy(model), (x,))), allow=ALLOW)
    assert_alike(duals(module, x, torch.ones(3, 4)), duals(model, x, torch.ones(3, 4)))


# ---------------------------------------------------------------------------------------------------- tangents of gradients
class Smooth(torch.nn.Module):
    """Its Function is used by way of its backward alone where a tangent of a gradient is asked for."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):
        return zoo.WithSetupContext.apply(self.linear(x).tanh(), 3)


def energies(module):
    """x, parameters -> a number that is no linear function of what the module gives."""
    return lambda x, p: torch.func.functional_call(module, p, (x,)).sin().sum()


def test_tangents_of_gradients():
    model, module, x = pair(Smooth)
    p = {k: v.detach() for k, v in model.named_parameters()}
    dx, dp = torch.randn_like(x), {k: torch.randn_like(v) for k, v in p.items()}

    def products(f):
        gradient = torch.func.grad(f)
        return [
            torch.func.jvp(lambda x: gradient(x, p), (x,), (dx,)),
            torch.func.jvp(lambda p: gradient(x, p), (p,), (dp,)),  # by what no gradient is taken of
            torch.func.jvp(gradient, (x, p), (dx, dp)),
            torch.func.jvp(torch.func.grad(f, argnums=1), (x, p), (dx, dp)),
        ]

    torch.testing.assert_close(products(energies(module)), products(energies(model)), rtol=1e-4, atol=1e-5)


class Plain(torch.nn.Module):
    """What torch.func.vmap takes in eager."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.linear(x).tanh()


def test_tangents_of_batches():
    model, module, x = pair(Plain)
    p, dx = {k: v.detach() for k, v in model.named_parameters()}, torch.randn_like(x)

    def found(f):
        of_each = torch.func.vmap(lambda x: f(x, p))
        third = torch.func.jacfwd(torch.func.jacrev(torch.func.grad(f)))(x, p)
        return [*torch.func.jvp(of_each, (torch.stack([x, 2 * x]),), (torch.stack([dx, dx]),)), third]

    torch.testing.assert_close(found(energies(module)), found(energies(model)), rtol=1e-4, atol=1e-5)


def test_a_cotangent_that_moves():
    model, module, x = pair(Smooth)
    u, du = torch.randn(2, 3, 5)
    for create_graph in (False, True):
        found = []
        for m in (model, module):
            leaf = x.clone().requires_grad_()
            y = m(leaf)
            with forward_ad.dual_level():
                (g,) = torch.autograd.grad(y, leaf, forward_ad.make_dual(u, du), create_graph=create_graph)
                found.append(forward_ad.unpack_dual(g))
        assert_alike(found[1:], found[:1])


def test_a_gradient_inside_of_a_level_is_refused():
    """It has a tangent in eager: None, or one without what the inputs do, would be wrong."""
    _, module, x = pair(Smooth)
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        y = module(forward_ad.make_dual(leaf, torch.ones_like(x)))
        with pytest.raises(RunError, match=r"(?s)would have no tangent.*torch\.func\.jvp of torch\.func\.grad"):
            torch.autograd.grad(y.sum(), leaf)


@pytest.mark.parametrize(
    ("outer", "match"),
    [(torch.func.jacrev, "no gradient of its tangents"), (torch.func.jacfwd, "no tangents of its tangents")],
    ids=["gradient", "tangent"],
)
def test_derivatives_of_tangents_are_refused(outer, match):
    _, module, x = pair(Smooth)
    with pytest.raises(RunError, match=match):
        outer(torch.func.jacfwd(module))(x)
