"""Windows for spectra, whose sizes are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from symbolics.quirks.opset import op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "windows"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="hamming_window is computed with 25/46 where torch has 0.54; bartlett_window, kaiser_window, and the others that are not periodic, have no translation",
)


def _window(overload: Any) -> Callable[..., Any]:
    def translation(window_length: int, *args: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
        """The values that torch has."""
        wanted = torch.get_default_dtype() if dtype == -1 else tensor_adapters.to_torch_dtype(ir.DataType(dtype))
        values = overload(window_length, *args, dtype=wanted)
        return op.Constant(value=tensor_adapters.TorchTensor(values))

    return translation


def windows() -> dict[Any, Callable[..., Any]]:
    """A translation for each of torch's windows."""
    names = ("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window")
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads() if not name.endswith("out")]
    return {overload: _window(overload) for overload in overloads}
