"""What torch.onnx does again at each export, done once in a process of the tests: four fifths of the time of a small export.

It reads the source of every function of torchlib, which makes the same registry each time, and looks up all of ATen's composite
operators once per namespace that there is. test_torchlib.py compares what is kept with what torch makes. The processes that
the tests start (commands, examples) do not know of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._export import utils
from torch.onnx._internal.exporter._registration import ONNXRegistry

__all__ = ["built_once", "made_anew"]

#: The function of torch, bound to its class.
made_anew = ONNXRegistry.from_torchlib
_MADE: dict[tuple[int | None, bool], ONNXRegistry] = {}


def _copy(opset_version: int | None = None) -> ONNXRegistry:
    """A registry of its own for each export, which adds the custom operators to it."""
    # The one library among those that torchlib translates whose operators are there only after an import.
    key = opset_version, hasattr(torch.ops.quantized_decomposed, "dequantize_per_channel")
    if key not in _MADE:
        _MADE[key] = made_anew() if opset_version is None else made_anew(opset_version)
    kept, copy = _MADE[key], ONNXRegistry()
    copy._opset_version = kept._opset_version
    copy.functions = {target: list(decompositions) for target, decompositions in kept.functions.items()}
    return copy


_LOOKED_UP: set[str] = set()


def _look_up_composites() -> None:
    """Make every operator that C++ calls composite an attribute of torch.ops; ATen's stay, those of libraries may go."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        if name not in _LOOKED_UP:
            namespace, _, operator = name.partition("::")
            packet, _, overload = operator.partition(".")
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            if namespace == "aten":
                _LOOKED_UP.add(name)


def built_once() -> None:
    """Keep both for the rest of this process."""
    replacement: Any = staticmethod(_copy)
    ONNXRegistry.from_torchlib = replacement  # type: ignore[method-assign]
    if hasattr(utils, "_materialize_cpp_cia_ops"):
        utils._materialize_cpp_cia_ops = _look_up_composites
