"""Stock onnxruntime: the same semantics, and what only a compiled runtime can get wrong."""

from __future__ import annotations

import functions as F
import numpy as np
import onnxruntime
import pytest
import torch
from cases import CASES, check_case

from exporter.runtime.reference import to_array, to_tensor
from exporter.runtime.session import inference_session

ALLOW = ["functions:*"]


class Runner:
    """One model on onnxruntime, with tensors in and out (OrtValues carry what numpy has no type for)."""

    def __init__(self, model, **options):
        self.session = inference_session(model, ALLOW, **options)
        self.store = self.session.store
        self.kinds = [v.type for v in self.session.get_inputs()]

    def run(self, *tensors):
        names = [v.name for v in self.session.get_inputs()]
        feeds = {name: ort_value(tensor) for name, tensor in zip(names, tensors, strict=True)}
        outputs = self.session.run_with_ort_values(None, feeds)
        return [from_ort(value) for value in outputs]


_ELEMENT = {torch.bfloat16: 16, torch.float8_e4m3fn: 17}


def ort_value(tensor):
    array = to_array(tensor)
    if tensor.dtype in _ELEMENT:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16 if array.itemsize == 2 else np.uint8), _ELEMENT[tensor.dtype])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def from_ort(value):
    kind = value.element_type()
    for dtype, code in _ELEMENT.items():
        if kind == code:
            return torch.from_dlpack(value._get_c_value()) if False else _bits(value, dtype)
    return to_tensor(value.numpy())


def _bits(value, dtype):
    tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return tensor.clone().view(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_semantics(case):
    check_case(case, Runner)
