"""Files of others, whose nodes may have no name, or one name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import exporter


@pytest.mark.parametrize("names", [("one", "two"), ("", ""), ("one", "one")], ids=["names", "none", "one name"])
def test_products_are_told_apart(names, tmp_path):
    weights = [np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) for seed in range(2)]
    nodes = [helper.make_node("MatMul", ["x", "A"], ["h"], names[0]), helper.make_node("MatMul", ["h", "B"], ["y"], names[1])]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 64]) for name in ("x", "y")]
    held = [numpy_helper.from_array(weight, name) for weight, name in zip(weights, "AB", strict=True)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    quantized = exporter.quantize(tmp_path / "model.onnx", weights="int4")
    assert [each.kernel for each in quantized.products] == ["MatMulNBits"] * 2
    assert "2 of 2 products run in integers" in str(quantized)
    assert all(each.error > 0.02 for each in quantized.products)


def test_a_product_that_scales_says_so(tmp_path):
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), "A")
    nodes = [helper.make_node("Gemm", ["x", "A"], ["h"], alpha=0.5), helper.make_node("MatMul", ["h", "A"], ["y"])]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    quantized = exporter.quantize(tmp_path / "model.onnx", weights="int4")
    assert {each.operator: each.reason.partition(":")[0] for each in quantized.products if not each.kernel} == {
        "Gemm": "it scales or transposes what it takes"
    }
