"""Bodies of If, Loop and Scan that give one value twice, or back what they were given: values beside onnx.reference, gradients beside differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import exporter

BODIES = {
    "If, twice": """g (double[3] x, bool c) => (double[3] a, double[3] b) {
        a, b = If (c) <then_branch = t () => (double[3] p, double[3] p) { p = Sin(x) }, else_branch = e () => (double[3] q, double[3] r) { q = Cos(x) r = Exp(x) }> }""",
    "If, a constant twice": """g (double[3] x, bool c) => (double[3] a, double[3] b) {
        a, b = If (c) <then_branch = t () => (double[3] w, double[3] w) <double[3] w = {1, 2, 3}> { }, else_branch = e () => (double[3] q, double[3] r) { q = Cos(x) r = Sin(x) }> }""",
    "Scan, twice": """g (double[3] x, double[4, 3] z) => (double[3] a, double[4, 3] b, double[4, 3] c) {
        a, b, c = Scan <num_scan_inputs = 1, body = l (double[3] s, double[3] i) => (double[3] u, double[3] u, double[3] u) { k = Sin(s) u = Mul(k, i) }> (x, z) }""",
    "Scan, what it was given": """g (double[3] x, double[4, 3] z) => (double[3] a, double[4, 3] b, double[4, 3] c) {
        a, b, c = Scan <num_scan_inputs = 1, body = l (double[3] s, double[3] i) => (double[3] u, double[3] i, double[3] s) { k = Sin(s) u = Mul(k, i) }> (x, z) }""",
    "Scan, swapped": """g (double[3] x, double[3] y, double[4, 3] z) => (double[3] a, double[3] b, double[4, 3] c) {
        a, b, c = Scan <num_scan_inputs = 1, body = l (double[3] s, double[3] r, double[3] i) => (double[3] r, double[3] s, double[3] k) { k = Mul(i, s) }> (x, y, z) }""",
    "Loop, twice": """g (double[3] x) => (double[3] a, double[n, 3] b, double[n, 3] d) <int64 m = {4}, bool go = {1}> {
        a, b, d = Loop (m, go, x) <body = l (int64 i, bool on, double[3] s) => (bool on, double[3] u, double[3] u, double[3] s) { u = Sin(s) }> }""",
    "If in a Loop": """g (double[3] x, bool c) => (double[3] a, double[3] b) <int64 m = {3}, bool go = {1}> {
        a, b = Loop (m, go, x, x) <body = l (int64 i, bool on, double[3] s, double[3] r) => (bool on, double[3] u, double[3] v) {
            u, v = If (c) <then_branch = t () => (double[3] p, double[3] p) { p = Sin(s) }, else_branch = e () => (double[3] q, double[3] o) { q = Cos(s) o = Exp(r) }> }> }""",
}


def differences(evaluate, feeds, weights):
    """By central differences, of the weighted sum of all outputs."""
    found = {}
    for name, value in feeds.items():
        if value.dtype != np.float64:
            continue
        found[name] = np.zeros_like(value)
        for place in np.ndindex(*value.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = value.copy()
                moved[place] += step
                ends.append(sum((w * y).sum() for w, y in zip(weights, evaluate({**feeds, name: moved}), strict=True)))
            found[name][place] = (ends[0] - ends[1]) / 2e-6
    return found


@pytest.mark.parametrize("name", BODIES)
def test_values_and_gradients(name):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {BODIES[name]}')
    onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {
        each.name: np.array(True)
        if each.type.tensor_type.elem_type == onnx.TensorProto.BOOL
        else rng.uniform(0.5, 1.5, [dim.dim_value for dim in each.type.tensor_type.shape.dim])
        for each in model.graph.input
    }
    reference = ReferenceEvaluator(model)
    wanted = reference.run(None, feeds)
    weights = [rng.normal(size=value.shape) for value in wanted]
    gradients = differences(lambda given: reference.run(None, given), feeds, weights)

    given = {k: torch.tensor(value, requires_grad=value.dtype == np.float64) for k, value in feeds.items()}
    outputs = exporter.load(model)(*given.values())
    sum((torch.tensor(w) * y).sum() for w, y in zip(weights, outputs, strict=True)).backward()
    for ours, theirs in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-12)
    for each, gradient in gradients.items():
        np.testing.assert_allclose(given[each].grad, gradient, rtol=1e-6, atol=1e-8, err_msg=each)

    graph = exporter.build_gradient_graph(model)
    names = [value.name for value in graph.graph.outputs]
    seeds = {
        value.name: weights[names.index(value.name.removesuffix("_grad"))] for value in graph.graph.inputs if value.name.endswith("_grad")
    }
    found = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString()).run(None, {**feeds, **seeds})
    for value, theirs in zip(found, wanted):
        np.testing.assert_allclose(value, theirs, rtol=1e-12)
    for each, value in zip(names[len(wanted) :], found[len(wanted) :], strict=True):
        np.testing.assert_allclose(value, gradients[each.removesuffix("_grad")], rtol=1e-6, atol=1e-8, err_msg=each)
