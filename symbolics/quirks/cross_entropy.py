"""Cross entropy for torch.onnx.export(dynamo=True): torch's translation drops label_smoothing without a word.

ONNX's SoftmaxCrossEntropyLoss knows neither label smoothing nor targets that are probabilities; both are written out here
by the formulas of the documentation of torch.nn.CrossEntropyLoss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss

__all__ = ["cross_entropy_translations"]

_NONE, _MEAN, _SUM = 0, 1, 2


def _cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    probabilities = target.dtype is not None and target.dtype.is_floating_point()
    if not label_smoothing and not probabilities:
        return aten_cross_entropy_loss(x, target, weight, reduction, ignore_index, label_smoothing)
    axis = 0 if len(x.shape) == 1 else 1
    classes = op.CastLike(op.Shape(x, start=axis, end=axis + 1), x)
    score = op.LogSoftmax(x, axis=axis)
    if weight is not None:
        shape = [1] * len(x.shape)
        shape[axis] = -1
        weighted = op.Mul(score, op.Reshape(weight, _ints(shape)))
    else:
        weighted = score
    if probabilities:
        spread = op.Div(_number(label_smoothing, x), classes)
        smooth = op.Add(op.Mul(target, _number(1 - label_smoothing, x)), spread) if label_smoothing else target
        each = op.Neg(op.ReduceSum(op.Mul(weighted, smooth), _ints([axis]), keepdims=0))
        count = op.Div(op.CastLike(op.Size(x), x), op.Squeeze(classes))
        return _reduced(each, count, reduction)
    ignored = op.Equal(target, op.CastLike(_ints(ignore_index), target))
    safe = op.Where(ignored, op.CastLike(_ints(0), target), target)
    picked = op.Squeeze(op.GatherElements(weighted, op.Unsqueeze(safe, _ints([axis])), axis=axis), _ints([axis]))
    uniform = op.ReduceSum(weighted, _ints([axis]), keepdims=0)
    share = op.Squeeze(op.Div(_number(label_smoothing, x), classes))
    each = op.Neg(op.Add(op.Mul(picked, _number(1 - label_smoothing, x)), op.Mul(uniform, share)))
    each = op.Where(ignored, _number(0.0, x), each)
    kept = op.CastLike(op.Not(ignored), x)
    count = op.ReduceSum(kept if weight is None else op.Mul(kept, op.Gather(weight, safe)), keepdims=0)
    return _reduced(each, count, reduction)


def _reduced(each: Any, count: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return each
    total = op.ReduceSum(each, keepdims=0)
    return total if reduction == _SUM else op.Div(total, count)


def _ints(value: Any) -> Any:
    return op.Constant(value=ir.to_proto(ir.tensor(np.array(value, np.int64))))


def _number(value: float, like: Any) -> Any:
    constant: Any = op.Constant(value=ir.to_proto(ir.tensor(np.array(value, np.float64))))
    return op.CastLike(constant, like)


def cross_entropy_translations() -> dict[Any, Any]:
    """The entries for torch.onnx.export's ``custom_translation_table``."""
    return {torch.ops.aten.cross_entropy_loss.default: _cross_entropy}
