"""Train-mode BatchNorm for torch.onnx.export(dynamo=True): torch 2.13 writes the inference form for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from symbolics import torch_private as private

__all__ = ["batch_norm_translations", "cumulative_statistics", "momentum_of_this_step", "pin_running_statistics"]


def _op(op_type: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **attributes: Any) -> Sequence[ir.Value]:
    node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs)
    private.add_traced_node(node)
    return node.outputs


def _constant(array: np.ndarray) -> ir.Value:
    return _op("Constant", [], value=ir.tensor(array))[0]


def _filled(value: float, like: ir.Value) -> ir.Value:
    """A vector of the channels of ``like``, (N, C, ...), and of its dtype."""
    scalar = _op("CastLike", [_constant(np.array([value], dtype=np.float32)), like])[0]
    return _op("Expand", [scalar, _op("Shape", [like], start=1, end=2)[0]])[0]


def _functional_batch_norm(
    x: ir.Value, weight: ir.Value | None, bias: ir.Value | None, mean: ir.Value, var: ir.Value, training: bool, momentum: float, eps: float
) -> Sequence[ir.Value]:
    """_native_batch_norm_legit_functional -> (y, batch mean, batch 1/std, new running mean, new running variance)."""
    scale = weight if weight is not None else _filled(1.0, x)
    shift = bias if bias is not None else _filled(0.0, x)
    if not training:
        (y,) = _op("BatchNormalization", [x, scale, shift, mean, var], epsilon=float(eps))
        empty = _constant(np.zeros((0,), dtype=np.float32))
        return y, empty, empty, _op("Identity", [mean])[0], _op("Identity", [var])[0]
    # ONNX's momentum is the share of the old value, torch's that of the new one.
    y, new_mean, _ = _op(
        "BatchNormalization", [x, scale, shift, mean, var], 3, epsilon=float(eps), momentum=1.0 - float(momentum), training_mode=1
    )
    # The rest is pruned where nobody reads it. torch's running variance is the unbiased one, ONNX's is not.
    axes = _constant(np.array([0, *range(2, len(x.shape))] if x.shape is not None else [0, 2, 3], dtype=np.int64))
    batch_mean = _op("ReduceMean", [x, axes], keepdims=0)[0]
    centred = _op("Sub", [x, _op("ReduceMean", [x, axes], keepdims=1)[0]])[0]
    batch_var = _op("ReduceMean", [_op("Mul", [centred, centred])[0], axes], keepdims=0)[0]
    count = _op("CastLike", [_op("Div", [_op("Size", [x])[0], _op("Size", [batch_mean])[0]])[0], x])[0]
    one = _op("CastLike", [_constant(np.array(1.0, dtype=np.float32)), x])[0]
    share = _op("CastLike", [_constant(np.array(float(momentum), dtype=np.float32)), x])[0]
    unbiased = _op("Div", [_op("Mul", [batch_var, count])[0], _op("Sub", [count, one])[0]])[0]
    new_var = _op("Add", [_op("Mul", [var, _op("Sub", [one, share])[0]])[0], _op("Mul", [unbiased, share])[0]])[0]
    epsilon = _op("CastLike", [_constant(np.array(float(eps), dtype=np.float32)), x])[0]
    rstd = _op("Reciprocal", [_op("Sqrt", [_op("Add", [batch_var, epsilon])[0]])[0]])[0]
    return y, batch_mean, rstd, new_mean, new_var


def batch_norm_translations() -> dict[Any, Any]:
    """The entries for torch.onnx.export's ``custom_translation_table``."""
    return {torch.ops.aten._native_batch_norm_legit_functional.default: _functional_batch_norm}


# Of InstanceNorm, None means 0.
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def cumulative_statistics(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Names of the running means that a forward makes the average of all batches so far (momentum=None), with their modules."""
    return {
        f"{path}.running_mean".removeprefix("."): module
        for path, module in model.named_modules()
        if isinstance(module, _NORMS)
        and module.training
        and module.momentum is None
        and module.track_running_stats
        and module.num_batches_tracked is not None
    }


@contextlib.contextmanager
def momentum_of_this_step(model: torch.nn.Module) -> Iterator[None]:
    """Let an export see the number that momentum=None stands for at the next step.

    torch computes it from the counter of batches: torch.export cannot (it is data), and a trace freezes it. The file says by
    `CUMULATIVE_KEY` that it was none; the counter is among the model's buffers.
    """
    norms = list(cumulative_statistics(model).values())
    for norm in norms:
        norm.momentum = 1.0 / (float(norm.num_batches_tracked) + 1.0)  # type: ignore[arg-type, assignment]
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None  # type: ignore[assignment]


def pin_running_statistics(graph: ir.Graph) -> None:
    """Keep onnxruntime from mixing up the buffers of train-mode BatchNormalization.

    Measured on onnxruntime 1.31: its optimizer merges small initializers of equal value (a fresh model's weight and
    running variance are both 1) and the kernel, whose running statistics may take over the buffers of mean and variance,
    then reads what it has written: Y is wrong without a word. Where mean and variance are computed values they have
    buffers of their own: so each goes through a Where of which both branches are the statistic itself, on a condition
    that no optimizer can know.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        mode = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or node.domain not in ("", "ai.onnx") or mode is None or not mode.as_int():
            continue
        x, statistics = node.inputs[0], node.inputs[3:5]
        if x is None or node.graph is None or any(value is None or value.producer() is not None for value in statistics):
            continue
        tape = ir.tape.Tape()
        rank = len(x.shape) if x.shape is not None else 1
        first = x if x.shape is not None else tape.op("Reshape", [x, tape.op("Constant", [], {"value_ints": [-1]})])
        zero, one = (tape.op("Constant", [], {"value_ints": [n] * rank}) for n in (0, 1))
        probe = tape.op("IsNaN", [tape.op("Slice", [first, zero, one])])
        condition = tape.op("Reshape", [probe, tape.op("Constant", [], {"value_ints": [1]})])
        for index, value in zip((3, 4), statistics, strict=True):
            assert value is not None
            pinned = tape.op("Where", [condition, value, value])
            pinned.shape, pinned.type = value.shape, value.type
            node.replace_input_with(index, pinned)
        node.graph.insert_before(node, tape.nodes)
