"""Sums of rows as products with ones."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from exporter.cpu.sums import multiply_sums
from symbolics.errors import RunError
from tests.exporter.cpu.support import inference_session


def total(x, axes, keepdims=0, kind="float", before=""):
    """A model that sums x, of this shape, or what is made of it, over axes."""
    dims, given = ", ".join(map(str, x)), ", ".join(map(str, axes))
    body = f"{before or 'r = Neg(x)'} a = Constant <value_ints = [{given}]> () y = ReduceSum <keepdims = {keepdims}> (r, a)"
    model = ir.from_proto(
        onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({kind}[{dims}] x) => ({kind} y) {{ {body} }}')
    )
    negated = next(node.outputs[0] for node in model.graph if node.op_type == "Neg")
    negated.shape, negated.type = ir.Shape(x), model.graph.inputs[0].type
    return model


def sums(model):
    return sum(node.op_type == "ReduceSum" for node in model.graph)


@pytest.mark.parametrize(
    ("x", "axes", "keepdims"),
    [((256, 64), [0], 0), ((256, 64), [-2], 1), ((4, 64, 96), [1, 0], 0), ((4, 64, 96), [0, -2], 1), ((16, 1024), [0], 0)],
    ids=["rows", "kept", "two axes", "two axes, kept", "few rows"],
)
def test_the_sum_is_numpys(x, axes, keepdims):
    model = total(x, axes, keepdims)
    assert multiply_sums(model) == 1 and sums(model) == 0
    given = np.random.default_rng(0).standard_normal(x, np.float32)
    found = inference_session(ir.to_proto(model)).run(None, {"x": given})[0]
    expected = -given.astype(np.float64).sum(tuple(axes), keepdims=bool(keepdims))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_infinities_and_nan_stay_in_their_columns():
    model = total((256, 64), [0])
    given = np.ones((256, 64), np.float32)
    given[3, 1], given[200, 2], given[5, 3] = np.inf, np.nan, -np.inf
    assert multiply_sums(model) == 1
    np.testing.assert_array_equal(inference_session(ir.to_proto(model)).run(None, {"x": given})[0], -given.sum(0))


@pytest.mark.parametrize(
    "model",
    [
        lambda: total((256, 64), [1]),
        lambda: total((4, 64, 96), [0]),
        lambda: total((4, 64, 96), [0, 2]),
        lambda: total((4, 64, 96), [0, 1, 2]),
        lambda: total((15, 4096), [0]),
        lambda: total((128, 64), [0]),
        lambda: total(("n", 4096), [0]),
        lambda: total((256, 64), [0], kind="double"),
        lambda: total((32768,), [0]),
        lambda: total((2**33, 4), [0]),
        lambda: total((256, 64), [2]),
        lambda: total((256, 64), [0, 0]),
    ],
    ids=[
        "the last axis",
        "not all others",
        "the last one, too",
        "all",
        "few rows",
        "few elements",
        "an open size",
        "double",
        "one axis",
        "too many rows",
        "no axis of it",
        "one axis twice",
    ],
)
def test_others_stay(model):
    model = model()
    assert multiply_sums(model) == 0 and sums(model) == 1


def test_axes_that_a_caller_may_give_stay():
    model = total((256, 64), [0])
    constant = next(node for node in model.graph if node.op_type == "Constant")
    axes = ir.val("axes", ir.DataType.INT64, [1], const_value=ir.tensor(np.array([0]), name="axes"))
    constant.outputs[0].replace_all_uses_with(axes)
    model.graph.inputs.append(axes)
    model.graph.register_initializer(axes)
    assert multiply_sums(model) == 0


@pytest.mark.parametrize("said", [(128, 128), (512, 32), (4, 64, 64), (256, 128)])
def test_a_shape_that_the_file_only_says_is_no_wrong_number(said):
    """onnxruntime refuses the product of another count of rows; of another width, the sum is right."""
    axes = list(range(len(said) - 1))
    model = total((256, 64), axes)
    negated = next(node.outputs[0] for node in model.graph if node.op_type == "Neg")
    negated.shape, model.graph.inputs[0].shape = ir.Shape(said), None
    given = np.random.default_rng(0).standard_normal((256, 64), np.float32)
    assert multiply_sums(model) == 1
    if said[0] == 256:
        np.testing.assert_allclose(inference_session(ir.to_proto(model)).run(None, {"x": given})[0], -given.sum(0), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(RunError):
        inference_session(ir.to_proto(model)).run(None, {"x": given})
