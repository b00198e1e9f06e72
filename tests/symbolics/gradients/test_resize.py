"""The gradient of a Resize that keeps the aspect ratio: beside the outputs of onnxruntime for each element alone."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from exporter.gradient_graph.build import build_gradient_graph

POLICIES = ("not_larger", "not_smaller")
SHAPES = [((6, 5), (3, 8)), ((6, 5), (9, 4)), ((7, 5), (4, 11)), ((4, 4), (8, 6)), ((5, 6), (5, 9))]


def check(text: str, shape: tuple[int, ...], **more: np.ndarray) -> None:
    """J^T g, of as many cotangents as there are outputs."""
    model = onnx.parser.parse_model(text)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    forward, backward = (
        onnxruntime.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for m in (model, ir.to_proto(build_gradient_graph(model, wrt=["x"])))
    )
    count = int(np.prod(shape))
    rows = [forward.run(None, {"x": row.reshape(shape), **more})[0] for row in np.eye(count, dtype=np.float32)]
    jacobian = np.stack([row.ravel() for row in rows])
    g = np.random.default_rng(0).standard_normal(rows[0].shape, np.float32)
    y, dx = backward.run(["y", "x_grad"], {"x": np.zeros(shape, np.float32), "y_grad": g, **more})
    assert y.shape == g.shape
    np.testing.assert_allclose(dx.ravel(), jacobian @ g.ravel(), rtol=1e-4, atol=1e-5)


def text(policy: str, mode: str, inputs: str, sizes: tuple[int, ...], *, axes: str = "2, 3", more: str = "", opset: int = 20) -> str:
    weight = f"int64[{len(sizes)}] z = {{{', '.join(map(str, sizes))}}}" if sizes else ""
    resize = f'Resize<mode = "{mode}", axes = [{axes}], keep_aspect_ratio_policy = "{policy}"{more}>'
    return f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => (float y) <{weight}> {{ y = {resize}(x, , , z) }}'


@pytest.mark.parametrize(("policy", "mode"), list(itertools.product(POLICIES, ("linear", "nearest", "cubic"))))
@pytest.mark.parametrize(("size", "sizes"), SHAPES)
def test_one_scale_for_all_axes(policy, mode, size, sizes):
    check(text(policy, mode, f"float[1,1,{size[0]},{size[1]}] x", sizes), (1, 1, *size))


@pytest.mark.parametrize("where", ["align_corners", "asymmetric", "half_pixel_symmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize(("policy", "mode"), list(itertools.product(POLICIES, ("linear", "nearest", "cubic"))))
def test_the_places_of_pixels(policy, mode, where):
    check(text(policy, mode, "float[1,1,7,5] x", (4, 11), more=f', coordinate_transformation_mode = "{where}"'), (1, 1, 7, 5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("more", [", antialias = 1", ", exclude_outside = 1"])
def test_filters(policy, mode, more):
    if "exclude" not in more or mode == "cubic":
        check(text(policy, mode, "float[1,1,7,5] x", (4, 3), more=more), (1, 1, 7, 5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("axes", ["3, 2", "3"])
def test_axes(policy, axes):
    sizes = (3, 8)[: axes.count(",") + 1]
    check(text(policy, "linear", "float[2,1,6,5] x", sizes, axes=axes, opset=18), (2, 1, 6, 5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_sizes_that_are_known_when_it_runs(policy, mode):
    check(text(policy, mode, "float[1,1,h,w] x", (4, 11)), (1, 1, 7, 5))
    check(text(policy, mode, "float[1,1,h,w] x, int64[2] z", ()), (1, 1, 7, 5), z=np.array([4, 11]))
    check(text(policy, mode, "float[1,1,7,5] x, int64[2] z", ()), (1, 1, 7, 5), z=np.array([4, 11]))


def test_three_axes():
    check(text("not_larger", "nearest", "float[1,1,3,4,5] x", (5, 9, 4), axes="2, 3, 4"), (1, 1, 3, 4, 5))
    check(text("not_smaller", "nearest", "float[1,1,3,4,c] x", (5, 9, 4), axes="2, 3, 4"), (1, 1, 3, 4, 5))
