"""From a file to what onnxruntime opens: which passes a model takes, and that they leave others alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import exporter
from exporter.runtime.pipeline import PASSES, Arranged, Pass, arrange
from tests.processes import ROOT

PLAIN = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Relu (x) }"""


def _rename(arranged):
    arranged.model.graph[0].name = f"{arranged.model.graph[0].name} again"
    return True


def test_a_plain_file_stays_as_it_is():
    proto = onnx.parser.parse_model(PLAIN)
    before = proto.SerializeToString()
    found = arrange(Arranged(proto))
    assert found.proto is proto and proto.SerializeToString() == before
    assert (found.changed, found.library, found.is_step, found.python_ops, found.update, found.operators) == (
        False,
        False,
        False,
        False,
        None,
        None,
    )


def test_a_plain_file_never_becomes_an_onnx_ir_model():
    code = f"import sys, onnx.parser; from exporter.runtime.pipeline import *; arrange(Arranged(onnx.parser.parse_model({PLAIN!r}))); print('onnx_ir' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_each_pass_sees_what_those_before_it_made():
    seen = []

    def look(arranged):
        seen.append(arranged.proto.graph.node[0].name)
        return False

    passes = [Pass("a", _rename, over_ir=True), Pass("b", _rename, over_ir=True), Pass("look", look), Pass("c", _rename, over_ir=True)]
    found = arrange(Arranged(onnx.parser.parse_model(PLAIN)), passes)
    assert seen == [" again again"]
    assert found.proto.graph.node[0].name == " again again again"
    assert found.changed


def test_what_nothing_changed_is_not_written_anew():
    proto = onnx.parser.parse_model(PLAIN)
    found = arrange(Arranged(proto), [Pass("look", lambda arranged: arranged.model is None, over_ir=True)])
    assert found.proto is proto and not found.changed


def test_a_pass_that_a_model_does_not_take_is_left_out():
    def fail(arranged):
        raise AssertionError

    arrange(Arranged(onnx.parser.parse_model(PLAIN)), [Pass("no", fail, lambda arranged: arranged.is_step)])


@pytest.mark.parametrize(("provider", "taken"), [([], False), (["openvino"], True)])
def test_forms_are_for_other_providers(provider, taken):
    (forms,) = [each for each in PASSES if each.name == "in the forms of its providers"]
    assert forms.takes(Arranged(onnx.parser.parse_model(PLAIN), provider)) == taken


def test_names_are_ones_own():
    assert len({each.name for each in PASSES}) == len(PASSES)


SCATTER = """<ir_version: 8, opset_import: ["": 18], metadata_props: ["pythonop.step": "{}"]>
    g (float[30,96] x, int64[700,1] i, float[700,96] u) => (float[30,96] y) { y = ScatterND <reduction = "add"> (x, i, u) }"""


def test_a_step_of_before_loses_no_additions():
    """onnxruntime's ScatterND does, where several threads add to one place."""
    found = arrange(Arranged(onnx.parser.parse_model(SCATTER), accelerate=False))
    assert [node.op_type for node in found.proto.graph.node] == ["Reshape", "AddRows"]
    rng = np.random.default_rng(0)
    x, i, u = rng.standard_normal((30, 96), np.float32), rng.integers(0, 30, (700, 1)), rng.standard_normal((700, 96), np.float32)
    expected = x.astype(np.float64)
    np.add.at(expected, i[:, 0], u)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(found.proto.SerializeToString(), options)
    for _ in range(20):
        np.testing.assert_allclose(session.run(None, {"x": x, "i": i, "u": u})[0], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("threads", "form"), [(1, "ScatterND"), (2, "ScatterElements")])
@pytest.mark.parametrize("inner", [(16,), (4, 3)])
def test_short_rows_are_added_at_once_where_a_node_has_one_thread(threads, form, inner, monkeypatch):
    """A file adds rows of fewer than 64 elements one by one, as several threads would lose additions."""
    table, ids = torch.randn(300, *inner), torch.randint(-300, 300, (5000,))

    class Rows(torch.nn.Module):
        def forward(self, table, ids):
            return table[ids]

    proto = ir.to_proto(exporter.build_gradient_graph(exporter.export(Rows(), (table, ids)), wrt=["table"]))
    assert {"ScatterElements"} == {node.op_type for node in proto.graph.node} & {"ScatterElements", "ScatterND", "AddRows"}
    given, seen = onnxruntime.SessionOptions(), []
    given.intra_op_num_threads = threads
    monkeypatch.setattr("exporter.runtime.session.arrange", lambda arranged: seen.append(arrange(arranged)) or seen[-1])
    session = exporter.inference_session(proto, sess_options=given)
    kinds = {node.op_type for node in seen[0].proto.graph.node}
    assert kinds & {"ScatterElements", "ScatterND"} == {form} and ("Expand" in kinds) == (form == "ScatterElements")
    g, wanted = torch.randn(5000, *inner), torch.zeros(300, *inner)
    wanted.index_add_(0, ids % 300, g)
    feeds = {"table": table.numpy(), "ids": ids.numpy(), session.get_inputs()[-1].name: g.numpy()}
    found = session.run(["table_grad"], {put.name: feeds[put.name] for put in session.get_inputs()})
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "form"), [((1, True), "ScatterND"), ((2, True), "AddRows"), ((0, True), "AddRows"), ((1, False), "AddRows")]
)
def test_rows_are_added_at_once_where_a_node_has_one_thread(options, form, monkeypatch):
    """With threads of its own, or the one pool of the process, several may add to one place."""
    table, ids = torch.nn.Embedding(300, 96), torch.randint(0, 300, (700,))
    proto = ir.to_proto(exporter.build_gradient_graph(exporter.export(table, (ids,))))
    assert any(node.op_type == "AddRows" for node in proto.graph.node)
    given, seen = onnxruntime.SessionOptions(), []
    given.intra_op_num_threads, given.use_per_session_threads = options
    monkeypatch.setattr("exporter.runtime.session.arrange", lambda arranged: seen.append(arrange(arranged)) or seen[-1])
    session = exporter.inference_session(proto, sess_options=given) if given.use_per_session_threads else None
    if session is None:  # the process has no such pool
        with pytest.raises(exporter.RunError):
            exporter.inference_session(proto, sess_options=given)
    kinds = {node.op_type for node in seen[0].proto.graph.node}
    assert form in kinds and len(kinds & {"AddRows", "ScatterND"}) == 1
    if session is not None:
        g = torch.randn(700, 96)
        (found,) = session.run(["weight_grad"], {session.get_inputs()[0].name: ids.numpy(), session.get_inputs()[1].name: g.numpy()})
        table(ids).backward(g)
        np.testing.assert_allclose(found, table.weight.grad, rtol=1e-5, atol=1e-5)
