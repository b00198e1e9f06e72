"""Operators that onnx.reference computes wrongly, or not at all, without torch: for any ReferenceEvaluator (``new_ops=MENDED``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

__all__ = ["MENDED", "GatherElements", "MendedEvaluator", "Pad"]


class GatherElements(OpRun):
    """onnx's own takes no axis from the end, and none longer than 64."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        axis = (axis or 0) % data.ndim
        part = data[tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))]
        return (np.take_along_axis(part, indices.astype(np.int64), axis),)


class Pad(OpRun):
    """onnx's own takes no negative numbers, which cut off: the gradient of a convolution has them where sizes are open."""

    op_domain = ""

    def _run(
        self, data: np.ndarray, pads: Any = None, constant_value: Any = None, axes: Any = None, mode: str | None = None,
        value: float | None = None, paddings: Any = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        widths = [int(width) for width in (pads if pads is not None else paddings)]  # attributes, before opset 11
        places = range(data.ndim) if axes is None else [int(axis) % data.ndim for axis in axes]
        pairs = [(0, 0)] * data.ndim
        for axis, begin, end in zip(places, widths[: len(widths) // 2], widths[len(widths) // 2 :], strict=True):
            pairs[axis] = (begin, end)
        cut = tuple(slice(max(0, -begin), size - max(0, -end)) for size, (begin, end) in zip(data.shape, pairs, strict=True))
        added = [(max(0, begin), max(0, end)) for begin, end in pairs]
        mode = mode or "constant"
        fill = constant_value if constant_value is not None else value
        more = {"constant_values": 0 if fill is None else np.asarray(fill).item()} if mode == "constant" else {}
        return (np.pad(data[cut], added, mode=mode, **more).astype(data.dtype, copy=False),)  # type: ignore[call-overload]


#: All of them.
MENDED: tuple[type[OpRun], ...] = (GatherElements, Pad)


class MendedEvaluator(ReferenceEvaluator):
    """onnx.reference with these operators, also inside of functions and bodies, of which it makes evaluators of this class."""

    def __init__(self, proto: Any, *args: Any, new_ops: Sequence[type[OpRun]] | None = None, **kwargs: Any) -> None:
        kwargs["new_ops"] = [*(new_ops or ()), *MENDED]
        super().__init__(proto, *args, **kwargs)
