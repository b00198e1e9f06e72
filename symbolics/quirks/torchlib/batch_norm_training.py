"""Train-mode BatchNorm for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.function_libs.torch_lib.ops.core import (
    aten__native_batch_norm_legit_functional as torchlibs,
    aten__native_batch_norm_no_training as torchlibs_in_eval_mode,
)

from symbolics.graph.values import HALVES
from symbolics.node.names import NEW_VARIANCE
from symbolics.quirks.opset import constant, number, op, stopped
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "batch_norm", "batch_norm_in_eval_mode"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="a BatchNorm in train mode is written as one in eval mode: by its running statistics; in eval mode it gives them as those of the batch",
)


def batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> Sequence[ir.Value]:
    """aten::_native_batch_norm_legit_functional -> (y, batch mean, batch 1/std, new running mean, new running variance).

    The statistics of the batch are empty in eval mode, as the CPU has them.
    """
    if not training:
        y, *_, new_mean, new_var = torchlibs(x, weight, bias, running_mean, running_var, training, momentum, eps)
        nothing = _nothing(x)
        return y, nothing, nothing, new_mean, new_var
    channels = op.Shape(x, start=1, end=2)
    scale = weight if weight is not None else op.Expand(number(1.0, x), channels)
    shift = bias if bias is not None else op.Expand(number(0.0, x), channels)
    # ONNX's momentum is the share of the old value, torch's that of the new one.
    y, new_mean, _ = op.BatchNormalization(
        x, scale, shift, running_mean, running_var, epsilon=float(eps), momentum=1.0 - momentum, training_mode=1
    )
    # The rest is pruned where nobody reads it. torch's running variance is the unbiased one, ONNX's is not.
    axes = [0, *range(2, len(x.shape))]
    half = running_var.dtype in HALVES  # a square, or a count, may be no number of it
    kind = ir.DataType.FLOAT if half else running_var.dtype
    values = op.Cast(stopped(x), to=kind)  # the running statistics are no function to train
    mean = op.ReduceMean(values, axes, keepdims=0)
    centred = op.Sub(values, op.ReduceMean(values, axes))
    var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=0)
    rstd = op.Reciprocal(op.Sqrt(op.Add(var, constant(eps, kind))))
    count = op.Cast(op.Div(op.Size(values), op.Size(mean)), to=kind)
    unbiased = op.Div(op.Mul(var, count), op.Sub(count, constant(1.0, kind)))
    old_var = op.Cast(running_var, to=kind) if half else running_var
    new_var = op.Add(op.Mul(old_var, constant(1.0 - momentum, kind)), op.Mul(unbiased, constant(momentum, kind)))
    if half:
        mean, rstd, new_var = (op.Cast(value, to=running_var.dtype) for value in (mean, rstd, new_var))
    new_var.producer().meta[NEW_VARIANCE] = running_var
    return y, mean, rstd, new_mean, new_var


def batch_norm_in_eval_mode(*args: Any) -> Sequence[ir.Value]:
    """aten::_native_batch_norm_legit_no_training -> (y, nothing, nothing)."""
    y, *_ = torchlibs_in_eval_mode(*args)
    nothing = _nothing(args[0])
    return y, nothing, nothing


def _nothing(x: Any) -> Any:
    """What the CPU gives as the batch's statistics in eval mode."""
    return op.Expand(number(0.0, x), op.Constant(value_ints=[0]))
