"""Arguments that a forward takes as ``**kwargs`` have the names that the caller gives them, on both exporters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter


class Open(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, **more):
        return self.head(x * more["u"]["a"]) + self.head(more["v"][0])


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_arguments_of_kwargs_keep_their_names(dynamo):
    model, (x, a, v) = Open(), torch.randn(3, 2, 4)
    more = {"u": {"a": a}, "v": [v]}
    program = exporter.export(model, (x,), more, dynamo=dynamo)
    assert [value.name for value in program.model.graph.inputs] == ["x", "u_a", "v_0"]
    torch.testing.assert_close(exporter.load(program)(x, **more), model(x, **more))


def test_their_open_axes():
    model, (x, a, v) = Open(), torch.randn(3, 2, 4)
    axes = {0: torch.export.Dim("n", min=2, max=9)}
    program = exporter.export(
        model, (x,), {"u": {"a": a}, "v": [v]}, dynamo=False, dynamic_shapes={"x": axes, "more": {"u": {"a": axes}, "v": [axes]}}
    )
    x, a, v = torch.randn(3, 5, 4)
    torch.testing.assert_close(exporter.load(program)(x, u={"a": a}, v=[v]), model(x, u={"a": a}, v=[v]))
