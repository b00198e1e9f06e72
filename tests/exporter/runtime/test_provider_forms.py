"""Forms for other providers: the same numbers, on the CPU, and what a provider refuses is gone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.provider_forms import captures_as_states, sums_over_known_axes, sums_over_repeats, write_forms
from symbolics.graph.walk import captured, walk
from symbolics.node.names import STEP_KEY

#: A Scan that reads an input, an initializer and a value from outside, some in an If inside it.
SCAN = """<ir_version: 10, opset_import: ["": 20]> g (float[3,2] x, float[2] h, float[2] w, bool c) => (float[2] last, float[3,2] y, float[3,2] z, float[2] more)
    <float[2] k = {2, 3}>
    {
        u = Mul (w, k)
        last, y, z = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = b (float[2] s, float[2] r) => (float[2] s2, float[2] o, float[2] v) {
            t = Add (s, r)
            q = If (c) <then_branch = a () => (float[2] e) { e = Mul (t, u) }, else_branch = d () => (float[2] f) { f = Identity (k) }>
            s2 = Sub (q, w)
            o = Cos (s2)
            v = Identity (u)
        }> (h, x)
        more = Neg (last)
    }"""


def _run(proto, feeds):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("on", [True, False])
def test_what_a_scan_reads_from_outside_is_a_state(on):
    proto = onnx.parser.parse_model(SCAN)
    model = ir.from_proto(proto)
    assert captures_as_states(model) == 1
    (scan,) = [node for node in walk(model.graph) if node.op_type == "Scan"]
    assert captured(scan) == []
    made = ir.to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", (3, 2)), ("h", 2), ("w", 2))} | {
        "c": np.array(on)
    }
    for wanted, got in zip(_run(proto, feeds), _run(made, feeds), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert captures_as_states(model) == 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_step_of_a_recurrent_network(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    x, target = torch.randn(2, 5, 3), torch.tensor([0, 1])
    step = exporter.export_training_step(Net(), (x,), loss=nn.functional.cross_entropy, targets=(target,), optimizer="adamw", dynamo=False)
    plain = step.model_proto
    model = ir.from_proto(plain)
    assert not write_forms(["qnn"], model)
    assert write_forms(["openvino", "openvino"], model)
    made = ir.to_proto(model)
    assert STEP_KEY in {entry.key for entry in made.metadata_props}
    assert [value.name for value in made.graph.output] == [value.name for value in plain.graph.output]
    assert all(captured(node) == [] for node in walk(ir.from_proto(made).graph) if node.op_type == "Scan")
    feeds = {**step.initial, **dict(zip((*step.layout.inputs, *step.layout.targets), (x.numpy(), target.numpy()), strict=True))}
    feeds = {value.name: feeds[value.name] for value in plain.graph.input}
    for wanted, got in zip(_run(plain, feeds), _run(made, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("keepdims", "written"), [(1, True), (0, False)])
def test_a_sum_that_drops_its_axes_is_none_to_a_shape(keepdims, written):
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]> g (float[2,N] x, float[M,N] like) => (float[A,B] y)
        <int64 one = {{1}}, int64[1] flat = {{-1}}> {{
            sizes = Shape (like)
            ones = Equal (sizes, one)
            places = NonZero (ones)
            axes = Reshape (places, flat)
            y = ReduceSum <keepdims = {keepdims}, noop_with_empty_axes = 1> (x, axes)
        }}""")
    assert bool(sums_over_repeats(ir.from_proto(proto))) == written


@pytest.mark.parametrize(("like", "written"), [((2, 1), True), ((1,), True), ((2, 3), True), ((1, 3), True), (("N", 1), False)])
def test_a_sum_to_sizes_that_are_known(like, written):
    """Also to fewer axes, and to as many as there are; the reference is numpy's."""
    front = 2 - len(like)
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[2,3] x, float[{",".join(map(str, like))}] like) => (float[A,B] y)
        <int64 one = {{1}}, int64[1] flat = {{-1}}, int64[1] lead = {{1}}> {{
            own = Shape (like)
            sizes = {"Concat <axis = 0> (lead, own)" if front else "Identity (own)"}
            ones = Equal (sizes, one)
            places = NonZero (ones)
            axes = Reshape (places, flat)
            y = ReduceSum <keepdims = 1, noop_with_empty_axes = 1> (x, axes)
        }}"""
    model = ir.from_proto(
        onnx.parser.parse_model(
            text.replace("sizes = Identity (own)", "").replace("(sizes, one)", "(sizes, one)" if front else "(own, one)")
        )
    )
    assert bool(sums_over_known_axes(model)) == written
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    shape = tuple(2 if dim == "N" else dim for dim in like)
    axes = tuple(axis for axis, size in enumerate((1,) * front + shape) if size == 1)
    (y,) = _run(ir.to_proto(model), {"x": x, "like": np.zeros(shape, np.float32)})
    np.testing.assert_array_equal(y, x.sum(axes, keepdims=True) if axes else x)


def test_rows_that_are_added_to_rows_are_one_scatter():
    """The gradient of an embedding of many ids, some of them twice: beside torch's."""
    torch.manual_seed(0)
    table, ids = nn.Embedding(300, 96), torch.randint(0, 300, (700,))
    model = exporter.build_gradient_graph(exporter.export(table, (ids,), dynamo=False))
    assert any(node.op_type == "AddRows" for node in model.graph)
    assert write_forms(["openvino"], model)
    assert not model.functions and [node.op_type for node in model.graph if "Scatter" in node.op_type] == ["ScatterND"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    g = torch.randn(700, 96)
    table(ids).backward(g)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    found = dict(
        zip(
            [v.name for v in session.get_outputs()], session.run(None, dict(zip(names, (ids.numpy(), g.numpy()), strict=True))), strict=True
        )
    )
    np.testing.assert_allclose(found["weight_grad"], table.weight.grad.numpy(), rtol=1e-5, atol=1e-5)
