"""torch dtypes and ONNX element types."""

from __future__ import annotations

import onnx_ir as ir
import torch

from symbolics.errors import ExportError

__all__ = ["DTYPES", "HALVES", "as_real", "onnx_type"]

HALVES = (torch.float16, torch.bfloat16)

_PAIRS = {
    torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8, torch.int16: ir.DataType.INT16, torch.int32: ir.DataType.INT32, torch.int64: ir.DataType.INT64,
    torch.uint8: ir.DataType.UINT8, torch.uint16: ir.DataType.UINT16, torch.uint32: ir.DataType.UINT32, torch.uint64: ir.DataType.UINT64,
    torch.bool: ir.DataType.BOOL,
    torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN, torch.float8_e4m3fnuz: ir.DataType.FLOAT8E4M3FNUZ,
    torch.float8_e5m2: ir.DataType.FLOAT8E5M2, torch.float8_e5m2fnuz: ir.DataType.FLOAT8E5M2FNUZ,
}  # fmt: skip

#: ONNX element type -> torch dtype. Readers know complex numbers, which no PythonOp that we write takes.
DTYPES: dict[int, torch.dtype] = {int(kind): dtype for dtype, kind in _PAIRS.items()} | {14: torch.complex64, 15: torch.complex128}


def onnx_type(dtype: torch.dtype) -> int:
    """The ONNX element type of a torch dtype.

    Raises:
        ExportError: ONNX has no such type.
    """
    if dtype not in _PAIRS:
        raise ExportError(
            f"a tensor of dtype {dtype} has no ONNX element type: let the call take and return tensors of another type, inline it (a Function: inline=), "
            "or name in opaque= a module around it that does"
        )
    return int(_PAIRS[dtype])


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor; a complex one as its real and imaginary parts, in a last dimension, as files have it."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
