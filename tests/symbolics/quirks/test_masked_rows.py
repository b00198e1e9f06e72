"""Attention where a mask leaves a query nothing to look at: zeros and no gradients, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import exporter

X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


class Attends(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(4, 4) for _ in range(3))
        self.kind, self.bias = kind, nn.Parameter(torch.randn(3, 5, 5))

    def forward(self, x, seen):
        seen = seen[:, None, None, :]  # which keys each of the batch may look at
        mask = {
            "bools": lambda: seen,
            "infinities": lambda: torch.where(seen, 0.0, -torch.inf),
            "a learned bias": lambda: self.bias + torch.where(seen, 0.0, -torch.inf),
            "no infinities": lambda: torch.where(seen, 0.0, -1e4) + self.bias,
        }[self.kind]()
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        if self.kind == "bools":
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(-1, -1, x.shape[2], -1), scale=0.3)
        return functional.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("bools", "infinities", "a learned bias", "no infinities")),
        ("bools", torch.float64),  # torch.onnx's TorchScript exporter takes no mask of numbers with it
    ],
)
def test_it_gives_what_eager_gives(dynamo, kind, dtype):
    """Exported with something to look at everywhere, and run where one of the batch has nothing."""
    torch.manual_seed(0)
    model, x = Attends(kind).to(dtype), X.to(dtype)
    everything = torch.ones(2, 5, dtype=torch.bool)
    nothing = everything.clone()
    nothing[0], nothing[1, 3:] = False, False
    file = exporter.load(exporter.export(model, (x, everything), dynamo=dynamo).model_proto)
    for seen in (everything, nothing):
        found, wanted = file(x, seen), model(x, seen)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        weight = torch.randn(wanted.shape, dtype=dtype)
        of_file = torch.autograd.grad((found * weight).sum(), list(file.parameters()), allow_unused=True)
        of_model = torch.autograd.grad((wanted * weight).sum(), list(model.parameters()), allow_unused=True)
        for (name, _), mine, theirs in zip(model.named_parameters(), of_file, of_model, strict=True):
            assert (mine is None or not mine.any()) if theirs is None else True, name
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_without_a_mask_nothing_is_added(dynamo):
    class Plain(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert not {"ReduceMax", "IsInf"} & {node.op_type for node in exporter.export(Plain(), (X,), dynamo=dynamo).model.graph}
