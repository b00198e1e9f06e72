"""Sweeps inside a graph, on graphs written by hand: values, orders, targets, names, errors."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.inside import expand_gradients
from symbolics.errors import ExportError, PythonopWarning, UnsupportedOperatorError
from tests.support import nodes

X = np.array([0.5, -1.5], np.float32)


def expanded(body: str, inputs: str = "float[2] x", outputs: str = "float[2] g", domains: str = "") -> ir.Model:
    text = f'<ir_version: 9, opset_import: ["" : 20, "pythonop.inner" : 1{domains}]> m ({inputs}) => ({outputs}) {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    expand_gradients(model)
    assert not nodes(model, "Gradient") + nodes(model, "Variable")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def run(model: ir.Model, **feeds: np.ndarray) -> list[np.ndarray]:
    return onnx.reference.ReferenceEvaluator(ir.to_proto(model)).run(None, feeds or {"x": X})


GRADIENT = 'pythonop.inner.Gradient<outputs = 1, id = "0", module = "", source = "mine:7">'


def test_one():
    model = expanded(f"v = pythonop.inner.Variable(x) y = Mul(v, v) s = Sin(y) g = {GRADIENT}(s, v, x)")
    np.testing.assert_allclose(run(model)[0], np.cos(X * X) * 2 * X * X, rtol=1e-6)
    assert "pythonop.inner" not in model.graph.opset_imports


def test_a_variable_is_not_what_it_was_made_of():
    """x is read beside the variable of it: that part is held fixed."""
    model = expanded(f"v = pythonop.inner.Variable(x) y = Mul(v, x) g = {GRADIENT}(y, v, x)")
    np.testing.assert_allclose(run(model)[0], X * X)


def test_several_outputs_one_of_them_twice():
    gradient = GRADIENT.replace("outputs = 1", "outputs = 3")
    model = expanded(f"v = pythonop.inner.Variable(x) y = Exp(v) z = Mul(v, v) g = {gradient}(y, z, z, v, x, x, x)")
    np.testing.assert_allclose(run(model)[0], X * np.exp(X) + 4 * X * X, rtol=1e-6)


def test_third_order():
    body = "v = pythonop.inner.Variable(x) v2 = Mul(v, v) y = Mul(v2, v2) o = Constant<value_float = 1.0>() n = Shape(x) w = Expand(o, n)"
    body += f" a = {GRADIENT}(y, v, w) b = {GRADIENT}(a, v, w) g = {GRADIENT}(b, v, w)"
    np.testing.assert_allclose(run(expanded(body))[0], 24 * X, rtol=1e-6)


def test_the_gradient_of_it():
    model = expanded(f"v = pythonop.inner.Variable(x) y = Mul(v, v) z = Mul(y, v) g = {GRADIENT}(z, v, u)", "float[2] x, float[2] u")
    training = build_gradient_graph(model, wrt=["x"])
    feeds = {"x": X, "u": np.ones_like(X), "g_grad": np.ones_like(X)}
    np.testing.assert_allclose(run(training, **feeds)[1], 6 * X)


def test_marks_are_honoured_and_stay():
    body = f"v = pythonop.inner.Variable(x) y = Mul(v, v) m = pythonop.StopGradient(y) z = Mul(m, v) g = {GRADIENT}(z, v, x)"
    text = f'<ir_version: 9, opset_import: ["" : 20, "pythonop.inner" : 1, "pythonop" : 1]> m (float[2] x) => (float[2] g) {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    mark = onnx.parser.parse_function('<opset_import: ["" : 20], domain: "pythonop"> StopGradient (x) => (y) { y = Identity(x) }')
    model.functions[("pythonop", "StopGradient", "")] = ir.from_proto(mark)
    expand_gradients(model)
    assert len(nodes(model, "StopGradient")) == 1
    np.testing.assert_allclose(run(model)[0], X * X * X)


def test_targets_that_nobody_reads_are_left_out():
    """An operator without a rule between a target and the output stands in nobody's way where that gradient is not read."""
    body = "v = pythonop.inner.Variable(x) w = pythonop.inner.Variable(x) u = other.Unknown(w) d = Mul(v, u)"
    both = body + f" g, h = {GRADIENT}(d, v, w, x)"
    model = ir.from_proto(
        onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 20, "pythonop.inner" : 1, "other" : 1]> m (float[2] x) => (float[2] g) <float[2] u> {{ {both} }}'
        )
    )
    expand_gradients(model)
    assert [node.op_type for node in model.graph] == ["Unknown", "Mul", "Mul"]


def test_a_target_that_is_flat_or_not_reached():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat = expanded(f"v = pythonop.inner.Variable(x) y = Round(v) g = {GRADIENT}(y, v, x)")
    np.testing.assert_array_equal(run(flat)[0], 0 * X)
    with pytest.warns(PythonopWarning, match="taken at mine:7 in module <root> is zero in the file"):
        lost = expanded(f"v = pythonop.inner.Variable(x) y = Sin(x) g = {GRADIENT}(y, v, x)")
    np.testing.assert_array_equal(run(lost)[0], 0 * X)


def test_no_rule_names_the_line():
    with pytest.raises(
        UnsupportedOperatorError, match=r"the gradient that is taken at mine:7 in module <root>: no gradient for other::Unknown"
    ):
        expanded(f"v = pythonop.inner.Variable(x) y = other.Unknown(v) g = {GRADIENT}(y, v, x)", domains=', "other" : 1')


def test_in_a_body():
    body = (
        f"b = Cast<to = 9>(i) g = If(b) <then_branch = t () => (float[2] p) {{ v = pythonop.inner.Variable(x) p = {GRADIENT}(v, v, x) }}, "
    )
    body += "else_branch = e () => (float[2] q) { q = Identity(x) }>"
    with pytest.raises(ExportError, match="stands in the body of torch.cond or a loop"):
        expanded(body, "float[2] x, int64 i")
