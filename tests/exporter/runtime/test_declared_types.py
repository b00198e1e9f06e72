"""A file may declare another type for an output than its PythonOp makes: the native library writes nothing then.

Shapes are the tensor's own, whatever the file says: the rank of what a Function returns may depend on sizes, in eager as here.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from exporter.runtime.prepare import prepare
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import inference_session, session_options
from symbolics.errors import FormatError, RunError
from tests.exporter.runtime.build import forward, record, training
from tests.zoo import functions as F, hostile

ALLOW = ["tests.*"]
TYPES = ("BOOL", "INT8", "FLOAT16", "FLOAT", "INT32", "DOUBLE", "INT64", "STRING", "COMPLEX128")


def _declared(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = int(ir.DataType[kind])
    return model


def _run(model: onnx.ModelProto, *inputs: torch.Tensor) -> list[np.ndarray]:
    session = inference_session(model, ALLOW)
    return session.run(None, {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)})


def _assert_refused(model: onnx.ModelProto, *inputs: torch.Tensor) -> None:
    with pytest.raises(Exception, match=r"declares output \d with ONNX element type|ONNXRuntimeError") as caught:
        _run(model, *inputs)
    # onnxruntime refuses some itself: types that it does not know.
    assert isinstance(caught.value, RunError) or "onnxruntime" in type(caught.value).__module__


@pytest.mark.parametrize("declared", TYPES)
@pytest.mark.parametrize("made", [torch.float64, torch.float32, torch.float16], ids=str)
def test_a_forward_of_another_type(made, declared):
    x = torch.randn(4096, 1, dtype=made)
    model = _declared(forward(record(F.SavesOutput, x)), declared)
    if ir.DataType[declared] == ir.DataType.from_numpy(x.numpy().dtype):
        np.testing.assert_array_equal(_run(model, x)[0], x.tanh().numpy())
    elif made is torch.float16 and declared == "FLOAT":  # onnxruntime widens half types itself, and so do we
        np.testing.assert_array_equal(_run(model, x)[0], x.tanh().float().numpy())
    else:
        _assert_refused(model, x)


@pytest.mark.parametrize("where", [inference_session, reference_evaluator])
def test_an_input_of_a_type_that_torch_lacks(where):
    model = forward(record(F.SavesOutput, torch.randn(4, 2)))
    (given,) = model.graph.input
    del model.graph.input[:]
    model.graph.initializer.append(onnx.helper.make_tensor(given.name, onnx.TensorProto.UINT4, [4, 2], [1] * 8))
    with pytest.raises(RunError, match="PythonOp.*type"):
        where(model, ALLOW).run(None, {})


def test_a_gradient_of_strings():
    model = training(record(F.SavesInput, torch.randn(4, 2, requires_grad=True)))
    gradient = next(value for value in model.graph.input if value.name == "g0")
    gradient.type.tensor_type.elem_type = onnx.TensorProto.STRING
    feeds = {"x0": np.ones((4, 2), np.float32), "g0": np.full((4, 2), "x", object)}
    for make in (reference_evaluator, inference_session):
        with pytest.raises(RunError, match="PythonOp"):
            make(model, ALLOW).run(None, feeds)


@pytest.mark.parametrize("declared", ["BOOL", "DOUBLE", "STRING"])
def test_a_gradient_of_another_type(declared):
    x = torch.randn(4096, 1, requires_grad=True)
    model = training(record(F.SavesOutput, x))
    _assert_refused(_declared(model, declared), *[x.detach()] * len(model.graph.input))


def test_the_rank_of_an_output_may_depend_on_sizes():
    x = torch.randn(3, 4, requires_grad=True)
    model = training(record(hostile.Squeezes, x))
    model.graph.input[1].type.tensor_type.ClearField("shape")
    for shape in ((3, 4), (1, 4), (3, 1), (1, 1)):
        x = torch.randn(shape)
        for make in (inference_session, reference_evaluator):
            y, gradient = make(model, ALLOW).run(None, {"x0": x.numpy(), "g0": np.ones(x.squeeze().shape, np.float32)})
            np.testing.assert_array_equal(y, x.squeeze().numpy())
            np.testing.assert_array_equal(gradient, np.ones(shape, np.float32))


@pytest.mark.parametrize("ranks", [[], [0], [5], [-1], [1 << 62]], ids=str)
def test_a_rank_that_is_another_writes_nowhere_else(ranks):
    x = torch.randn(3, 4)
    model = forward(record(F.SavesOutput, x))
    attribute = next(one for one in model.graph.node[0].attribute if one.name == "output_tensor_ranks")
    del attribute.ints[:]
    attribute.ints.extend(ranks)
    if ranks and 0 <= ranks[0] <= 64:
        np.testing.assert_array_equal(_run(model, x)[0], x.tanh().numpy())
    else:
        with pytest.raises(FormatError, match="contradict|holds the rank"):
            _run(model, x)


@pytest.mark.parametrize("dims", [[1, 1], [0], [100, 100], [2, 4, 1], [1 << 40], [64, 64]], ids=str)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "session"])
def test_declared_dims_that_are_others(dims, plain):
    """onnxruntime plans buffers by them, also those that operators share."""
    x = torch.randn(64, 32)
    model = forward(record(F.SavesOutput, x), repeat=3)
    prepare(model)
    for node in list(model.graph.node):
        model.graph.node.append(onnx.helper.make_node("Neg", [node.output[1]], [f"{node.name}_neg"]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"{node.name}_neg", 1, dims))
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(node.output[1], 1, dims))
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW)) if plain else inference_session(model, ALLOW)
    for _ in range(3):
        y, *negated = session.run(None, {"x0": x.numpy()})
        np.testing.assert_array_equal(y, x.tanh().tanh().tanh().numpy())
        np.testing.assert_array_equal(negated[0], -x.tanh().numpy())
