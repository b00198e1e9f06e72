"""Operators that onnx.reference computes wrongly, without torch: for any ReferenceEvaluator (``new_ops=[GatherElements]``)."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = ["GatherElements"]


class GatherElements(OpRun):
    """onnx's own takes no axis from the end, and none longer than 64."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        axis = (axis or 0) % data.ndim
        part = data[tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))]
        return (np.take_along_axis(part, indices.astype(np.int64), axis),)
