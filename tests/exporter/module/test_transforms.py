"""Loaded modules under torch.func: eager's numbers, or an error of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.module.higher import looped
from symbolics.errors import RunError
from tests.exporter.module.test_higher import MODELS, contexts, loaded, positive

TRANSFORMED = ["mlp", "attention", "setup_context", "setup_context, saved output", "portable saved output"]


def scalar(module):
    return lambda x: module(x).square().sum()


def reference(name):
    """A model that torch.func takes: eager's own Functions without a setup_context are replaced by what they compute."""
    model = MODELS[name][0]
    if name == "portable saved output":
        return lambda x: torch.tanh(model.inner(x)) * x
    if name == "setup_context":
        return lambda x: model.inner(x) ** 3 * x
    if name == "setup_context, saved output":
        return lambda x: positive(model.inner(x)) ** 3 * x
    return model


@pytest.mark.parametrize("name", TRANSFORMED)
def test_grad_vjp_jacrev_and_vmap(name):
    _, module, x = loaded(name)
    model, x = reference(name), x.detach()
    batch = torch.stack([x, x + 0.1, x * 2])
    for transform in (
        lambda f: torch.func.grad(scalar(f))(x),
        lambda f: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.vmap(f)(batch),
        lambda f: torch.func.vmap(torch.func.grad(scalar(f)))(batch),
        lambda f: torch.func.grad(lambda b: torch.func.vmap(f)(b).square().sum())(batch),
        lambda f: torch.func.grad_and_value(scalar(f))(x)[1],
        lambda f: torch.func.vjp(torch.func.grad(scalar(f)), x)[1](x)[0],
    ):
        torch.testing.assert_close(transform(module), transform(model), rtol=1e-8, atol=1e-8)
    assert contexts(module) == 0


@pytest.mark.parametrize("name", ["mlp", "setup_context, saved output", "portable saved output"])
def test_hessians(name):
    _, module, x = loaded(name)
    x = x.detach()
    want = torch.autograd.functional.hessian(scalar(reference(name)), x)
    for twice in (torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.grad(f)), lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        torch.testing.assert_close(twice(scalar(module))(x), want, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.autograd.functional.hessian(scalar(module), x), want, rtol=1e-8, atol=1e-8)
    batch = torch.stack([x, x * 2])
    found = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(scalar(module))))(batch)
    torch.testing.assert_close(found[0], want, rtol=1e-8, atol=1e-8)


def test_functional_call_and_gradients_of_each_sample():
    model, module, x = loaded("mlp")
    batch = torch.stack([x.detach(), x.detach() * 2])

    def of(m):
        parameters = {k: v.detach() for k, v in m.named_parameters()}
        loss = lambda p, x: torch.func.functional_call(m, p, (x,)).square().sum()  # noqa: E731
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
        ensemble = torch.func.vmap(lambda p: loss(p, batch[0]))({k: torch.stack([v, v * 2]) for k, v in parameters.items()})
        return {**torch.func.grad(loss)(parameters, batch[0]), "ensemble": ensemble, **{f"each {k}": v for k, v in each.items()}}

    ours, theirs = of(module), of(model)
    assert ours.keys() == theirs.keys()
    for key, want in theirs.items():
        torch.testing.assert_close(ours[key], want, rtol=1e-9, atol=1e-9, msg=key)


def test_functional_call_in_eval_has_gradients_of_what_it_was_given():
    """Without a transform, and with an input that needs none: they were missing."""
    model, module, x = loaded("mlp")

    def of(m):
        given = {k: v.detach().clone().requires_grad_() for k, v in m.named_parameters()}
        return torch.autograd.grad(torch.func.functional_call(m, given, (x.detach(),)).sum(), list(given.values()))

    torch.testing.assert_close(of(module), of(model))


def test_the_rest_of_autograd_goes_on_behind_vmap():
    """What vmap returned is differentiated outside of it."""
    model, module, x = loaded("setup_context")
    batch = torch.stack([x.detach(), x.detach() * 2]).requires_grad_()
    torch.func.vmap(module)(batch).square().sum().backward()
    ours, batch.grad = batch.grad, None
    torch.stack([model(b) for b in batch]).square().sum().backward()
    torch.testing.assert_close(ours, batch.grad)
    assert contexts(module) == 0


def test_nested_vmap_with_something_that_is_no_batch():
    model, module, x = loaded("mlp")
    grid = torch.randn(2, 3, *x.shape, dtype=torch.float64)
    found = torch.func.vmap(torch.func.vmap(torch.func.jacrev(module), in_dims=0), in_dims=1, out_dims=1)(grid)
    want = torch.func.vmap(torch.func.vmap(torch.func.jacrev(model), in_dims=0), in_dims=1, out_dims=1)(grid)
    torch.testing.assert_close(found, want)


def lines(caught):
    assert len(str(caught.value).splitlines()) <= 6
    return str(caught.value)


def test_batches_of_autograd_are_refused_by_name():
    _, module, x = loaded("mlp")
    with pytest.raises(RunError, match=r"(?s)is_grads_batched=True.*torch.func.jacrev") as caught:
        torch.autograd.functional.jacobian(module, x.detach(), vectorize=True)
    lines(caught)


def test_a_transform_of_a_forward_that_changes_buffers_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module = exporter.load(exporter.export(model.train(), (torch.randn(4, 3),), dynamo=False))
    x = torch.randn(4, 3)
    with pytest.raises(RunError, match=r"running_mean.*torch.func.*eval\(\)") as caught:
        torch.func.grad(scalar(module.train()))(x)
    lines(caught)
    torch.testing.assert_close(torch.func.grad(scalar(module.eval()))(x), torch.func.grad(scalar(model.eval()))(x))


def test_an_empty_batch_is_refused():
    class Info:
        batch_size = 0

    with pytest.raises(RunError, match="has none"):
        looped(None, Info, (0,), (torch.zeros(0, 3),))


def test_dropout_under_vmap_is_torchs_choice():
    """One mask for all where randomness is "same", each its own where it is "different", an error where neither was said."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5)).train()
    module = exporter.load(exporter.export(model, (torch.ones(64),), dynamo=False)).train()
    batch = torch.ones(2, 64)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(module)(batch)
    same = torch.func.vmap(module, randomness="same")(batch)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(module, randomness="different")(batch)
    assert not torch.equal(different[0], different[1])
