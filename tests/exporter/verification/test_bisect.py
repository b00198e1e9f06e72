"""bisect: the node that departs is named, not one of those behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.verification.bisect import first_departure
from exporter.verification.eager import EagerStep
from tests.exporter.verification import targets


def departure(model, args, change, dynamo=True):
    """Break a node of the exported file, and look for it."""
    case = exporter.Case(model, args)
    eager = EagerStep.run(case)
    program = exporter.export(model, args, dynamo=dynamo)
    change(program.model.graph)
    return first_departure(program, case, eager.cotangents, ["tests.*"])


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return torch.softmax(self.c(torch.nn.functional.gelu(self.norm(self.b(torch.sigmoid(self.a(x)))))), -1)


def test_nothing_departs(dynamo):
    assert departure(Deep(), (torch.randn(4, 5),), lambda graph: None, dynamo) is None


def test_a_wrong_operator_in_the_middle_is_named(dynamo):
    def change(graph):
        (node,) = [node for node in graph if node.op_type == "Sigmoid"]
        node.op_type = "Tanh"

    found = departure(Deep(), (torch.randn(4, 5),), change, dynamo)
    assert found.startswith("the value of node")
    assert "(Tanh)" in found


def test_a_wrong_attribute_is_named(dynamo):
    def change(graph):
        import onnx_ir as ir

        (node,) = [node for node in graph if node.op_type == "LayerNormalization"]
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)

    assert "LayerNormalization" in departure(Deep(), (torch.randn(4, 5),), change, dynamo)


@pytest.mark.parametrize("target", ["wrong_forward", "wrong_backward"])
def test_a_wrong_function_is_named(target, monkeypatch):
    """In this process the Functions behave, unless they believe to be in the other one."""
    model, args = getattr(targets, target)()
    case = exporter.Case(model, args)
    eager = EagerStep.run(case)
    program = exporter.export(model, args)
    from exporter.verification import bisect

    run = bisect._run

    def elsewhere(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(targets, "_main", lambda: "exporter.verification.worker")
            return run(*arguments)

    monkeypatch.setattr(bisect, "_run", elsewhere)
    found = first_departure(program, case, eager.cotangents, ["tests.*"])
    assert found.startswith("the value of" if target == "wrong_forward" else "the gradient of")
    assert "PythonOpGrad" in found if target == "wrong_backward" else "::PythonOp " in found
    assert model.function.__name__ in found  # the Function, and no node that computes with what it returned


def test_other_weights_are_no_departure(tmp_path):
    """The report has them, and the first node that has one is as good as any other."""
    args = (torch.randn(4, 5),)
    exporter.export(Deep(), args).save(tmp_path / "model.onnx")
    report = exporter.verify(Deep(), args, file=tmp_path / "model.onnx", bisect=True)
    assert not report.ok and report.first_departure is None
