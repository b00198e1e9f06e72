"""Named gradients: one call in the file, standard operators in its body, and claimed by name when a session is opened."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.claims import ConvWeight, claim
from symbolics.graph.named import name_of_call
from symbolics.graph.walk import walk
from symbolics.node.names import GRADIENT_DOMAIN

KINDS = {
    "1 axis": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (2, 3, 9)),
    "2 axes": (nn.Conv2d(3, 4, (3, 2), dilation=(1, 2), padding=1), (2, 3, 7, 8)),
    "3 axes": (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 4)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 6)),
    "places left over": (nn.Conv2d(2, 3, 3, stride=3), (2, 2, 7, 8)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 4, 4)),
}


def graph_of(module, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exporter.build_gradient_graph(exporter.export(module, (x,), **options))


def calls(model):
    return [node for node in walk(model.graph) if node.domain == GRADIENT_DOMAIN]


def gradients(model, x, g):
    """By stock onnxruntime, which knows nothing of the domain."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    given, cotangent = (value.name for value in session.get_inputs())
    outputs = [value.name for value in session.get_outputs()]
    return dict(zip(outputs, session.run(None, {given: x.numpy(), cotangent: g.numpy()}), strict=True))


def torchs(module, x, g):
    """Weight gradients in float64, beside the module."""
    exact = type(module).__call__
    module = module.double()
    module.zero_grad()
    exact(module, x.double()).backward(g.double())
    found = {name: parameter.grad.numpy().copy() for name, parameter in module.named_parameters()}
    module.float()
    return found


@pytest.mark.parametrize("size", ["known", "open"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_one_node_of_standard_operators(kind, size):
    module, shape = KINDS[kind]
    x = torch.randn(shape)
    model = graph_of(module, x, **({"dynamic_shapes": ({0: torch.export.Dim("n")},)} if size == "open" else {}))
    (call,) = calls(model)
    assert name_of_call(call) == "ConvWeight"
    body = model.functions[call.op_identifier()]
    assert {node.domain for node in walk(body)} == {""}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for batch in (shape[0], 3) if size == "open" else shape[:1]:
        x = torch.randn(batch, *shape[1:])
        g = torch.randn_like(module(x))
        found = gradients(model, x, g)
        for name, expected in torchs(module, x, g).items():
            np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("claimed", [True, False])
def test_it_says_what_it_computes(claimed):
    """Who claims it finds the geometry of the convolution; who does not gets the nodes of its body."""
    module, x = nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0)), torch.randn(2, 3, 7, 8)
    model, seen = graph_of(module, x), []
    g = torch.randn_like(module(x))

    def zeros(op, node, facts):
        seen.append(ConvWeight.of(node, facts))
        return [op.Expand(op.constant(0.0, ir.DataType.FLOAT), op.i64([4, 3, 3, 2]))] if claimed else None

    assert claim(model, {"ConvWeight": zeros}) == int(claimed)
    assert not calls(model) and not model.functions and GRADIENT_DOMAIN not in model.graph.opset_imports
    (found,) = seen
    assert found[2:] == ((2, 3, 7, 8), (2, 4, 4, 6), (3, 2), (2, 1), (1, 2), (1, 0), (1, 0), 1, ir.DataType.FLOAT)
    expected = torchs(module, x, g)["weight"] * (not claimed)
    np.testing.assert_allclose(gradients(model, x, g)["weight_grad"], expected, rtol=1e-4, atol=1e-4)


def test_equal_convolutions_share_a_function_and_others_have_their_own():
    model = graph_of(
        nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)), nn.Conv2d(3, 3, 5, padding=2)), torch.randn(1, 3, 6, 6)
    )
    assert sorted(node.op_type for node in calls(model)) == ["ConvWeight", *["ConvWeight_2"] * 3]  # the last convolution's comes first
    assert len(model.functions) == 2 and {name_of_call(node) for node in calls(model)} == {"ConvWeight"}


