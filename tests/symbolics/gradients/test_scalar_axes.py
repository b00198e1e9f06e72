"""Axes of an Unsqueeze that are a scalar, as torch writes them: onnxruntime takes them of no other operator."""

from __future__ import annotations

import onnx
import pytest
import torch

import exporter

KNOWN = "<int64 a = {1}>"


@pytest.mark.parametrize(
    ("inputs", "weights", "body"),
    [
        ("float[2,3] x", KNOWN, "u = Unsqueeze(x, a) y = Mul(u, u)"),
        ("float[n,m] x", KNOWN, "u = Unsqueeze(x, a) y = Mul(u, u)"),
        ("float[2,3] x", "", "a = Constant<value = int64 {-1}>() u = Unsqueeze(x, a) y = Mul(u, u)"),
        ("float[2,3] x, int64 a", "", "u = Unsqueeze(x, a) y = Mul(u, u)"),
        ("float[2,3] x", KNOWN, "u = Unsqueeze(x, a) v = Mul(u, u) w = Unsqueeze(v, a) y = Mul(w, w)"),
    ],
)
def test_gradients_of_two_orders(inputs, weights, body):
    dims = "p,q,r,s" if "w =" in body else "p,q,r"
    text = f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => (float[{dims}] y) {weights} {{ {body} }}'
    module = exporter.load(onnx.parser.parse_model(text))
    more = (torch.tensor(1),) if "int64 a" in inputs else ()
    power = 4 if "w =" in body else 2
    x = torch.randn(2, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x, *more).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, power * x ** (power - 1))
    (second,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(second, power * (power - 1) * x ** (power - 2))
    _, tangent = torch.func.jvp(lambda v: module(v, *more).sum(), (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, dx.detach().sum())


class Grouped(torch.nn.Module):
    """Attention of groups, as in Llama."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, kv = self.q(x).unflatten(2, (4, 4)).transpose(1, 2), self.kv(x).unflatten(2, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("open_axes", [False, True])
def test_attention_of_groups_trains(open_axes):
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(2, 5, 8)
    dims = {"x": {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}} if open_axes else None
    module = exporter.load(exporter.export(model, (x,), dynamic_shapes=dims))
    for each in (model, module):
        each(x).square().sum().backward()
    found = dict(module.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
