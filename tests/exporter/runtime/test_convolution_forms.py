"""Gradients of convolutions for weights in the forms of other providers: those of eager, on the CPU, where the forms are put in."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.convolution_forms import weights_of_convolutions
from exporter.runtime.provider_forms import write_forms

# name -> image, channels behind it, options; and whether the form is there
DENSE = {
    "plain": ((2, 24, 9, 8), 5, {"kernel_size": 3, "padding": 1}, 1),
    "strides and places left over": ((2, 24, 18, 17), 5, {"kernel_size": 3, "stride": 2, "padding": 1}, 1),
    "strides and nothing around": ((2, 24, 20, 19), 5, {"kernel_size": (2, 3), "stride": (2, 2)}, 1),
    "dilations": ((3, 25, 13, 12), 4, {"kernel_size": (3, 2), "dilation": (2, 3), "padding": (2, 1)}, 1),
    "small images": ((2, 24, 4, 4), 5, {"kernel_size": 3, "padding": 1}, 0),
    "few channels": ((2, 3, 12, 12), 5, {"kernel_size": 3, "padding": 1}, 0),
}
DEPTHWISE = {
    "plain": ((2, 6, 9, 10), 6, {"kernel_size": 3, "padding": 1, "groups": 6}, 1),
    "large kernels": ((2, 4, 9, 8), 4, {"kernel_size": (7, 5), "padding": (3, 2), "groups": 4}, 1),
    "dilations": ((2, 4, 10, 11), 4, {"kernel_size": (2, 3), "dilation": (2, 3), "padding": 2, "groups": 4}, 1),
    "strides": ((2, 4, 16, 16), 4, {"kernel_size": 3, "stride": 2, "groups": 4}, 0),
    "two channels a group": ((2, 6, 9, 9), 6, {"kernel_size": 3, "groups": 3}, 0),
    "small images": ((2, 6, 4, 4), 6, {"kernel_size": 3, "padding": 1, "groups": 6}, 0),
}
ROWS = [*DENSE.values(), *DEPTHWISE.values()]


@pytest.mark.parametrize(("shape", "results", "options", "many"), ROWS, ids=[*DENSE, *(f"depthwise, {name}" for name in DEPTHWISE)])
def test_a_gradient_is_eagers(shape, results, options, many):
    torch.manual_seed(0)
    module, x = nn.Conv2d(shape[1], results, bias=False, **options), torch.randn(shape)
    model = exporter.build_gradient_graph(exporter.export(module, (x,), dynamo=False), wrt=["weight"])
    assert weights_of_convolutions(model) == many
    assert weights_of_convolutions(model) == 0 and not model.functions
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    image, exact = x.double(), module.double()
    y = exact(image)
    g = torch.randn(y.shape)
    y.backward(g.double())
    inputs, (output,) = (
        [value.name for value in session.get_inputs()],
        [v.name for v in session.get_outputs() if v.name.startswith("weight")],
    )
    found = session.run([output], dict(zip(inputs, (x.numpy(), g.numpy()), strict=True)))[0]
    expected = exact.weight.grad.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_on_the_cpu_they_are_not_put_in():
    model = exporter.build_gradient_graph(exporter.export(nn.Conv2d(24, 5, 3), (torch.randn(2, 24, 10, 10),), dynamo=False))
    assert not write_forms([], model)
    assert write_forms(["openvino"], model)


def test_an_open_batch_stays_as_it_is():
    """Of no samples, a Conv of no channels is no gradient."""
    batch = {0: torch.export.Dim("batch")}
    program = exporter.export(nn.Conv2d(24, 5, 3), (torch.randn(2, 24, 10, 10),), dynamic_shapes=(batch,))
    assert weights_of_convolutions(exporter.build_gradient_graph(program)) == 0
