"""Tensors of torch, values of onnxruntime and numpy arrays: how one becomes another, and sessions on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import dlpack

from symbolics.errors import RunError
from symbolics.node.dtypes import DTYPES

__all__ = ["Runner", "tensor", "to_array", "to_tensor"]

_ELEMENT_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}
# numpy knows these only through ml_dtypes, torch only as its own: the bits pass as unsigned integers.
_TO_NUMPY = {dtype: ir.DataType(kind).numpy() for kind, dtype in DTYPES.items() if kind >= ir.DataType.BFLOAT16}
_TO_TORCH = {kind: dtype for dtype, kind in _TO_NUMPY.items()}


def to_tensor(array: Any) -> Any:
    """A tensor of its own memory; arrays of strings stay arrays.

    Args:
        array: A numpy array or scalar of any type that onnx.reference holds.

    Raises:
        RunError: torch has no such type (float4, int4, int2 and their like).
    """
    array = np.asarray(array)
    if array.dtype.kind in "OUST":
        return array.astype(object)
    dtype = _TO_TORCH.get(array.dtype)
    if dtype is not None:
        bits = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
        return torch.from_numpy(bits.copy()).view(dtype)
    try:
        return torch.from_numpy(array.copy(order="C"))
    except TypeError as error:
        raise RunError(
            f"a PythonOp, PythonOpGrad or PythonOpTangent is given a tensor of type {array.dtype}, which torch does not have: Cast it to int8 or float in the graph"
        ) from error


def to_array(value: Any) -> np.ndarray:
    """The inverse of `to_tensor`."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value, dtype=object)
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    kind = _TO_NUMPY.get(value.dtype)
    if kind is not None:
        return value.view(torch.uint16 if kind.itemsize == 2 else torch.uint8).numpy().view(kind).copy()
    return value.numpy().copy()


class Runner:
    """A session whose inputs and outputs are torch tensors, or values of onnxruntime that pass through unseen.

    Inputs are read where they lie. Outputs are onnxruntime's memory: `tensor` looks at it without a copy.
    """

    def __init__(self, session: Any, device: torch.device) -> None:
        self.session = session
        self.device = device.type
        self.index = device.index or 0
        self.inputs = {value.name: _element_type(value.type) for value in session.get_inputs()}
        self.types = {value.name: _element_type(value.type) for value in session.get_outputs()}
        self.names = list(self.types)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One run; tensors of ``feeds`` must be contiguous and of the types of the inputs.

        Returns:
            name -> OrtValue.
        """
        binding = self.session.io_binding()
        for name in self.inputs:
            value = feeds[name]
            if isinstance(value, torch.Tensor):
                device = (value.device.type, value.device.index or 0)
                binding.bind_input(name, *device, _ELEMENT_TYPES[value.dtype], list(value.shape), value.data_ptr())
            else:
                binding.bind_ortvalue_input(name, value)
        for name in self.names:
            binding.bind_output(name, self.device, self.index)
        if self.device != "cpu":  # what torch has queued must be there when another stream reads it
            torch.accelerator.synchronize()
        self.session.run_with_iobinding(binding)
        return dict(zip(self.names, binding.get_outputs(), strict=True))


def tensor(value: Any) -> torch.Tensor:
    """An OrtValue as a tensor over the same memory, which lives as long as one of them; a copy where DLPack cannot say it."""
    kind = value.element_type()
    dtype = DTYPES[kind]
    # DLPack has no float8, and the values of onnxruntime before 1.24 have no DLPack.
    if (dtype.is_floating_point and dtype.itemsize == 1) or not hasattr(value, "__dlpack__"):
        return _copy(value, dtype)
    found = dlpack.from_dlpack(value.__dlpack__())
    return found.view(torch.bool) if dtype is torch.bool and found.dtype is not torch.bool else found


def _copy(value: Any, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(value.shape(), dtype=dtype)
    if value.device_name() != "cpu":
        raise RunError("this onnxruntime cannot give tensors of a device to torch: install a newer one")
    ctypes.memmove(out.data_ptr(), value.data_ptr(), out.nbytes)
    return out


def _element_type(text: str) -> int | None:
    """The ONNX element type of ``tensor(float)``; None for sequences and the like."""
    return ir.DataType.__members__.get(text.removeprefix("tensor(").removesuffix(")").upper())
