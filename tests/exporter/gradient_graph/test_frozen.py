"""Parameters that were frozen at the export and are asked for a gradient afterwards."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import exporter


class Times(torch.autograd.Function):
    """A product whose backward is 10 times too much, to be told from the derivative; it leaves out what nobody needs."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 10 if ctx.needs_input_grad[0] else None, g * x * 10 if ctx.needs_input_grad[1] else None


class Direct(nn.Module):
    """The frozen weight is an argument, and a term beside it has a gradient all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), nn.Parameter(torch.tensor([0.5, 1.5, 2.5]))
        self.w.requires_grad_(False)

    def forward(self, x):
        return Times.apply(x * self.b, self.w) + self.w


class Computed(Direct):
    def forward(self, x):
        return Times.apply(x * self.b, (self.w * 2).tanh())


class Looped(Direct):
    """The argument comes out of a branch."""

    def forward(self, x):
        return Times.apply(x * self.b, torch.where(x.sum() > 0, self.w, self.w * 3))


class Plain(Direct):
    """No Function is called with the frozen weight."""

    def forward(self, x):
        return Times.apply(x * self.b, x.detach()) * self.w


class Buffer(Direct):
    def __init__(self) -> None:
        super().__init__()
        del self.w
        self.register_buffer("w", torch.tensor([1.0, 2.0, 3.0]))


class Inner(Direct):
    def forward(self, x):
        return x * self.b * self.w


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x) + 1


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
REFUSED = "argument [01] of the Function '.*(Times|Inner).*' comes from the parameter '(inner.)?w', which required no gradient"
WARNED = r"the parameter 'w' required no gradient.*\n.*detach"


def export(kind, dynamo=True, portable=False):
    model = kind()
    program = exporter.export(model, (X,), dynamo=dynamo, portable=portable, opaque=[model.inner] if kind is Opaque else None)
    return model, program


def gradients(model):
    model.requires_grad_(True)
    model.zero_grad()
    model(X).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize(
    ("kind", "portable"), [(Direct, False), (Direct, True), (Computed, False), (Computed, True), (Looped, False), (Opaque, False)]
)
def test_a_gradient_that_the_file_lacks_is_an_error(kind, portable, dynamo, tmp_path):
    """Eager has one, as the weight is frozen no more; the file would have none, or that of the other term alone."""
    model, program = export(kind, dynamo, portable)
    name = "inner.w" if kind is Opaque else "w"
    with pytest.raises(exporter.UnsupportedOperatorError, match=REFUSED):
        exporter.build_gradient_graph(program, wrt=[name])
    loaded = exporter.load(program, allow=[f"{__name__}:*"])
    frozen = loaded(X)
    frozen.sum().backward()  # as long as it is frozen, all is as it was
    eager = model(X)
    assert torch.allclose(frozen, eager) and loaded.get_parameter(name).grad is None
    loaded.get_parameter(name).requires_grad_(True)
    with pytest.raises(exporter.UnsupportedOperatorError, match=REFUSED):
        loaded(X).sum().backward()
    loaded.save(tmp_path / "again.onnx")  # and the file says as little of it
    again = exporter.load(tmp_path / "again.onnx", allow=[f"{__name__}:*"])
    assert not again.get_parameter(name).requires_grad
    with pytest.raises(exporter.UnsupportedOperatorError, match=REFUSED):
        gradients(again)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("portable", [False, True])
def test_a_gradient_that_goes_by_operators_is_there(portable, dynamo, tmp_path):
    model, program = export(Plain, dynamo, portable)
    loaded = exporter.load(program, allow=[f"{__name__}:*"])
    loaded.w.requires_grad_(True)
    loaded.save(tmp_path / "again.onnx")
    again = exporter.load(tmp_path / "again.onnx", allow=[f"{__name__}:*"])
    assert again.w.requires_grad
    expected = gradients(model)
    for one in (loaded, again):
        with pytest.warns(exporter.PythonopWarning, match=WARNED) if one is loaded else contextlib.nullcontext():
            found = gradients(one)
        assert found.keys() == expected.keys() and all(torch.allclose(found[name], expected[name]) for name in expected)


def test_a_file_does_not_know_where_a_frozen_parameter_is_detached():
    class Detached(Direct):
        def forward(self, x):
            return x * self.b * self.w.detach() + self.w

    program = exporter.export(Detached(), (X,))
    with pytest.warns(exporter.PythonopWarning, match=WARNED):
        exporter.build_gradient_graph(program, wrt=["w"])


def test_buffers_are_frozen_too():
    model, program = export(Buffer)
    loaded = exporter.load(program, allow=[f"{__name__}:*"])
    loaded.w.requires_grad_(True)
    with pytest.raises(exporter.UnsupportedOperatorError, match="comes from the buffer 'w'"):
        loaded(X).sum().backward()
