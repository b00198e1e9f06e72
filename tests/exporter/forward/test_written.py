"""The net under the translation of portable Functions: an operator that torch.onnx writes as another one makes no silent file."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.autograd import Function

import exporter
from exporter.forward import portable, written
from symbolics.errors import ExportError, PythonopWarning
from tests.support import Calls


class Wave(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tan()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 + x.atan().tan().square())


@pytest.fixture
def mistranslated(monkeypatch):
    """Make torch.onnx write one operator as another."""

    def make(name, wrong):
        translator = portable.private.translator_of(portable.translations)
        translate = type(translator).translate

        def translated(self, graph, opset):
            model = translate(self, graph, opset)
            for node in model.graph:
                if node.op_type == name:
                    node.op_type = wrong
            return model

        monkeypatch.setattr(type(translator), "translate", translated)

    return make


x = torch.linspace(0.1, 1.2, 12).view(3, 4)


@pytest.mark.parametrize(("name", "wrong", "where"), [("Tan", "Sin", "output 0"), ("Atan", "Asinh", "the gradient of input 0")])
def test_who_is_written_wrongly_stays_a_PythonOp(name, wrong, where, mistranslated, dynamo):
    mistranslated(name, wrong)
    with pytest.warns(PythonopWarning, match=f"stays a PythonOp, .*on the example its nodes in ONNX give .* in {where} where torch gives"):
        program = exporter.export(Calls(lambda x: Wave.apply(x * 1.0)), (x.clone().requires_grad_(),), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == ["PythonOp"]
    with pytest.raises(ExportError, match="torch.onnx translates one of its operators wrongly"):
        exporter.export(Calls(lambda x: Wave.apply(x * 1.0)), (x.clone().requires_grad_(),), dynamo=dynamo, portable=["*:Wave"])


def test_without_onnxruntime_there_is_no_net(mistranslated, monkeypatch):
    mistranslated("Tan", "Sin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    program = exporter.export(Calls(lambda x: Wave.apply(x * 1.0)), (x.clone().requires_grad_(),), dynamo=False, portable=True)
    assert [call.kind for call in program.portable] == ["function"]


class Ties(Function):
    """Where elements are alike, each runtime may take another one; and what rounds may jump."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.topk(2)
        ctx.save_for_backward(places)
        ctx.sizes = x.shape
        return values, (x * 3 + 0.5).round()

    @staticmethod
    def backward(ctx, g, h):
        (places,) = ctx.saved_tensors
        return torch.zeros(ctx.sizes).scatter(-1, places, g)


def test_ties_are_no_difference():
    calls = Calls(lambda x: Ties.apply(x * 1.0)[0])
    program = exporter.export(calls, (torch.zeros(2, 3, requires_grad=True),), dynamo=False, portable=True)
    assert [call.kind for call in program.portable] == ["function"]


def test_where_most_elements_are_off():
    one = torch.arange(10.0)
    assert written._off([one], [one]) is None
    assert written._off([one], [one + 0.01]) is None
    assert written._off([one], [torch.cat([one[:6], one[6:] + 5])]) is None
    assert written._off([one], [one + 5]) == (0, "0", "5")
    assert written._off([one, one], [one, one[:9]]) == (1, "(10,)", "(9,)")
    assert written._off([one * torch.nan], [one * torch.nan]) is None
    assert written._off([one], [one * torch.nan]) == (0, "0", "nan")
