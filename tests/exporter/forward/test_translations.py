"""Translations of operators that fail while an exporter runs them."""

from __future__ import annotations

import re

import pytest
import torch
from onnxscript import opset18 as op
from torch import Tensor, nn

import exporter
from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.node.operators import Operator
from tests.support import nodes


@torch.library.custom_op("translations::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: g * 5)
TWICE = torch.ops.translations.twice.default


def fails(x):
    raise NotImplementedError("pooled sizes that are symbols")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return twice(self.linear(x))


X = torch.randn(3, 4)
WHERE = rf"translations::twice.default, called in module <root> at {__name__}:\d+: "


def told(**options) -> str:
    with pytest.raises(ExportError) as error:
        exporter.export(Net(), (X,), dynamo=True, **options)
    assert len(str(error.value).splitlines()) <= 6
    return str(error.value)


def test_one_of_the_users_own():
    text = told(custom_translation_table={TWICE: fails})
    assert re.match(WHERE, text) and "the translation that custom_translation_table gives fails" in text
    assert (
        "NotImplementedError: pooled sizes that are symbols" in text
        and "inline=['translations::twice.default']" in text
        and "dynamo=False" in text
    )


@pytest.fixture
def torchlib(monkeypatch):
    """torch.onnx has a translation of the operator by itself, which fails."""
    from torch.onnx._internal.exporter import _registration

    original = _registration.ONNXRegistry.from_torchlib

    def made(*args, **kwargs):
        registry = original(*args, **kwargs)
        registry.register_op(TWICE, fails)
        return registry

    monkeypatch.setattr(_registration.ONNXRegistry, "from_torchlib", staticmethod(made))
    known = private.torchlib_operators() | {TWICE.name()}
    monkeypatch.setattr(private, "torchlib_operators", lambda: known)


def test_one_of_torch(torchlib):
    text = told()
    assert text.startswith(f"{Operator.of(TWICE).name}, called in module <root> at {__name__}:")
    assert "torch.onnx's own translation fails: NotImplementedError" in text
    assert "custom_translation_table={torch.ops.translations.twice.default: ...}" in text


def test_the_ways_out(torchlib):
    model = Net()
    inlined = exporter.export(model, (X,), dynamo=True, inline=["translations::twice"])
    assert not nodes(inlined.model, "PythonOp") and nodes(inlined.model, "Add")
    translated = exporter.export(
        model, (X,), dynamo=True, custom_translation_table={TWICE: lambda x: op.Mul(x, op.Constant(value_float=2.0))}
    )
    assert not nodes(translated.model, "PythonOp")
    other = exporter.export(model, (X,), dynamo=False)
    for program in (inlined, translated, other):
        torch.testing.assert_close(exporter.load(program, allow=["translations::*"])(X), model(X))


def test_errors_of_others_stay_as_they_are():
    class Sparse(nn.Module):
        def forward(self, x):
            return torch.linalg.eig(x[:, :3]).eigenvalues

    with pytest.raises(torch.onnx.errors.OnnxExporterError):
        exporter.export(Sparse(), (X,), dynamo=True)


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("translations::twice", "torch.ops.translations.twice.default as the key"),
        ("aten::mean.dim", "torch.ops.aten.mean.dim as the key"),
        (torch.ops.aten.relu, "torch.ops.aten.relu.default as the key"),
        (twice, "torch.ops.translations.twice.default as the key"),
    ],
)
def test_a_key_that_torch_would_pass_by(key, way_out):
    text = told(custom_translation_table={key: fails})
    assert "custom_translation_table: the key" in text and text.endswith(way_out)


def test_a_table_that_is_none():
    assert "is no dictionary" in told(custom_translation_table=[TWICE])
