"""Names of `symbolics.torch_private` for forward mode, one test each."""

import contextlib

import torch

from symbolics import torch_private as private


def test_forward_level():
    assert private.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_level() == 0
    assert private.forward_level() == -1


def test_forward_mode():
    """Without it, a Function that is applied within the forward of another has no tangent."""
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def jvp(ctx, v):
            return v * 2

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            for mode in (contextlib.nullcontext, private.forward_mode):
                with mode():
                    dual = torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1))
                    seen.append(torch.autograd.forward_ad.unpack_dual(Twice.apply(dual)).tangent is not None)
            return x

    with torch.autograd.forward_ad.dual_level():
        Outer.apply(torch.zeros(1))
    assert seen == [False, True]


def test_leave_forward_levels():
    torch.autograd.forward_ad.enter_dual_level()
    private.leave_forward_levels(0)
    assert private.forward_level() == 0
    private.leave_forward_levels(-1)
    assert private.forward_level() == -1
    assert torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item() == 1


def test_may_move():
    found = []

    def f(x, p):
        found.append((private.may_move(x), private.may_move(p)))
        return (x * p).sum()

    x, p = torch.ones(2), torch.ones(2)
    torch.func.jvp(lambda p: torch.func.grad(f)(x, p), (p,), (p,))
    torch.func.grad(f)(x, p)
    with torch.autograd.forward_ad.dual_level():
        torch.func.grad(f)(x, torch.autograd.forward_ad.make_dual(p, p))
        f(x, p)
    assert found == [(False, True), (False, False), (False, True), (False, False)]
