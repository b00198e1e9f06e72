"""What onnxruntime does wrong, without our cure: each function says whether it still does.

Where the cure is a pass over the graph, the canary takes ``cures=``: the same with them has to be right.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
from onnx import helper

from exporter.runtime.session import session_options
from tests.processes import python
from tests.symbolics.quirks.tools import (
    differs,
    on_onnxruntime,
)


def batch_norm_buffers(cures=()):
    one, x = np.ones(3, np.float32), np.random.default_rng(0).normal(3, 5, (4, 3)).astype(np.float32)
    node = helper.make_node("BatchNormalization", ["x", "weight", "bias", "mean", "var"], ["y", "new_mean", "new_var"], training_mode=1)
    y = on_onnxruntime([node], {"x": x}, {"weight": one, "bias": 0 * one, "mean": 0 * one, "var": one}, cures=cures)
    return differs((y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)))


def matrix_vector(cures=()):
    nodes = [helper.make_node("Transpose", ["a"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["t", "v"], ["y"])]
    a, v = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([1, 2, 3], np.float32)
    return differs((on_onnxruntime(nodes, {"a": a, "v": v}, cures=cures), a.T @ v))


def omitted_outputs():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2] x) => (float[2] y) { y = own.f(x) }
        <domain: "own", opset_import: ["": 20]> f (x) => (y, z) { y = Exp(x) z = Sin(x) }"""
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError:
        return True
    return False


def fusions_in_a_domain():
    nodes = [helper.make_node("Gemm", ["a", "b", "c"], ["t"]), helper.make_node("Relu", ["t"], ["y"])]
    try:
        on_onnxruntime(nodes, dict.fromkeys("abc", np.eye(3, dtype=np.float32)), options=session_options())
    except Exception:
        return True
    return False


def pads_with_axes():
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["t", "first"], ["u"]),
        helper.make_node("Pad", ["u", "pads", "", "first"], ["p"]),
        helper.make_node("Transpose", ["p"], ["y"], perm=[0, 2, 1]),
    ]
    numbers = {"first": np.array([0]), "pads": np.array([1, 1])}
    try:
        return on_onnxruntime(nodes, {"x": np.ones((2, 3), np.float32)}, numbers).shape != (3, 2, 3)
    except Exception:
        return True


def empty_products():
    node = helper.make_node("Gemm", ["a", "b", "c"], ["y"], beta=2.0)
    ones = np.ones((2, 3), np.float32)
    return differs((on_onnxruntime([node], {"a": ones[:, :0], "b": ones[:0], "c": ones}), 2 * ones))


def empty_batches(cures=()):
    feeds = {"a": np.ones((2, 3), np.float32), "b": np.ones((0, 3, 4), np.float32)}
    try:
        return on_onnxruntime([helper.make_node("MatMul", ["a", "b"], ["y"])], feeds, cures=cures).shape != (0, 2, 4)
    except Exception:
        return True


def determinants(cures=()):
    x = np.diag([2.0, 3.0])
    try:
        return differs((on_onnxruntime([helper.make_node("Det", ["x"], ["y"])], {"x": x}, cures=cures), 6.0))
    except Exception:
        return True


def body_outputs(cures=()):
    """What nobody writes is whatever was in memory: three tries."""
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in ("s", "i", "s2", "i")]
    body = helper.make_graph([helper.make_node("Add", ["s", "i"], ["s2"])], "body", values[:2], values[2:])
    nodes = [helper.make_node("Scan", ["x", "z"], ["last", "y"], body=body, num_scan_inputs=1)]
    feeds = {"x": np.ones(64, np.float32), "z": np.full((3, 64), 7, np.float32)}
    return any(differs((on_onnxruntime(nodes, feeds, cures=cures), feeds["z"])) for _ in range(3))


def half_scatters(cures=()):
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")
    x = np.ones(2, np.float16)
    try:
        return differs((on_onnxruntime([node], {"x": x}, {"i": np.zeros((1, 1), np.int64), "u": x[:1]}, cures=cures), [2, 1]))
    except Exception:
        return True


def empty_einsums():
    """In a process of its own, which it ends."""
    script = """
import numpy, onnxruntime
from onnx import TensorProto, helper
a, b, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in "aby")
graph = helper.make_graph([helper.make_node("Einsum", ["a", "b"], ["y"], equation="nqd,nkd->nqk")], "g", [a, b], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString())
session.run(None, {"a": numpy.zeros((0, 2, 3), numpy.float32), "b": numpy.zeros((0, 4, 3), numpy.float32)})
"""
    return python("-c", script).returncode < 0


def racing_scatters(cures=()):
    """One run of four is wrong on two cores; a machine with one has no threads that could race."""
    info = helper.make_tensor_value_info
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")
    inputs = [info("x", 1, [64, 2560]), info("i", 7, [836, 1]), info("u", 1, [836, 2560])]
    graph = helper.make_graph([node], "g", inputs, [info("y", 1, [64, 2560])])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 8
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    for cure in cures:
        cure(model, list(model.graph))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    index = np.random.default_rng(0).integers(0, 64, 836)
    feeds = {"x": np.zeros((64, 2560), np.float32), "i": index[:, None], "u": np.ones((836, 2560), np.float32)}
    expected = np.bincount(index, minlength=64)[:, None]
    return any((session.run(None, feeds)[0] != expected).any() for _ in range(500))


def bernoulli(cures=()):
    node = helper.make_node("Bernoulli", ["p"], ["y"])
    return bool(on_onnxruntime([node], {"p": np.array([0, 0, 0, 1, 1, 1], np.float32)}, cures=cures).tolist() != [0, 0, 0, 1, 1, 1])


def empty_reductions(cures=()):
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    feeds = {"x": np.zeros((0, 3), np.float32)}
    return on_onnxruntime([node], feeds, {"axes": np.array([-1])}, cures=cures).shape != (0,)


def mean_of_nothing(cures=()):
    node = helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)
    return not np.isnan(on_onnxruntime([node], {"x": np.zeros((0, 3), np.float32)}, cures=cures))


def buffers_of_open_spectra(cures=()):
    """A whole in a place that was kept for half of a spectrum."""
    body = """axis = Constant<value = int64 {1}>() size = Shape<start = 1, end = 2>(x) length = Squeeze(size)
        half = DFT<onesided = 1>(x, length, axis) sum = ReduceSum<keepdims = 0>(half) moved = Add(x, sum)
        whole = Concat<axis = 2>(moved, x) y = ReduceMax<keepdims = 0>(whole)"""
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float[3,n,1] x) => (float y) {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    for cure in cures:
        cure(model, list(model.graph))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    try:
        return differs((session.run(None, {"x": np.ones((3, 16, 1), np.float32)})[0], 49))
    except Exception:
        return True


def rough_spectra(cures=()):
    x = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    y = on_onnxruntime([helper.make_node("DFT", ["x"], ["y"], axis=1, onesided=1)], {"x": x[:, :, None]}, cures=cures)
    right = np.fft.rfft(x.astype(np.float64))
    return np.abs(y[..., 0] + 1j * y[..., 1] - right).max() > 1e-6 * np.abs(right).max()


def half_spectra(cures=()):
    """Missing points are zeros."""
    x = np.random.default_rng(0).standard_normal((3, 3, 2))
    node = helper.make_node("DFT", ["x", "length"], ["y"], axis=1, inverse=1, onesided=1)
    y = on_onnxruntime([node], {"x": x}, {"length": np.array(8)}, cures=cures)
    return differs((y[..., 0], np.fft.irfft(x[..., 0] + 1j * x[..., 1], 8)))
