"""Forward hooks of the model itself, which torch calls around its forward: what they do is seen as if it were in there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import Double


def _parameter_put(layer):
    """As diffq: an expression of a parameter that somebody holds takes its place for the call."""
    held = [layer.weight]
    layer.register_forward_pre_hook(lambda module, args: module._parameters.update(weight=held[0] * 2))
    layer.register_forward_hook(lambda module, args, result: module._parameters.update(weight=held[0]))


def _attribute_put(layer):
    layer.register_parameter("raw", layer._parameters.pop("weight"))
    layer.weight = None
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "weight", torch.tanh(module.raw)))


def _stops(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] + args[0].detach(),))

    @torch.no_grad()
    def tripled(x):
        return 3 * x

    layer.register_forward_hook(lambda module, args, result: result + tripled(result) * args[0])


def _keywords(layer):
    layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0].detach() * args[0],), kwargs), with_kwargs=True)
    layer.register_forward_hook(
        lambda module, args, kwargs, result: result.detach() * result, with_kwargs=True, always_call=True, prepend=True
    )


def _functions(layer):
    layer.register_forward_pre_hook(lambda module, args: Double.apply(args[0]))
    layer.register_forward_hook(lambda module, args, result: Double.apply(result))


def _spectral_norm(layer):
    nn.utils.spectral_norm(layer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("hooked", [_parameter_put, _attribute_put, _stops, _keywords, _functions, _spectral_norm])
def test_as_in_eager(hooked, dynamo):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    hooked(model)
    hooks, parameters = dict(model._forward_hooks), dict(model._parameters)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo), allow=[Double])
    assert dict(model._forward_hooks) == hooks and dict(model._parameters) == parameters, "an export leaves the model as it was"
    for _ in range(2):
        one, two = (x.clone().requires_grad_() for _ in range(2))
        expected, found = model(one), module(two)
        torch.testing.assert_close(found, expected)
        gradients = [
            torch.autograd.grad(y.square().sum(), (z, *m.parameters())) for y, z, m in ((expected, one, model), (found, two, module))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
