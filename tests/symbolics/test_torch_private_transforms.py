"""The private names of torch.func: where its transforms, and functional_call, do their work."""

from __future__ import annotations

import torch

from symbolics import torch_private as private


def test_functional_transforms(monkeypatch):
    """grad, vjp, jvp and the Jacobians look these up at each call, also where they were made before."""
    home, seen = private.functional_transforms(), []
    made = [torch.func.grad(torch.sum), torch.func.jacrev(torch.sin), torch.func.jacfwd(torch.sin)]

    def noted(name):
        original = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args, **kwargs: seen.append(name) or original(*args, **kwargs))

    for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums", "vmap", "_chunked_standard_basis_for_"):
        noted(name)
    for function, expected in zip(
        (*made, lambda x: torch.func.vjp(torch.sin, x), lambda x: torch.func.jvp(torch.sin, (x,), (x,))),
        (
            ["grad_and_value_impl"],
            ["_vjp_with_argnums", "_chunked_standard_basis_for_", "vmap"],
            ["_chunked_standard_basis_for_", "vmap", "_jvp_with_argnums"],
            ["_vjp_with_argnums"],
            ["_jvp_with_argnums"],
        ),
        strict=True,
    ):
        seen.clear()
        function(torch.ones(2))
        assert seen == expected, "torch.func does its work elsewhere: symbolics/capture/transforms.py stands in for nothing"


def test_stateless(monkeypatch):
    module, seen = torch.nn.Linear(1, 1), []
    original = private.stateless()._functional_call
    monkeypatch.setattr(private.stateless(), "_functional_call", lambda *args, **kwargs: seen.append(args[0]) or original(*args, **kwargs))
    weights = {"weight": torch.zeros(1, 1), "bias": torch.ones(1)}
    assert torch.func.functional_call(module, weights, (torch.ones(1),)).item() == 1
    assert seen == [module], "torch.func.functional_call looks _functional_call up elsewhere"


def test_reparametrized():
    module = torch.nn.Linear(1, 1)
    weight = module.weight
    with private.reparametrized(module, {"weight": torch.zeros(1, 1), "bias": torch.ones(1)}, tie_weights=True, strict=False):
        assert module(torch.ones(1)).item() == 1
    assert module.weight is weight


def test_has_own_jvp():
    class Without(torch.autograd.Function):
        pass

    class Having(torch.autograd.Function):
        @staticmethod
        def jvp(ctx, tangent):
            return tangent

    assert not private.has_own_jvp(Without)
    assert private.has_own_jvp(Having)


def test_layers_of():
    """Under a transform of torch.func, the autograd graph of the surrounding code hangs on the innermost."""
    weight, seen = torch.ones(2, requires_grad=True), []

    def function(x):
        y = x * weight
        seen.extend(each.grad_fn.name() for each in private.layers_of(y))
        return y.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == ["MulBackward0", "MulBackward0"]
    assert [id(each) for each in private.layers_of(weight)] == [id(weight)]
