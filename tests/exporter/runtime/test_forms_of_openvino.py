"""Forms for other execution providers compute what the file does, on the CPU, and are there where a provider needs them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from exporter.runtime.provider_forms import write_forms

# name -> a model, what is fed, an operator that is gone in OpenVINO's form (or "" for a value from outside of a body).
ROWS = {
    "a sum of computed axes": (
        """<ir_version: 10, opset_import: ["": 20]> g (float[a,b,c,d] g, float[p,q,r] x) => (float[o,p,q,r] y)
        <int64[1] one = {1}, int64[1] flat = {-1}> {
            shape = Shape(x)
            padded = Concat<axis = 0>(one, shape)
            is_one = Equal(padded, one)
            where = NonZero(is_one)
            axes = Reshape(where, flat)
            y = ReduceSum<keepdims = 1, noop_with_empty_axes = 1>(g, axes)
        }""",
        {"g": (2, 3, 4, 5), "x": (3, 1, 5)},
        "NonZero",
    ),
    "a sum of computed axes, of nothing": (
        """<ir_version: 10, opset_import: ["": 20]> g (float[a,b] g, float[p,q] x) => (float[p,q] y)
        <int64 one = {1}, int64[1] flat = {-1}> {
            shape = Shape(x)
            is_one = Equal(shape, one)
            where = NonZero(is_one)
            axes = Reshape(where, flat)
            y = ReduceSum<keepdims = 1, noop_with_empty_axes = 1>(g, axes)
        }""",
        {"g": (0, 3), "x": (0, 1)},
        "NonZero",
    ),
    "a row of minus infinity": (
        """<ir_version: 10, opset_import: ["": 20]> g (float[a,b] x) => (bool[a,c] y, float[a,b] z) <int64[1] last = {-1}> {
            zero = Constant<value_float = 0.0>()
            lowest = Log(zero)
            bottom = Constant<value = float {-inf}>()
            positive = Greater(x, zero)
            z = Where(positive, x, lowest)
            top = ReduceMax(z, last)
            like = CastLike(bottom, x)
            y = Equal(top, like)
        }""",
        {"x": (40, 3)},
        "",
    ),
    "what a Scan reads from outside": (
        """<ir_version: 10, opset_import: ["": 20]> g (float[3,4] x, float[4] start, float[4] w) => (float[4] end, float[3,1,4] all)
        <int64[1] first = {0}> {
            end, all = Scan<num_scan_inputs = 1, body = body (float[4] s, float[4] e) => (float[4] t, float[1,4] u) {
                m = Mul(s, w)
                t = Add(m, e)
                u = Unsqueeze(t, first)
            }>(start, x)
        }""",
        {"x": (3, 4), "start": (4,), "w": (4,)},
        "captured",
    ),
}


def _run(model, feeds):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("name", ROWS)
def test_a_form_computes_the_same(name):
    text, shapes, gone = ROWS[name]
    try:
        model = parser.parse_model(text)
    except onnx.parser.ParseError as error:
        raise AssertionError(str(error)) from None
    random = np.random.default_rng(0)
    feeds = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    written = ir.from_proto(model)
    assert not write_forms(["cpu"], written)
    assert write_forms(["openvino"], written)
    assert not write_forms(["openvino"], written)
    formed = ir.to_proto(written)
    onnx.checker.check_model(formed, full_check=True)
    for found, expected in zip(_run(formed, feeds), _run(model, feeds), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if gone == "captured":
        (scan,) = formed.graph.node
        body = scan.attribute[0].g if scan.attribute[0].HasField("g") else scan.attribute[1].g
        inside = {value.name for value in body.input} | {name for node in body.node for name in node.output}
        assert {name for node in body.node for name in node.input} <= inside
        assert len(scan.input) == 3  # the state, the weight, the sequence; no constant
    elif gone:
        assert gone not in {node.op_type for node in formed.graph.node}
    else:
        tops = [node for node in formed.graph.node if node.op_type == "ReduceMax"]
        assert len(tops) == 1
        assert tops[0].input[0] != "z"
