"""Parameters of opaque modules that only some ways through the forward reach, and no run of an export."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.fallback.proof import Proof
from exporter.forward.case import Case
from symbolics.errors import RunError
from tests.zoo import modules as M

ALLOW = ["tests.zoo.modules:*"]
BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
X = torch.randn(3, 4)


def gradients(module, *inputs):
    module.zero_grad()
    module(*inputs).square().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@BOTH
def test_a_layer_that_no_run_reached_trains_where_values_choose(dynamo):
    """Zeros stand where eager has None, in both ways."""
    torch.manual_seed(0)
    model = M.Net(M.Chooses())
    loaded = exporter.load(exporter.export(model, (X,), dynamo=dynamo, opaque=[M.Chooses]), allow=ALLOW)
    for scale, way, other in ((1.0, "block.a", "block.b"), (1e7, "block.b", "block.a")):
        expected, found = gradients(model, X * scale), gradients(loaded, X * scale)
        for name in expected:
            if name.startswith(other):
                assert expected[name] is None and not found[name].any()
            else:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4 * float(expected[name].abs().max()))
        assert found[f"{way}.weight"].any()


@BOTH
def test_a_layer_that_nothing_reaches_has_no_gradient(dynamo):
    """Without values that choose, there is one way, and None stays None."""
    model = M.Net(M.Spare())
    loaded = exporter.load(exporter.export(model, (X,), dynamo=dynamo, opaque=[M.Spare]), allow=ALLOW)
    found = gradients(loaded, X)
    assert found["block.b.weight"] is None and found["block.a.weight"].any()


def test_its_zeros_equal_no_gradient():
    """To verify with a note, and to the search for a way out; gradients of what is no module's do not."""
    model = M.Net(M.Chooses())
    program = exporter.export(model, (X,), opaque=[M.Chooses])
    assert Proof(Case(model, (X,))).against(program) == ""
    report = exporter.verify(model, (X,), opaque=[M.Chooses])
    assert report.ok and len(report.rows) == 9
    (note,) = [note for note in report.notes if note.title == "Zeros for None"]
    assert note.text.startswith("block.b.weight, block.b.bias: eager has no gradient here")
    assert "Zeros for None: block.b.weight" in report._repr_html_()


class WithTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.block = nn.Linear(4, 4), M.RoutesAsTold()

    def forward(self, x, y):
        return self.block(self.before(x), y)


@pytest.mark.parametrize(
    ("way", "what", "out"),
    [
        ("layer", "the parameter 'b.weight' of the module", "add 0 * sum(p.sum() for p in self.parameters()) to what the module returns"),
        ("argument", "argument 1 of the module", "add 0 * x.sum() of that argument to what the module returns"),
    ],
)
def test_a_gradient_that_nothing_told_of_is_named(way, what, out, monkeypatch):
    loaded = exporter.load(exporter.export(WithTwo(), (X, X), opaque=[M.RoutesAsTold]), allow=ALLOW)
    gradients(loaded, X, X)
    monkeypatch.setattr(M, "told", lambda: way)
    with pytest.raises(RunError) as raised:
        gradients(loaded, X, X.clone().requires_grad_())
    assert f"there is a gradient for {what}, which no run of the export reached" in str(raised.value)
    assert out in str(raised.value)
