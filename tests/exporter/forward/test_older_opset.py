"""Portable Functions in files of opsets before 18: their bodies are of the file's opset, or they stay PythonOps with the way out."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.autograd import Function

import exporter
from exporter.forward.older_opset import lower
from symbolics.errors import ExportError, PythonopWarning
from symbolics.node.names import PORTABLE_DOMAIN
from tests.exporter.forward.test_portable import check
from tests.support import Calls, nodes
from tests.zoo.hiding import Recomputes


class Centred(Function):
    """Its backward takes a mean: the axes of a ReduceMean are an attribute before opset 18."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x - (x * x).mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * (g - g.mean(-1, keepdim=True))


class Smooth(Function):
    """Its Mish is of opset 18."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return nn.functional.mish(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize("opset", [13, 16, 17])
def test_the_bodies_are_of_the_file_s_opset(opset):
    program = check(Calls(lambda x: Centred.apply(x * 2)), (torch.randn(3, 4),), False, opset_version=opset)
    assert {function.opset_imports[""] for function in program.model.functions.values() if function.domain == PORTABLE_DOMAIN} == {opset}


def test_a_module_that_is_computed_again():
    """Its AvgPool's gradient splits a tensor into equal parts, whose number newer opsets have to say."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2), nn.SiLU(), nn.AvgPool2d((1, 3)))

        def forward(self, x):
            return Recomputes.apply(x * 2, self.inner)

    check(Model(), (torch.randn(1, 2, 6),), False, opset_version=17)


@pytest.mark.parametrize(("opset", "says"), [(13, "opset 13 has no Mish"), (11, "in opset 13 or newer, and the file is of 11")])
def test_what_an_old_opset_has_not_stays_a_PythonOp(opset, says):
    model, x = Calls(lambda x: Smooth.apply(x * 2)), torch.randn(3, 4)
    with pytest.warns(PythonopWarning, match=rf"Smooth.*stays a PythonOp.*{says}.*opset_version=18"):
        program = exporter.export(model, (x,), dynamo=False, opset_version=opset, portable=True)
    assert nodes(program.model, "PythonOp")
    if opset == 13:
        with pytest.raises(ExportError, match=says):
            exporter.export(model, (x,), dynamo=False, opset_version=opset, portable=["*:Smooth"])


def lowered(body: str, opset: int, inputs: str = "float[4,6] x", weights: str = "") -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => (float[N,M] y) {weights} {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    lower(model, opset)
    return model


@pytest.mark.parametrize(
    ("body", "inputs", "weights"),
    [
        ("y = ReduceMean <noop_with_empty_axes = 0> (x)", "float[4,6] x", ""),
        ("y = ReduceMax <noop_with_empty_axes = 1> (x, axes)", "float[4,6] x", "<int64[0] axes = {}>"),
        ("y = ReduceProd (x, axes)", "float[4,6] x", "<int64[1] axes = {-1}>"),
        ("y = Reshape <allowzero = 1> (x, sizes)", "float[4,6] x", "<int64[2] sizes = {3, -1}>"),
        ("y, z = Split <axis = 1, num_outputs = 2> (x)", "float[4,6] x", ""),
        ('y = ScatterElements <reduction = "none"> (x, i, u)', "float[4,6] x, int64[1,6] i, float[1,6] u", ""),
    ],
)
def test_what_means_the_same_in_an_old_opset(body, inputs, weights):
    onnx.checker.check_model(ir.to_proto(lowered(body, 13, inputs, weights)), full_check=True)


@pytest.mark.parametrize(
    ("body", "says", "inputs", "weights"),
    [
        ("y = ReduceMean (x, axes)", "no ReduceMean along axes that are computed", "float[4,6] x, int64[1] axes", ""),
        ("y = Reshape <allowzero = 1> (x, sizes)", "no Reshape with allowzero=1", "float[4,6] x, int64[2] sizes", ""),
        ("y, z, w = Split <axis = 0, num_outputs = 3> (x)", "no Split with num_outputs=3", "float[4,6] x", ""),
        ('y = ScatterElements <reduction = "max"> (x, i, u)', "no ScatterElements with reduction=max", "float[4,6] x, int64[1,6] i, float[1,6] u", ""),
        ("y = Pad (x, pads, , axes)", "no Pad with axes", "float[4,6] x", "<int64[2] pads = {1, 1}, int64[1] axes = {1}>"),
        ("y = Add (x, x)", "no Add of INT8", "int8[4,6] x", ""),
        ("y = Trilu (x)", "no Trilu:", "float[4,6] x", ""),
        ("y = RoiAlign (a, b, c)", "no RoiAlign:", "float[1,1,4,6] a, float[1,4] b, int64[1] c", ""),
    ],
)  # fmt: skip
def test_what_an_old_opset_cannot_say(body, says, inputs, weights):
    with pytest.raises(ValueError, match=rf"opset 13 has {says}"):
        lowered(body, 13, inputs, weights)


def test_a_reduction_of_words_that_came_later():
    with pytest.raises(ValueError, match="opset 17 has no ScatterElements with the reduction 'max'"):
        lowered('y = ScatterElements <reduction = "max"> (x, i, u)', 17, "float[4,6] x, int64[1,6] i, float[1,6] u")
