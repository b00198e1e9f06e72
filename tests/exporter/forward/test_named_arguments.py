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


class Capital(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(4, 3)

    def forward(self, X, Mask=None, *, Pair):
        return self.W(X * Pair["A"]) if Mask is None else self.W(X) * Mask


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_capital_letters(dynamo):
    """torch.export calls inputs in small letters."""
    x, a = torch.randn(2, 3, 4)
    program = exporter.export(
        Capital(), (x, None), {"Pair": {"A": a}}, dynamo=dynamo, dynamic_shapes={"X": {0: "n"}, "Pair": {"A": {0: "n"}}}
    )
    assert [value.name for value in program.model.graph.inputs] == ["X", "Pair_A"]
    module, model = exporter.load(program), Capital()
    model.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(X=x, Pair={"A": a}), model(x, Pair={"A": a}))


def test_a_capital_letter_that_a_parameter_has():
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A = nn.Parameter(torch.ones(4))

        def forward(self, A):
            return A * self.A

    x = torch.randn(3, 4)
    torch.testing.assert_close(exporter.load(exporter.export(Taken(), (x,)))(x), x)
