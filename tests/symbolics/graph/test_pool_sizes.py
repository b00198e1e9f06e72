"""Sizes of pools with ceil_mode: those that torch and onnxruntime compute, in the inference of shapes and in what follows from it."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from exporter.runtime.facts import inferred_graph
from symbolics.graph.pool_sizes import infer_proto


class Pools(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def model_of(body, length="7"):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g (float[2,3,{length}] x) => (float[a,b,c] y) {{ {body} }}')


def pool(name="MaxPool", given="x", result="y", kernel=2, step=2, pad=1, more=""):
    return f"{result} = {name}<ceil_mode = 1, kernel_shape = [{kernel}], strides = [{step}], pads = [{pad}, {pad}]{more}>({given})"


def sizes(graph):
    return {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.output)}


@pytest.mark.parametrize(("kernel", "step", "pad"), [(2, 2, 1), (2, 3, 0), (2, 3, 1), (3, 2, 1), (4, 3, 2), (1, 3, 0)])
def test_every_length_has_torch_s_size(kernel, step, pad):
    for length, name in itertools.product(range(4, 14), ("MaxPool", "AveragePool", "LpPool")):
        wanted = functional.max_pool1d(torch.zeros(2, 3, length), kernel, step, pad, ceil_mode=True).shape
        model = model_of(pool(name, kernel=kernel, step=step, pad=pad), str(length))
        assert sizes(infer_proto(model).graph)["y"] == list(wanted), (name, length)


def test_what_follows_has_the_size_too():
    model = model_of(f"{pool(result='a')} b = Relu(a) {pool('AveragePool', 'b', 'c')} y = Relu(c)")
    found = {name: shape[2] for name, shape in sizes(infer_proto(model).graph).items()}
    assert found == {"a": 4, "b": 4, "c": 3, "y": 3}
    assert sizes(inferred_graph(ir.from_proto(model)))["y"] == [2, 3, 3]


@pytest.mark.parametrize(
    ("equation", "size"), [("ij,ij->ij", [2, 3]), ("ij,ij", []), ("...i,...i->i...", [3, 2]), ("ij,kl->kjil", [2, 3, 1, 1])]
)
def test_einsums_that_stretch(equation, size):
    text = f'float[1,3] a, float[2,1] b) => (float{[*"xyzw"[: len(size)]]} y) {{ y = Einsum<equation = "{equation}">(a, b) }}'.replace(
        "'", ""
    )
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> g (' + text)
    assert sizes(infer_proto(model).graph)["y"] == size


def test_open_and_damaged_ones_are_onnx_s():
    assert sizes(infer_proto(model_of(pool(), "n")).graph) == sizes(onnx.shape_inference.infer_shapes(model_of(pool(), "n")).graph)
    infer_proto(model_of("y = MaxPool<ceil_mode = 1, kernel_shape = [2], strides = [0], pads = [1]>(x)"))
    infer_proto(model_of("y = MaxPool<ceil_mode = 1>(x)"))


def test_the_gradient_of_a_file():
    model = ir.from_proto(model_of(pool()))
    graph = build_gradient_graph(model)
    x = np.random.default_rng(0).standard_normal((2, 3, 7), np.float32)
    session = exporter.inference_session(graph)
    feeds = {"x": x, "y_grad": np.ones((2, 3, 4), np.float32)}
    (found,) = session.run(["x_grad"], {v.name: feeds[v.name] for v in session.get_inputs()})
    given = torch.tensor(x, requires_grad=True)
    functional.max_pool1d(given, 2, 2, 1, ceil_mode=True).sum().backward()
    np.testing.assert_allclose(found, given.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("open_", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.max_pool1d(x, 2, 2, 1, ceil_mode=True),
        lambda x: functional.avg_pool1d(x, 2, 3, 1, ceil_mode=True),
        lambda x: functional.avg_pool1d(x, 2, 2, 1, ceil_mode=True, count_include_pad=False) * 2,
        lambda x: functional.lp_pool1d(x, 2, 2, 3, ceil_mode=True),
        lambda x: functional.max_pool1d(functional.max_pool1d(x, 2, 2, 1, ceil_mode=True).sin(), 2, 2, 1, ceil_mode=True).flatten(1),
    ],
    ids=["max", "avg", "avg-without-border", "lp", "two"],
)
def test_exports_equal_eager(function, open_, dynamo):
    model, options = Pools(function), {"dynamic_shapes": {"x": {2: torch.export.Dim("n", min=4)}}} if open_ and not dynamo else {}
    program = exporter.export(model, (torch.rand(2, 3, 7) + 0.5,), dynamo=dynamo, **options)
    loaded = exporter.load(program)
    for length in (7, 8, 9, 10, 13) if options else (7,):
        x = torch.rand(2, 3, length) + 0.5
        x.requires_grad_()
        ours, theirs = ((y := each(x), *torch.autograd.grad(y.square().sum(), x)) for each in (loaded, model))
        torch.testing.assert_close(ours, theirs)
    if not options:
        assert list(program.model.graph.outputs[0].shape) == list(theirs[0].shape)
