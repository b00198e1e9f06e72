"""Outputs of a graph that are handed out before a Reshape."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.outputs import hand_out_as_made
from exporter.runtime.session import inference_session
from exporter.runtime.tensors import LARGE, Runner

CPU = torch.device("cpu")


def model(body, x="float[64, 96]", outputs="float[8, 8, 96] y", known=("m",), more=""):
    found = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({x} x) => ({outputs}) {more} {{ {body} }}'))
    for node in found.graph:
        for output in node.outputs:
            if output.name in known:
                output.shape, output.type = ir.Shape((64, 96)), found.graph.inputs[0].type
    return found


SIZES = "<int64[3] s = {8, 8, 96}>"


def runs_as_before(changed, original, kind=np.float32):
    """The shapes that outputs had; through a Runner all is as it was."""
    given = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 96)).astype(kind))
    before = [output.name for output in changed.graph.outputs]
    had = hand_out_as_made(changed, {})
    assert [output.name for output in changed.graph.outputs] == before
    old, new = (Runner(inference_session(ir.to_proto(m)), CPU, shapes=shapes) for m, shapes in ((original, None), (changed, had)))
    for runner in (old, new):
        assert runner.names == before
    results = [r.tensors(r.run_owning([given])[0], range(len(before))) for r in (old, new)]
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)
    assert {name: list(new.shapes[name]) for name in had} == {name: list(old.shapes[name]) for name in had}
    if new.takes_room:
        room = [torch.full_like(value, 7.0) for value in results[0]]
        new.run_owning([given], room)
        assert all(map(torch.equal, room, results[0]))
    return had


@pytest.mark.parametrize("kind", ["float", "double"])
def test_what_a_reshape_reads_is_handed_out(kind):
    args = ("m = Neg (x) y = Reshape (m, s)", f"{kind}[64, 96]", f"{kind}[8, 8, 96] y")
    changed = model(*args, more=SIZES)
    had = runs_as_before(changed, model(*args, more=SIZES), np.float32 if kind == "float" else np.float64)
    assert had == {"y": (8, 8, 96)} and [node.op_type for node in changed.graph] == ["Neg"]


def test_it_may_have_other_readers():
    args = (
        "m = Neg (x) y = Reshape (m, s) z = Exp (y) w = Abs (m)",
        "float[64, 96]",
        "float[8, 8, 96] z, float[8, 8, 96] y, float[64, 96] w",
    )
    changed = model(*args, more=SIZES)
    assert runs_as_before(changed, model(*args, more=SIZES)) == {"y": (8, 8, 96)}
    assert [node.op_type for node in changed.graph] == ["Neg", "Reshape", "Exp", "Abs"]


def test_of_two_reshapes_of_one_value_one_is_a_copy():
    args = ("m = Neg (x) y = Reshape (m, s) z = Reshape (m, s)", "float[64, 96]", "float[8, 8, 96] y, float[8, 8, 96] z")
    assert list(runs_as_before(model(*args, more=SIZES), model(*args, more=SIZES))) == ["y"]


@pytest.mark.parametrize(
    "stays",
    [
        lambda: model("y = Reshape (x, s)", more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", known=(), more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 8, n] y", more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 9, 96] y", more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[16, 4, 96] y", more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 8, 96] y", more="<int64[3] s = {-1, -1, 96}>"),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 8, 96] y", more="<int64[2] s = {64, 96}>"),
        lambda: model("m = Neg (x) y = Reshape (m)"),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 8, 96] y, float[64, 96] m", more=SIZES),
        lambda: model("m = Neg (x) y = Reshape (m, s)", outputs="float[8, 8, 96] y, float[8, 8, 96] y", more=SIZES),
        lambda: model("m = Neg (x) y = Identity (m)", outputs="float[64, 96] y"),
        lambda: model("m = Neg (x) y = Reshape (m, s)", x="int64[64, 96]", outputs="int64[8, 8, 96] y", more=SIZES),
    ],
    ids=[
        "an input",
        "unknown",
        "open",
        "lies",
        "lies with as many elements",
        "two open sizes",
        "another rank",
        "no sizes",
        "handed out",
        "twice",
        "no Reshape",
        "integers",
    ],
)
def test_what_stays(stays):
    changed = stays()
    before = ir.to_proto(changed).SerializeToString()
    assert hand_out_as_made(changed, {}) == {}
    assert ir.to_proto(changed).SerializeToString() == before


def test_a_size_may_be_left_open():
    body = "m = Neg (x) y = Reshape (m, s)"
    assert runs_as_before(*(model(body, more="<int64[3] s = {8, -1, 96}>") for _ in range(2))) == {"y": (8, 8, 96)}


def test_few_elements_stay():
    text = (
        '<ir_version: 9, opset_import: ["": 18]> g (float[8, 8] x) => (float[64] y) <int64[1] s = {64}> { m = Neg (x) y = Reshape (m, s) }'
    )
    changed = ir.from_proto(onnx.parser.parse_model(text))
    negated = changed.graph[0].outputs[0]
    negated.shape, negated.type = ir.Shape((8, 8)), changed.graph.inputs[0].type
    assert hand_out_as_made(changed, {}) == {}


def test_a_tensor_of_another_size_than_said_stays_as_it_is():
    changed = model("m = Neg (x) y = Reshape (m, s)", x="float[n, 96]", more=SIZES)
    had = hand_out_as_made(changed, {})
    changed.graph.outputs[0].shape = None
    runner = Runner(inference_session(ir.to_proto(changed)), CPU, shapes=had)
    (found,) = runner.tensors(runner.run_owning([torch.ones(2, 96)])[0], [0])
    assert found.shape == (2, 96)


@pytest.mark.parametrize("channels", [24, 352], ids=["small", "written where it is to lie"])
def test_gradients_of_a_convolution_s_weights(channels, tmp_path):
    """Of a loaded module, in the shape that they have: onnxruntime's memory, and ours."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(3, channels, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
    weight = eager[2].weight
    assert (weight.nbytes >= LARGE) == (channels > 100)
    x = torch.randn(2, 3, 5, 5)
    exporter.export(eager, (x,), training=True).save(tmp_path / "conv.onnx")
    module = exporter.load(tmp_path / "conv.onnx")
    for _ in range(2):
        module.zero_grad()
        module(x).sin().sum().backward()
    eager(x).sin().sum().backward()
    found = dict(module.named_parameters())
    for name, parameter in eager.named_parameters():
        assert found[name].grad.shape == parameter.shape
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)
