"""docs/translations.md is a program: its code runs, and gives what the page says."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import exporter
from tests import pages
from tests.support import nodes


@pytest.mark.unusable(reason="the operator is the user's own and gets its body after the export")
def test_the_page_runs(tmp_path, monkeypatch):
    code, _ = pages.code("docs/translations.md")
    tmp_path.joinpath("page_of_translations.py").write_text(code)  # onnxscript reads the source of a function
    monkeypatch.syspath_prepend(str(tmp_path))
    page = importlib.import_module("page_of_translations")
    model, program = page.model, page.program
    assert not nodes(program.model, "PythonOp")
    x = (torch.randn(3, 4) * 9).requires_grad_()
    y = model(x)
    y.sum().backward()
    session = exporter.inference_session(program.model_proto)
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.detach().numpy()})[0], y.detach(), atol=1e-6)
    loaded = exporter.load(program)
    again = x.detach().clone().requires_grad_()
    loaded(again).sum().backward()
    torch.testing.assert_close(again.grad, x.grad)
    assert (y.detach().abs() == 1).any(), "nothing was clipped: a gradient of Clip would have passed"
    torch.onnx.register_custom_op_symbolic("mylib::clipped", lambda g, x: g.op("mylib::Clipped", x).setType(x.type()), 20)
    try:
        program = exporter.export(model, (torch.randn(3, 4),), dynamo=False, opset_version=20)
    finally:
        torch.onnx.unregister_custom_op_symbolic("mylib::clipped", 20)
    assert nodes(program.model, "Clipped") and not nodes(program.model, "PythonOp")
    assert len(page.training.graph.outputs) > 1
