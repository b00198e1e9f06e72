"""A file may declare another type for an output than its PythonOp makes: the native library writes nothing then."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from exporter.runtime.session import inference_session
from symbolics.errors import RunError
from tests.exporter.runtime.build import forward, record, training
from tests.zoo import functions as F

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


@pytest.mark.parametrize("declared", ["BOOL", "DOUBLE", "STRING"])
def test_a_gradient_of_another_type(declared):
    x = torch.randn(4096, 1, requires_grad=True)
    model = training(record(F.SavesOutput, x))
    _assert_refused(_declared(model, declared), *[x.detach()] * len(model.graph.input))
