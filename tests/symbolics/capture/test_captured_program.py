"""Operators in an ExportedProgram that was captured before the export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import exporter
from symbolics.errors import ExportError
from symbolics.node.attributes import read_attributes, values_of
from tests.support import nodes
from tests.trains import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the ExportedProgram was captured before")


@torch.library.custom_op("captured_program::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor, factor: float = 2.0) -> Tensor:
    return x * weight * factor


scaled.register_fake(lambda x, weight, factor=2.0: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, g: (5 * g * ctx.saved[1], (7 * g * ctx.saved[0]).sum(0), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs),
)


@torch.library.custom_op("captured_program::halves", mutates_args=())
def halves(parts: list[Tensor], size: int) -> list[Tensor]:
    return [part[:, :size] * 3 for part in parts]


halves.register_fake(lambda parts, size: [part.new_empty(part.shape[0], size) for part in parts])
halves.register_autograd(
    lambda ctx, grads: ([torch.cat([g * 11, g * 0], 1) for g in grads], None), setup_context=lambda ctx, inputs, output: None
)


@torch.library.custom_op("captured_program::grow", mutates_args=("x",))
def grow(x: Tensor) -> None:
    x.mul_(2)


class Net(nn.Module):
    def __init__(self, body=lambda net, x: sum(halves([scaled(x, net.weight), net.linear(x)], 2)) + 1):
        super().__init__()
        self.linear, self.weight, self.body = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), body

    def forward(self, x):
        return self.body(self, x)


X = torch.randn(3, 4)


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad((y * y).sum(), [x, *model.parameters()])


def assert_equal(loaded, model, x):
    for found, expected in zip(gradients(loaded, x), gradients(model, x), strict=True):
        assert_close(found, expected)


def exported(program, way):
    if way == "export":
        return exporter.export(program, ())
    with exporter.hook() as handle:
        torch.onnx.export(program, (), dynamo=True)
    return handle.program


@pytest.mark.parametrize("way", ["export", "hook"])
def test_they_become_nodes(way):
    model = Net()
    captured = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    before = str(captured.graph)
    program = exported(captured, way)
    assert str(captured.graph) == before
    calls = [read_attributes(values_of(node)) for node in nodes(program.model, "PythonOp")]
    assert [call.name.split("::")[1] for call in calls] == ["scaled.default", "halves.default"]
    loaded = exporter.load(program, allow=["captured_program::*"])
    for x in (X, torch.randn(5, 4)):
        assert_equal(loaded, model, x)


def test_they_may_be_portable():
    model = Net()
    program = exporter.export(torch.export.export(model, (X,)), (), portable=True)
    assert not nodes(program.model, "PythonOp")
    assert_equal(exporter.load(program), model, X)


class Counts(Net):
    """Changes a buffer, which no operator of its own does, and returns one of two outputs."""

    def __init__(self):
        super().__init__(lambda net, x: {"y": halves([net.linear(x), x], 3)[0] * net.count, "count": net.count})
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


def test_beside_a_buffer_that_changes():
    model = Counts()
    program = exporter.export(torch.export.export(model, (X,)), ())
    model.count.fill_(1)
    loaded = exporter.load(program, allow=["captured_program::*"])
    for _ in range(2):
        torch.testing.assert_close(tuple(loaded(X)), tuple(model(X).values()))


def test_what_is_frozen_gets_no_gradient():
    model = Net(lambda net, x: scaled(net.linear(x), net.weight))
    model.weight.requires_grad_(False)
    program = exporter.export(torch.export.export(model, (X,)), ())
    (node,) = nodes(program.model, "PythonOp")
    assert read_attributes(values_of(node)).input_requires_grads == (True, False)


def _grown(net, x):
    y = net.linear(x).detach()
    grow(y)
    return y


def _still(net, x):
    with torch.no_grad():
        y = scaled(x, net.weight)
    return y + x


REFUSED = {
    "in place": (_grown, {}, "grow.default.*changes an argument in place"),
    "in a body": (
        lambda net, x: torch.cond(x.sum() > 0, lambda v: scaled(v, v[0]), lambda v: v + 1, (x,)),
        {},
        "scaled.default.*in a body",
    ),
    "inline": (lambda net, x: scaled(x, net.weight), {"inline": ["captured_program::*"]}, "scaled.default.*inline= names it"),
}


@pytest.mark.parametrize(("body", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_is_named(body, options, why):
    captured = torch.export.export(Net(body), (X,))
    with pytest.raises(ExportError, match=f"captured_program::{why}.*give the module itself"):
        exporter.export(captured, (), **options)