class Pools(nn.Module):
    """Two pools whose results have one size, and which read others."""

    def forward(self, x):
        y = nn.functional.max_pool2d(x, 3, 2, 1)
        return nn.functional.max_pool2d(y.sin(), 3, 1, 1) * y


def test_calls_whose_results_have_other_sizes_share_no_function():
    module, x = Pools(), torch.randn(2, 3, 14, 14, requires_grad=True)
    model = exporter.build_gradient_graph(exporter.export(module, (x.detach(),)), wrt=["x"])
    assert {node.op_type: [*node.outputs[0].shape] for node in calls(model)} == {
        "MaxPoolGrad": [2, 3, 7, 7], "MaxPoolGrad_2": [2, 3, 14, 14],
    }  # fmt: skip
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    y = module(x)
    g = torch.randn_like(y)
    y.backward(g)
    np.testing.assert_allclose(gradients(model, x.detach(), g)["x_grad"], x.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_gradients_of_gradients_are_those_of_the_body(dynamo):
    """A graph with calls in it is differentiated again, and names of its functions are not taken twice."""
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)), torch.randn(2, 3, 7, 7)
    first = graph_of(module, x, dynamo=dynamo)
    of = next(value.name for value in first.graph.outputs if value.name == "0.weight_grad")
    second = exporter.build_gradient_graph(first, wrt=["0.weight", "2.weight"], outputs=[of])
    session = onnxruntime.InferenceSession(ir.to_proto(second).SerializeToString(), providers=["CPUExecutionProvider"])
    exact, image = module.double(), x.double()
    y = exact(image)
    g = torch.randn_like(y)
    weights = [exact[0].weight, exact[2].weight]
    (slope,) = torch.autograd.grad(y, weights[:1], g, create_graph=True)
    v = torch.randn_like(slope)
    expected = torch.autograd.grad(slope, weights, v)
    inputs = [value.name for value in session.get_inputs()]
    feeds = dict(zip(inputs, (array.float().numpy() for array in (image, g, v)), strict=True))
    outputs = [value.name for value in session.get_outputs()]
    found = dict(zip(outputs, session.run(None, feeds), strict=True))
    for name, wanted in zip(("0.weight", "2.weight"), expected, strict=True):
        gradient = [array for key, array in found.items() if key.startswith(name) and array.shape == wanted.shape][-1]
        np.testing.assert_allclose(gradient, wanted.numpy(), rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


BAD = {
    "no kernel": {"kernel_shape": None},
    "another rank": {"strides": [1]},
    "zero": {"dilations": [0, 1]},
    "a number": {"kernel_shape": 3},
    "three pads": {"pads": [0, 0, 0]},
    "two groups": {"group": [1, 1]},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_call_that_a_file_says_wrong_is_nobodys(change):
    model = graph_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 7, 8))
    (call,) = calls(model)
    for name, value in change.items():
        call.attributes.pop(name)
        if value is not None:
            call.attributes.add(ir.convenience.convert_attribute(name, value))
    assert ConvWeight.of(call, {}) is None


def test_a_call_of_no_function_of_the_file_is_left_to_onnxruntime():
    model = graph_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 7, 8))
    model.functions.clear()
    assert claim(model, {}) == 0
    with pytest.raises(exporter.PythonopError, match="pythonop.grad"):
        exporter.inference_session(ir.to_proto(model))


class Slope(nn.Module):
    """A forward that takes a gradient for weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        (slope,) = torch.autograd.grad(self.conv(x).sin().sum(), self.conv.weight, create_graph=True)
        return slope


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_a_forward_has_nodes_and_no_functions(dynamo):
    """It goes to tools that know no functions."""
    module, x = Slope(), torch.randn(2, 3, 7, 8)
    program = exporter.export(module, (x,), dynamo=dynamo)
    assert not program.model.functions and {node.domain for node in program.model.graph} == {""}
    (found,) = exporter.inference_session(program).run(None, {program.model.graph.inputs[0].name: x.numpy()})
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-4)
