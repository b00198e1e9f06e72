"""torch.onnx reads the source of every function of torchlib at each export: two thirds of the time of a small one.

What it makes is the same each time (`test_what_is_kept_is_what_torch_makes`), so in this process it is made once. The
processes that the tests start (commands, examples, verify) do not know of this.
"""

from __future__ import annotations

from typing import Any

from torch.onnx._internal.exporter._registration import ONNXRegistry

__all__ = ["built_once", "made_anew"]

#: The function of torch, bound to its class.
made_anew = ONNXRegistry.from_torchlib
_MADE: dict[int | None, ONNXRegistry] = {}


def _copy(opset_version: int | None = None) -> ONNXRegistry:
    """A registry of its own for each export, which adds the custom operators to it."""
    if opset_version not in _MADE:
        _MADE[opset_version] = made_anew() if opset_version is None else made_anew(opset_version)
    kept, copy = _MADE[opset_version], ONNXRegistry()
    copy._opset_version = kept._opset_version
    copy.functions = {target: list(decompositions) for target, decompositions in kept.functions.items()}
    return copy


def built_once() -> None:
    """Keep torchlib's registry for the rest of this process."""
    replacement: Any = staticmethod(_copy)
    ONNXRegistry.from_torchlib = replacement  # type: ignore[method-assign]
