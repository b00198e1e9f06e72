"""Cross entropy for torch.onnx.export(dynamo=True).

ONNX's SoftmaxCrossEntropyLoss knows neither label smoothing nor targets that are probabilities; both are written out here
by the formulas of the documentation of torch.nn.CrossEntropyLoss.
"""

from __future__ import annotations

from typing import Any

from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss as torchlibs

from symbolics.quirks.opset import number, op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "cross_entropy"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="cross_entropy_loss drops label_smoothing without a word, and writes what no runtime takes for targets that are probabilities",
)

_NONE, _MEAN, _SUM = 0, 1, 2


def cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """aten::cross_entropy_loss."""
    probabilities = target.dtype is not None and target.dtype.is_floating_point()
    if not label_smoothing and not probabilities:
        return torchlibs(x, target, weight, reduction, ignore_index, label_smoothing)
    axis = 0 if len(x.shape) == 1 else 1
    classes = op.CastLike(op.Shape(x, start=axis, end=axis + 1), x)
    score = op.LogSoftmax(x, axis=axis)
    if weight is not None:
        score = op.Mul(score, op.Reshape(weight, [-1 if i == axis else 1 for i in range(len(x.shape))]))
    share = op.Div(number(label_smoothing, x), classes)
    rest = number(1 - label_smoothing, x)
    if probabilities:
        smooth = op.Add(op.Mul(target, rest), share) if label_smoothing else target
        each = op.Neg(op.ReduceSum(op.Mul(score, smooth), [axis], keepdims=0))
        count = op.Div(op.CastLike(op.Size(x), x), op.Squeeze(classes))
        return _reduced(each, count, reduction)
    ignored = op.Equal(target, number(ignore_index, target))
    safe = op.Where(ignored, number(0, target), target)
    counted = op.CastLike(op.Squeeze(op.Shape(x, start=axis, end=axis + 1)), target)
    safe = op.Where(op.Less(safe, number(0, target)), counted, safe)  # torch refuses a label below 0: this index, no runtime has
    picked = op.Squeeze(op.GatherElements(score, op.Unsqueeze(safe, [axis]), axis=axis), [axis])
    uniform = op.ReduceSum(score, [axis], keepdims=0)
    each = op.Neg(op.Add(op.Mul(picked, rest), op.Mul(uniform, op.Squeeze(share))))
    each = op.Where(ignored, number(0.0, x), each)
    kept = op.CastLike(op.Not(ignored), x)
    count = op.ReduceSum(kept if weight is None else op.Mul(kept, op.Gather(weight, safe)), keepdims=0)
    return _reduced(each, count, reduction)


def _reduced(each: Any, count: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return each
    total = op.ReduceSum(each, keepdims=0)
    return total if reduction == _SUM else op.Div(total, count)
