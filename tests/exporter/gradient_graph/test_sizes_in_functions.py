"""Names of sizes in ONNX functions: one function is called at several sizes in one graph, where a name is one size."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import exporter


class Mix(torch.autograd.Function):
    """A sum over time, whose translation has sizes that are products of others."""

    @staticmethod
    def forward(ctx, x):
        return torch.einsum("ts,bsf->btf", torch.ones(x.shape[1], x.shape[1]), x)

    @staticmethod
    def backward(ctx, g):
        return torch.einsum("ts,btf->bsf", torch.ones(g.shape[1], g.shape[1]), g)


class Two(nn.Module):
    """Called at 6 and at 4 features."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(6, 4)

    def forward(self, x):
        y = Mix.apply(self.between(Mix.apply(x)))
        return y * y


def exported(dynamo):
    torch.manual_seed(0)
    model, sizes = Two(), {"x": {0: "batch", 1: "time"}}
    program = exporter.export(
        model, (torch.randn(3, 7, 6),), portable=[Mix], dynamo=dynamo, dynamic_shapes=sizes, input_names=["x"], output_names=["y"]
    )
    return model, program.model_proto


def second_order(proto, x):
    first = exporter.build_gradient_graph(proto, wrt=["x"])
    second = exporter.build_gradient_graph(first, wrt=["x"], outputs=["x_grad"])
    name = json.loads(second.metadata_props["pythonop.gradients"])
    seed = name["inputs"]["x_grad"]
    feeds = {"x": x.numpy(), "y_grad": np.ones((*x.shape[:2], 4), np.float32), seed: x.numpy()}
    session = exporter.inference_session(second)
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))[name["outputs"]["x"]]


def of_eager(model, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient, x, x.detach())[0].numpy()


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_a_function_that_is_called_at_two_sizes_has_second_derivatives(dynamo):
    model, proto = exported(dynamo)
    named = [dim.dim_param for f in proto.functions for value in f.value_info for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    assert named == []
    for shape in ((3, 7, 6), (1, 1, 6), (2, 9, 6)):
        x = torch.randn(shape)
        np.testing.assert_allclose(second_order(proto, x), of_eager(model, x), rtol=1e-4, atol=1e-4)


def test_a_file_of_an_earlier_release_has_names_there():
    """They are taken for nothing: here all are one, which onnxruntime would believe of two sizes."""
    model, proto = exported(False)
    for function in proto.functions:
        for value in function.value_info:
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value"):
                    dim.dim_param = "s"
    assert any(dim.dim_param for f in proto.functions for v in f.value_info for dim in v.type.tensor_type.shape.dim)
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    x = torch.randn(3, 7, 6)
    np.testing.assert_allclose(second_order(proto, x), of_eager(model, x), rtol=1e-4, atol=1e-4)
