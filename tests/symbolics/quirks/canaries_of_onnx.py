"""Canaries of onnx itself: each says whether it is still wrong."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import version_converter

from tests.symbolics.quirks.tools import on_onnxruntime


def _converted(opset: int, body: str, function: str = "") -> onnx.ModelProto:
    imports = f'opset_import: ["": {opset}, "my": 1]'
    text = f"<ir_version: 8, {imports}> g (float[1,2,4,6] x) => (float y) {{ {body} }} {function}"
    return version_converter.convert_version(onnx.parser.parse_model(text), 18)


def converted_operators():
    (hardmax,) = _converted(11, "y = Hardmax<axis = 1>(x)").graph.node[-1:]
    upsample = _converted(9, 's = Constant<value = float[4] {1.0, 1.0, 2.0, 2.0}>() y = Upsample<mode = "linear">(x, s)')
    pad = _converted(10, 'y = Pad<mode = "edge", pads = [0, 0, 1, 1, 0, 0, 0, 0], value = 2.5>(x)')
    called = _converted(11, "y = my.F(x)", '<domain: "my", opset_import: ["": 11]> F (x) => (y) { y = Abs(x) }')
    return (
        hardmax.op_type == "Hardmax"
        or not any(a.name == "coordinate_transformation_mode" for a in upsample.graph.node[-1].attribute)
        or any(a.name == "value" for a in pad.graph.node[-1].attribute)
        or not called.functions
    )


def windows_of_padding():
    body = "y = MaxPool<ceil_mode = 1, kernel_shape = [2], strides = [2], pads = [1, 1]>(x)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g (float[1,1,7] x) => (float[a,b,c] y) {{ {body} }}')
    return onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape.dim[2].dim_value != 4


def stretched_axes():
    body = 'y = Einsum<equation = "ij,ij->ij">(a, b)'
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[1,3] a, float[2,1] b) => (float[n,m] y) {{ {body} }}'
    )
    return [dim.dim_value for dim in onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape.dim] != [2, 3]


def norms_of_doubles(cures=()):
    """A small variance beside a small epsilon."""
    x = np.random.default_rng(0).normal(size=(3, 5)) * 1e-3
    node = onnx.helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], epsilon=1e-5)
    found = on_onnxruntime([node], {"x": x, "s": np.ones(5), "b": np.zeros(5)}, cures=cures)
    middle = x - x.mean(-1, keepdims=True)
    return not np.allclose(found, middle / np.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5), rtol=1e-12, atol=0)


def open_spectra():
    """Half of a spectrum, as long as the whole."""
    body = "axis = Constant<value = int64 {1}>() z = DFT<onesided = 1>(x, length, axis) y = Neg(z)"
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float[3,m,1] x, int64 length) => (float[3,k,2] y) {{ {body} }}'
    inferred = {
        value.name: value.type.tensor_type.shape
        for value in onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)).graph.value_info
    }
    return inferred["z"].dim[1].dim_param == "m"
