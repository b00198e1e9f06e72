"""Files of old opsets: their forward in a gradient graph is what onnxruntime computes of the file itself."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.model import own_copy
from symbolics.errors import FormatError
from symbolics.graph.walk import walk
from symbolics.node.names import MARK_COUNT_KEY
from tests.exporter.gradient_graph.old_operators import ROWS, UNTRIED, Row
from tests.exporter.gradient_graph.test_check import Model

NEWEST = 18  # which files are converted to


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def feeds_of(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Random numbers for each input; of both kinds where one is a condition."""
    rng = np.random.default_rng(0)
    found = []
    for truth in (True, False):
        feeds = {}
        for value in model.graph.input:
            tensor = value.type.tensor_type
            shape = [d.dim_value or 3 if d.HasField("dim_param") else d.dim_value for d in tensor.shape.dim]
            feeds[value.name] = np.array(truth) if tensor.elem_type == onnx.TensorProto.BOOL else rng.standard_normal(shape, np.float32)
        found.append(feeds)
        if not any(v.type.tensor_type.elem_type == onnx.TensorProto.BOOL for v in model.graph.input):
            break
    return found


def differences(row: Row) -> list[str]:
    """What of the row's outputs is not alike before and after the conversion, for each opset."""
    said = []
    for opset in range(row.first, row.last + 1):
        model = onnx.parser.parse_model(row.text(opset))
        for feeds in feeds_of(model):
            try:
                expected = run(model, feeds)
            except NotImplemented:  # no kernel of that opset
                said.append(f"{opset}: not of onnxruntime")
                continue
            found = run(ir.to_proto(own_copy(model)), feeds)
            for name, y in expected.items():
                z = found[name]
                if y.dtype != z.dtype or y.shape != z.shape or not np.allclose(y, z, 1e-5, 1e-5, equal_nan=True):
                    said.append(f"{opset}: {name} of {y.dtype}{y.shape}, and {z.dtype}{z.shape}")
    return said


@pytest.mark.parametrize("name", ROWS)
def test_the_converted_forward_computes_what_the_file_does(name):
    row = ROWS[name]
    if not row.refused:
        assert not differences(row)
        return
    for opset in range(row.first, row.last + 1):
        with pytest.raises(FormatError, match=row.refused):
            own_copy(onnx.parser.parse_model(row.text(opset)))


def test_each_operator_that_changed_has_a_row():
    versions: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, []).append(schema.since_version)
    changed = {name for name, all_of_it in versions.items() if min(all_of_it) < NEWEST and any(7 < v <= NEWEST for v in all_of_it)}
    tried = {node.op_type for row in ROWS.values() for node in walk(ir.from_onnx_text(row.text(row.first)).graph)}
    assert changed - tried - UNTRIED == set()
    assert not UNTRIED & tried


IMAGES = [name for name in ROWS if name.startswith(("Upsample", "Resize-10", "Resize plain")) and "open" not in name]


@pytest.mark.parametrize("name", [*IMAGES, "Hardmax axis 1"])
def test_a_loaded_module_gives_the_same_with_a_gradient_and_without(name):
    """And for what is linear in its input, the gradient is that of the outputs."""
    row = ROWS[name]
    model = onnx.parser.parse_model(row.text(row.first))
    feeds = {k: torch.from_numpy(v) for k, v in feeds_of(model)[0].items()}
    module = exporter.load(model)
    plain = module(**feeds)
    y = module(**{**feeds, "x": feeds["x"].clone().requires_grad_()})
    torch.testing.assert_close(y.detach(), plain)
    if name in IMAGES:
        x, change = feeds["x"].clone().requires_grad_(), torch.randn_like(feeds["x"])
        g = torch.randn_like(y)
        (dx,) = torch.autograd.grad(module(**{**feeds, "x": x}), x, g)
        torch.testing.assert_close((dx * change).sum(), (g * module(**{**feeds, "x": change})).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_functions_of_a_file_of_an_old_opset_stay(opset):
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}, "my": 1]> g (float[2,3] x) => (float[2,3] y) {{ a = my.Twice(x) y = my.Twice(a) }}
        <domain: "my", opset_import: ["": {opset}, "my": 1]> Twice (x) => (y) {{ a = my.Curve(x) y = Add(a, a) }}
        <domain: "my", opset_import: ["": {opset}]> Curve (x) => (y) {{ y = Softmax<axis = 0>(x) }}"""
    )
    x = torch.randn(2, 3, requires_grad=True)
    module = exporter.load(model)
    torch.testing.assert_close(module(x).detach(), module(x.detach()))
    assert module(x).square().sum().backward() is None
    assert x.grad.abs().max() > 0


def test_marks_of_an_old_opset_stop_gradients():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13, "pythonop": 1]> g (float[2] x) => (float[2] y) { s = pythonop.StopGradient(x) y = Mul(s, x) }
        <domain: "pythonop", opset_import: ["": 13]> StopGradient (x) => (y) { y = Identity(x) }"""
    )
    onnx.helper.set_model_props(model, {MARK_COUNT_KEY: "1"})
    x = np.array([2, 3], np.float32)
    found = run(ir.to_proto(build_gradient_graph(model)), {"x": x, "y_grad": np.ones(2, np.float32)})
    np.testing.assert_array_equal(found["y"], x * x)
    np.testing.assert_array_equal(found["x_grad"], x)


def test_a_portable_function_of_an_old_opset_has_its_gradient():
    model, x = Model(), torch.randn(2, 3, requires_grad=True)
    program = exporter.export(model, (x,), dynamo=False, opset_version=17, portable=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(exporter.load(program)(x).sum(), x)
    torch.testing.assert_close(found, expected)
