"""The gradient of a convolution of images of a few pixels (one product and a Col2Im), or of many with few channels (a Conv), beside PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import exporter

CASES = [
    ((2, 2), (3, 3), 1, (1, 1, 1, 1), 1),
    ((4, 4), (3, 3), 2, (1, 1, 1, 1), 1),
    ((5, 3), (3, 2), 2, (1, 0, 2, 1), 1),
    ((7, 7), (3, 3), 3, (0, 0, 0, 0), 1),
    ((7, 7), (2, 3), 3, (1, 1, 1, 1), 2),
    ((8, 8), (3, 3), 3, (0, 0, 0, 0), 1),  # two places that no window reaches
    ((1, 4), (3, 1), 1, (1, 0, 1, 0), 1),
    ((6,), (3,), 1, (1, 1), 1),
    ((9,), (4,), 2, (0, 1), 2),
    ((2, 3, 2), (3, 3, 1), 1, (1, 1, 0, 1, 1, 0), 1),
]


def gradients(size, kernel, stride, pads, dilation, *, channels=(64, 128), batch="n"):
    """The training graph of a Conv, and PyTorch's gradients of float64 beside those of onnxruntime."""
    torch.manual_seed(0)
    rank = len(size)
    x = torch.randn(3, channels[0], *size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(channels[1], channels[0], *kernel, dtype=torch.float64, requires_grad=True)
    conv = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[rank]
    around = [side for axis in reversed(range(rank)) for side in (pads[axis], pads[axis + rank])]
    y = conv(torch.nn.functional.pad(x, around), w, stride=stride, dilation=dilation)
    cotangent = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, w), cotangent)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=pads, strides=[stride] * rank, dilations=[dilation] * rank)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *t.shape[1:]] if name != "w" else t.shape)
        for name, t in (("x", x), ("w", w), ("y", y))
    ]
    graph = helper.make_graph([node], "g", infos[:2], infos[2:])
    training = exporter.build_gradient_graph(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), wrt=["x", "w"]
    )
    session = onnxruntime.InferenceSession(ir.to_proto(training).SerializeToString())
    given = [t.detach().numpy().astype(np.float32) for t in (x, w, cotangent)]
    feeds = dict(zip([value.name for value in session.get_inputs()], given, strict=True))
    found = session.run(None, feeds)[1:]
    for ours, reference in zip(ReferenceEvaluator(ir.to_proto(training)).run(None, feeds)[1:], found, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)
    return {node.op_type for node in training.graph}, found, [t.numpy() for t in expected]


@pytest.mark.parametrize("batch", ["n", 3])
@pytest.mark.parametrize(("size", "kernel", "stride", "pads", "dilation"), CASES, ids=str)
def test_images_of_a_few_pixels(size, kernel, stride, pads, dilation, batch):
    used, found, expected = gradients(size, kernel, stride, pads, dilation, batch=batch)
    many = 64 * 128 * np.prod(kernel) >= 2**16  # weights
    assert ("Col2Im" in used) == bool(many)
    assert ("ConvTranspose" in used) == (not many)
    assert batch == "n" or not used & {"Split", "Concat"}, "what windows see is smaller than the gradient, and is turned in its place"
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "more"),
    [((9, 9), {}), ((4, 4), {"channels": (8, 8)})],
    ids=["many pixels", "few weights"],
)
def test_others_are_transposed(size, more):
    used, found, expected = gradients(size, (3, 3), 1, (1, 1, 1, 1), 1, **more)
    assert "Col2Im" not in used
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", ["n", 3])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pads", "dilation", "channels", "turns"),
    [
        ((16, 17), (3, 3), 1, (1, 1, 1, 1), 1, (32, 32), True),
        ((16, 17), (3, 2), 1, (2, 0, 1, 1), 1, (5, 3), True),
        ((20, 20), (2, 3), 1, (1, 3, 2, 4), 2, (4, 4), True),
        ((300,), (4,), 1, (3, 0), 1, (8, 2), True),
        ((7, 8, 9), (3, 1, 2), 1, (1, 0, 0, 1, 0, 1), 1, (6, 6), True),
        ((17, 17), (3, 3), 1, (0, 0, 0, 0), 1, (4, 4), False),  # 225 pixels of the output
        ((16, 17), (3, 3), 1, (1, 1, 1, 1), 1, (4, 8), False),  # more channels to turn back than to read
        ((16, 17), (3, 3), 1, (3, 3, 3, 3), 1, (4, 4), False),  # padding beyond the kernel
        ((33, 33), (3, 3), 2, (1, 1, 1, 1), 1, (4, 4), False),
        ((16, 16), (1, 1), 1, (0, 0, 0, 0), 1, (4, 4), False),
    ],
    ids=str,
)
def test_many_pixels_and_few_channels(size, kernel, stride, pads, dilation, channels, turns, batch):
    used, found, expected = gradients(size, kernel, stride, pads, dilation, channels=channels, batch=batch)
    assert ("ConvTranspose" in used) == (not turns)
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("batch", "samples"), [("n", 3), ("n", 0), (0, 0)])
def test_no_convolution_without_channels(batch, samples):
    """The gradient for the weights has the samples in the place of channels. Of none onnxruntime's Conv may not end, and else writes nothing."""
    groups, stride, dilation = 4, 2, 2
    x = torch.randn(samples, groups, 12, 12, requires_grad=True)
    w = torch.randn(groups, 1, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, stride=stride, dilation=dilation, padding=1, groups=groups)
    expected = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4, strides=[stride] * 2, dilations=[dilation] * 2, group=groups)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *t.shape[1:]] if name != "w" else t.shape)
        for name, t in (("x", x), ("w", w), ("y", y))
    ]
    model = helper.make_model(
        helper.make_graph([node], "g", infos[:2], infos[2:]), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    proto = onnx.inliner.inline_local_functions(ir.to_proto(exporter.build_gradient_graph(model, wrt=["x", "w"])))
    read = {name for node in proto.graph.node if node.op_type == "Conv" for name in node.input[:2]} - {"x", "w"}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(read))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    found = session.run(None, {"x": x.detach().numpy(), "w": w.detach().numpy(), "y_grad": np.ones(y.shape, np.float32)})
    for ours, reference in zip(found[1:3], expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)
    assert all(array.shape[1] for array in found[3:])
    assert bool(read) == (batch == "n")
