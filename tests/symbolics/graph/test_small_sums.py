"""Sums between other axes, and products that are spelled out: numpy's numbers in float64, and the operators that they are written with."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper

import exporter
from symbolics.graph.slow_operators import rewrite_slow_operators

_KINDS = {"float32": 1, "float64": 11, "float16": 10}


def _model(nodes, inputs, dtype="float32", outputs=("y",)):
    given = [helper.make_tensor_value_info(name, _KINDS[dtype], shape) for name, shape in inputs.items()]
    found = [helper.make_tensor_value_info(name, 7 if name.startswith("shape") else _KINDS[dtype], None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, found)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _sum(source, axes, keepdims, operator="ReduceSum"):
    constant = helper.make_tensor("", 7, [len(axes)], axes)
    return [
        helper.make_node("Constant", [], ["axes"], value=constant),
        helper.make_node(operator, [source, "axes"], ["y"], keepdims=keepdims),
    ]


def _run(model, **arrays):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, arrays)


def _operators(model):
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


def _array(*shape, dtype="float32"):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(("operator", "wanted"), [("ReduceSum", np.sum), ("ReduceMean", np.mean)])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("declared", "size", "axes", "operators"),
    [
        (["n", 4, 1], 7, [1], {0: ["S", "Unsqueeze"], 1: ["S"]}),
        (["n", 4, 1], 0, [-2], {0: ["S", "Unsqueeze"], 1: ["S"]}),
        (["n", 5, 4, 1, 1], 3, [1, 2], {0: ["S", "Unsqueeze"], 1: ["S"]}),
        ([9, "n", 1], 2, [1], {0: ["S", "Unsqueeze"], 1: ["S"]}),
        (["n", 16, 3, 3], 5, [2], {0: ["Unsqueeze", "S"], 1: ["Unsqueeze", "S", "Squeeze"]}),
        ([70, 2, 2, 4], None, [2, 1], {0: ["Unsqueeze", "S"], 1: ["Unsqueeze", "S", "Squeeze"]}),
        (["n", 3, 3], 0, [1], {0: ["Unsqueeze", "S"], 1: ["Unsqueeze", "S", "Squeeze"]}),
        (["n", 16, 3, 3], 5, [1], {0: ["S"], 1: ["S"]}),  # 48 numbers: a product of matrices is as quick
        ([10, 3, 3], None, [1], {0: ["S"], 1: ["S"]}),  # ten matrices
        (["n", 3, 3], 6, [0], {0: ["S"], 1: ["S"]}),
        (["n", 3, 3], 6, [2], {0: ["S"], 1: ["S"]}),
        (["n", 3, 2, 3], 6, [1, 3], {0: ["S"], 1: ["S"]}),
        (["n", 3, "m"], 6, [1], {0: ["S"], 1: ["S"]}),
    ],
)
def test_sums_between_axes(operator, wanted, keepdims, declared, size, axes, operators):
    model = _model(_sum("x", axes, keepdims, operator), {"x": declared})
    rewrite_slow_operators(model)
    assert _operators(model) == [operator if name == "S" else name for name in operators[keepdims]]
    x = _array(*(dim if isinstance(dim, int) else size for dim in declared))
    (found,) = _run(model, x=x)
    expected = wanted(x.astype(np.float64), axis=tuple(axes), keepdims=bool(keepdims))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_halves_and_what_axes_nobody_knows_stay():
    model = _model(_sum("x", [1], 0), {"x": ["n", 3, 1]}, "float16")
    assert rewrite_slow_operators(model) == 0
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", 3, 1]), helper.make_tensor_value_info("axes", 7, [1])],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert rewrite_slow_operators(model) == 0


# ------------------------------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("a", "b", "axes"),
    [
        (["n", 16, 4, 4, 1], [16, 4, 4, 4], [2, 3]),
        ([16, 4, 4, 4], ["n", 16, 4, 4, 1], [2, 3]),
        (["n", 8, 1, 1, 4], [8, 4, 4, 4], [4]),
        (["n", 8, 1, 5], ["n", 1, 7, 5], [3]),
        (["n", 8, 5, 1], ["n", 1, 5, 7], [2]),
        (["n", 8, 5, 1], [5, 7], [-2]),
        ([6, 8, "n", 1], ["n", 7], [2]),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_product_that_is_spelled_out(a, b, axes, keepdims, dtype, size):
    model = _model([helper.make_node("Mul", ["a", "b"], ["x"]), *_sum("x", axes, keepdims)], {"a": a, "b": b}, dtype)
    rewrite_slow_operators(model)
    assert "MatMul" in _operators(model) and "Mul" not in _operators(model)
    x, y = (_array(*(dim if isinstance(dim, int) else size for dim in shape), dtype=dtype) for shape in (a, b))
    (found,) = _run(model, a=x, b=y)
    expected = (x.astype(np.float64) * y).sum(axis=tuple(axes), keepdims=bool(keepdims))
    assert found.shape == expected.shape and found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "axes"),
    [
        (["n", 16, 64], ["n", 16, 64], [2]),  # nothing is stretched
        (["n", 16, 64], [64], [0]),
        (["n", 16, 4, 1], [4], [2]),  # summed in one operand alone
        (["n", 8, "m", 1], ["k", 7], [2]),  # m or k may be 1
        (["n", 8, 1, 5], ["n", 1, 7, 5], []),
        ([2, 3, 1, 5], [2, 1, 3, 5], [3]),  # tiny
    ],
)
def test_products_that_stay(a, b, axes):
    nodes = [helper.make_node("Mul", ["a", "b"], ["x"]), *_sum("x", axes, 0)]
    model = _model(nodes, {"a": a, "b": b})
    rewrite_slow_operators(model)
    assert "Mul" in _operators(model) and "MatMul" not in _operators(model)


@pytest.mark.parametrize("reader", ["output", "another"])
def test_a_product_that_is_read_elsewhere_stays(reader):
    nodes = [helper.make_node("Mul", ["a", "b"], ["x"]), *_sum("x", [3], 0)]
    if reader == "another":
        nodes.append(helper.make_node("Neg", ["x"], ["z"]))
    model = _model(nodes, {"a": ["n", 8, 1, 5], "b": ["n", 1, 7, 5]}, outputs=("y", "x" if reader == "output" else "z"))
    assert rewrite_slow_operators(model) == 0


@pytest.mark.parametrize("first", ["Shape", "ReduceSum"])
def test_its_shape_comes_from_the_operands(first):
    nodes = _sum("x", [3], 0)
    shape = [helper.make_node("Shape", ["x"], ["shape"])]
    nodes = [helper.make_node("Mul", ["a", "b"], ["x"]), *(shape + nodes if first == "Shape" else nodes + shape)]
    model = _model(nodes, {"a": ["n", 8, 1, 5], "b": ["n", 1, 7, 5]}, outputs=("y", "shape"))
    rewrite_slow_operators(model)
    assert "Mul" not in _operators(model)
    for size in (0, 1, 6):
        found, sizes = _run(model, a=_array(size, 8, 1, 5), b=_array(size, 1, 7, 5))
        assert found.shape == (size, 8, 7) and sizes.tolist() == [size, 8, 7, 5]


def test_a_shape_stays_where_nobody_knows_which_operand_is_stretched():
    nodes = [helper.make_node("Mul", ["a", "b"], ["x"]), helper.make_node("Shape", ["x"], ["shape"])]
    model = _model(nodes, {"a": ["n", 3], "b": ["m", 1]}, outputs=("shape",))
    assert rewrite_slow_operators(model) == 0
    assert _run(model, a=_array(1, 3), b=_array(5, 1))[0].tolist() == [5, 3]


@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize(("axes_of_b", "gone"), [([8, 5, 6], True), ([1, 5, 6], False)])
def test_before_an_expand(axes_of_b, gone, size):
    """The other operand has the axes that it stretches; where it has not, the Expand says how long they are."""
    sizes = helper.make_tensor("sizes", 7, [4], [1, 8, 5, 1])
    nodes = [
        helper.make_node("Constant", [], ["sizes"], value=sizes),
        helper.make_node("Expand", ["a", "sizes"], ["wide"]),
        helper.make_node("Mul", ["wide", "b"], ["x"]),
        *_sum("x", [3], 0),
    ]
    model = _model(nodes, {"a": ["n", 1, 1, 6], "b": axes_of_b})
    rewrite_slow_operators(model)
    assert "MatMul" in _operators(model) or not gone
    assert ("Expand" not in _operators(model)) == gone
    a, b = _array(size, 1, 1, 6), _array(*axes_of_b)
    (found,) = _run(model, a=a, b=b)
    expected = (np.broadcast_to(a, (size, 8, 5, 6)).astype(np.float64) * b).sum(3)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class Spelled(torch.nn.Module):
    """Two contractions as packages spell them, one within a gradient that the forward takes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, 4, 4) / 4)

    def forward(self, x):
        outer = x.unsqueeze(-1) * x.unsqueeze(-2).sin()
        energy = (outer.unsqueeze(-1) * self.weight).sum((2, 3)).square().sum((1, 2), keepdim=True)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, forces


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_model_with_gradients(dynamo):
    torch.manual_seed(0)
    model = Spelled()
    x = torch.randn(70, 6, 4, requires_grad=True)
    program = exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("edges", min=2)},))
    assert "MatMul" in [node.op_type for node in program.model.graph]
    module = exporter.load(program)
    for size in (70, 9):
        mine, theirs = (torch.randn(size, 6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
        found, expected = module(mine), model(theirs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        model.zero_grad(), module.zero_grad()
        sum(one.square().sum() for one in found).backward()
        sum(one.square().sum() for one in expected).backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3 * float(theirs.grad.abs().max()))
        (mine_weight,) = [value.grad for value in module.parameters()]
        torch.testing.assert_close(mine_weight, model.weight.grad, rtol=1e-3, atol=1e-4 * float(model.weight.grad.abs().max()))
