"""Large graphs, whose nodes are listed as they can run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import exporter
from exporter.runtime import pipeline
from exporter.runtime.node_order import list_as_they_can_run


def _value(name, kind=TensorProto.FLOAT, shape=(2,)):
    return helper.make_tensor_value_info(name, kind, shape)


def _model(nodes, outputs=("y",), inputs=None):
    graph = helper.make_graph(nodes, "test", inputs or [_value("x")], [_value(name) for name in outputs])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _chain_and_what_waits(length):
    """A chain, behind it the derivative of each link, which could run early, and the product of those."""
    nodes = [helper.make_node("Sin", ["x" if i == 0 else f"h{i - 1}"], [f"h{i}"]) for i in range(length)]
    nodes += [helper.make_node("Cos", ["x" if i == 0 else f"h{i - 1}"], [f"d{i}"]) for i in range(length)]
    nodes += [helper.make_node("Mul", ["d0" if i == 0 else f"p{i - 1}", f"d{i}"], [f"p{i}"]) for i in range(length)]
    return _model([*nodes, helper.make_node("Identity", [f"p{length - 1}"], ["y"])], ("y", f"h{length - 1}"))


def _most_waiting(nodes):
    """How many nodes wait at once where the first in the list that can run does, as in onnxruntime's sort."""
    places = {name: i for i, node in enumerate(nodes) for name in node.output}
    missing = [{places[v] for v in node.input if v in places} for node in nodes]
    waiting, done, most = {i for i, before in enumerate(missing) if not before}, set(), 0
    while waiting:
        most = max(most, len(waiting))
        done.add(min(waiting))
        waiting = {i for i, before in enumerate(missing) if i not in done and before <= done}
    assert len(done) == len(nodes)
    return most


def test_hardly_a_node_waits():
    model = _chain_and_what_waits(20)
    before = list(model.graph.node)
    assert _most_waiting(before) >= 20
    assert list_as_they_can_run(model.graph)
    assert _most_waiting(list(model.graph.node)) <= 4
    assert sorted(map(str, model.graph.node)) == sorted(map(str, before))
    onnx.checker.check_model(model)


def test_what_a_body_reads_comes_before_it():
    body = helper.make_graph([helper.make_node("Neg", ["late"], ["inside"])], "then", [], [_value("inside")])
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["besides"])], "else", [], [_value("besides")])
    nodes = [
        helper.make_node("Sin", ["x"], ["early"]),
        helper.make_node("Cos", ["early"], ["late"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=other),
    ]
    model = _model(nodes, inputs=[_value("x"), _value("c", TensorProto.BOOL, ())])
    assert list_as_they_can_run(model.graph)
    assert [node.op_type for node in model.graph.node] == ["Sin", "Cos", "If"]
    onnx.checker.check_model(model)


@pytest.mark.parametrize("reads", ["b", "a"], ids=["later", "itself"])
def test_a_graph_that_is_not_sorted_stays_as_it_is(reads):
    nodes = [helper.make_node("Add", ["x", reads], ["a"]), helper.make_node("Sin", ["x"], ["b"]), helper.make_node("Cos", ["a"], ["y"])]
    model = _model(nodes)
    assert not list_as_they_can_run(model.graph)
    assert list(model.graph.node) == nodes


def test_a_large_graph_gives_the_same_bits(monkeypatch):
    model, feeds = _chain_and_what_waits(20), {"x": np.array([0.3, -2.0], np.float32)}
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    called = []
    monkeypatch.setattr(pipeline, "MANY_NODES", len(model.graph.node))
    monkeypatch.setattr(pipeline, "list_as_they_can_run", lambda graph: called.append(graph) or list_as_they_can_run(graph))
    before = model.SerializeToString(deterministic=True)
    ours = exporter.inference_session(model)
    assert called and not ours.get_session_options().enable_mem_pattern
    assert model.SerializeToString(deterministic=True) == before  # the caller's model is not touched
    for found, expected in zip(ours.run(None, feeds), plain, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_graph_of_ten_thousand_nodes_is_large(monkeypatch):
    called = []
    monkeypatch.setattr(pipeline, "list_as_they_can_run", lambda graph: called.append(len(graph.node)) or list_as_they_can_run(graph))
    exporter.inference_session(_chain_and_what_waits(3333))  # and one more
    exporter.inference_session(_chain_and_what_waits(3000))
    assert called == [10_000]
