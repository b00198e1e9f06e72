"""Sums of pieces, products and rows: as many nodes as needed, and the same numbers."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch

import exporter
from symbolics.graph.builder import Builder
from tests.symbolics.graph.test_peepholes import built, value


def summed(write, shapes, like):
    """The operators and the result of the sum of what ``write`` makes, and of the plain sum of the same values."""
    found = []
    for emit in (lambda op, parts: op.add_up(parts, value("like", like)), lambda op, parts: op.raw("Sum", parts)):

        def make(op, *inputs, emit=emit):
            return emit(op, write(op, *inputs))

        found.append(built(Builder, make, [(dims, dims) for dims in shapes])[:2])
    (operators, result), (_, expected) = found
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    return operators


def padded(op, x, axis, before, after, rank):
    amounts = [0] * (2 * rank)
    amounts[axis], amounts[axis + rank] = before, after
    return op.raw("Pad", [x, amounts])


def test_pieces_become_one_concat():
    def write(op, *inputs):
        return [padded(op, x, 0, 2 * i, 6 - 2 * i, 2) for i, x in enumerate(inputs)]

    assert summed(write, [(2, 3)] * 4, (8, 3)) == ["Concat"]


def test_gaps_between_pieces_are_zeros():
    def write(op, *inputs):
        return [padded(op, x, 1, 1 + 3 * i, 6 - 3 * i, 2) for i, x in enumerate(inputs)]

    assert summed(write, [(2, 2)] * 3, (2, 9)) == ["Pad", "Pad", "Concat"]  # the last has none behind it


def test_pieces_that_overlap_lie_in_layers():
    def write(op, *inputs):
        return [padded(op, x, 0, i, 5 - i, 2) for i, x in enumerate(inputs)]

    assert sorted(set(summed(write, [(2, 3)] * 6, (7, 3)))) == ["Add", "Concat", "Pad"]


def test_pieces_of_two_axes_and_others_are_added():
    def write(op, a, b, whole):
        return [padded(op, a, 0, 0, 3, 2), padded(op, a, 0, 1, 2, 2), padded(op, b, 1, 0, 3, 2), padded(op, b, 1, 1, 2, 2), whole]

    assert summed(write, [(1, 4), (4, 1), (4, 4)], (4, 4)).count("Concat") == 2


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_pads_of_other_modes_are_left(mode):
    def write(op, *inputs):
        return [op.raw("Pad", [x, [1, 0, 1, 0]], mode=mode) for x in inputs]

    assert summed(write, [(2, 3)] * 2, (4, 3)) == ["Pad", "Pad", "Add"]


@pytest.mark.parametrize("turned_a", [0, 1])
@pytest.mark.parametrize("turned_b", [0, 1])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_thin_products_become_one(turned_a, turned_b, alpha):
    """Of terms as many as each product has: less to read than to add up."""

    def write(op, *inputs):
        return [op.raw("Gemm", [a, b], transA=turned_a, transB=turned_b, alpha=alpha) for a, b in zip(inputs[::2], inputs[1::2])]

    shapes = [((k, 8) if turned_a else (8, k), (9, k) if turned_b else (k, 9)) for k in (2, 1, 2)]
    assert summed(write, [s for pair in shapes for s in pair], (8, 9)) == ["Concat", "Concat", "Gemm"]


def test_thick_products_stay():
    def write(op, a, b):
        return [op.raw("Gemm", [a, b]), op.raw("Gemm", [b, a])]

    assert summed(write, [(8, 8), (8, 8)], (8, 8)) == ["Gemm", "Gemm", "Add"]


def test_sums_of_rows_become_one():
    def write(op, *inputs):
        return [op.raw("ReduceSum", [x, [0, 1]], keepdims=0) for x in inputs]

    assert summed(write, [(1, 2, 5), (3, 2, 5)], (5,)) == ["Concat", "ReduceSum"]


def test_the_gradient_of_a_recurrence_grows_with_its_steps():
    """torch.export writes an RNN out. As many large values as there are steps would make its cost their square."""
    torch.manual_seed(0)
    model = torch.nn.RNN(3, 4)
    x = torch.randn(6, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, (x,), dynamo=True)
    graph = exporter.build_gradient_graph(program.model_proto, wrt=["weight_hh_l0", "weight_ih_l0", "bias_hh_l0"]).graph
    whole = [
        n for n in graph if n.op_type in ("Pad", "Sum", "Add") and n.name.startswith("grad/") and n.outputs[0].shape == ir.Shape([6, 2, 4])
    ]
    assert not whole
    assert not [n for n in graph if n.op_type == "Sum"]
    loaded = exporter.load(program)
    for module in (model, loaded):
        output, state = module(x)
        (output.square().sum() + state.sin().sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)
