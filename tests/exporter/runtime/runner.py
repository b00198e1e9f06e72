"""A session that runs torch tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import onnxruntime
import torch

from exporter.runtime.reference import to_array, to_tensor
from exporter.runtime.session import inference_session

__all__ = ["Runner"]

ALLOW = ["tests.zoo.functions:*"]


class Runner:
    """One model on onnxruntime, with tensors in and out (OrtValues carry what numpy has no type for)."""

    def __init__(self, model, allow=ALLOW, **options):
        self.session = inference_session(model, allow, **options)
        self.store = self.session.store

    def run(self, *tensors):
        names = [v.name for v in self.session.get_inputs()]
        feeds = {name: ort_value(tensor) for name, tensor in zip(names, tensors, strict=True)}
        outputs = self.session.run_with_ort_values(None, feeds)
        return [from_ort(value) for value in outputs]


_ODD = {torch.bfloat16: 16, torch.float8_e4m3fn: 17}


def ort_value(tensor):
    array = to_array(tensor)
    if tensor.dtype in _ODD:
        array = array.view(f"u{array.itemsize}")
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ODD[tensor.dtype])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def from_ort(value):
    for dtype, code in _ODD.items():
        if value.element_type() == code:
            shape = value.shape()
            data = ctypes.string_at(value.data_ptr(), int(np.prod(shape)) * dtype.itemsize)
            return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return to_tensor(value.numpy())
