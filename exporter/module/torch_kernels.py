"""Gradients that torch's own kernels take under `load`, where torch is there anyway: of convolutions and BatchNormalization.

In standard operators each is about a dozen nodes. Those of a convolution cost 1.5 times torch's kernel where the accelerator has none
of its own (`ConvWeightGrad`), the others are as many passes over the data. So where a loaded file runs on the CPU, its backward may hold a
PythonOp in their place. No file has them, and gradients of gradients are those of the standard operators.

What a PythonOp puts out is copied into onnxruntime's memory. Gradients of weights, which may be as large as the model, therefore
pass beside the session where nothing in it reads them (`pass_beside`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch

from exporter.runtime.added_calls import add_call
from exporter.runtime.link import LINKED
from symbolics.errors import RunError
from symbolics.gradients import RULES
from symbolics.gradients.convolution import conv
from symbolics.gradients.normalization import batch_normalization
from symbolics.gradients.registry import Grads, Ints
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, is_python_op, name_of, static_shape
from symbolics.node.attributes import ir_attributes, read_attributes, values_of, write_attributes
from symbolics.node.names import qualified_name

__all__ = ["FUNCTIONS", "OVERRIDES", "BatchNormGradient", "ConvolutionGradient", "are_worth_it", "beside", "pass_beside"]

_KINDS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

# Where a result has so few positions, torch's kernel takes up to nine times as long as products of matrices, once the weight is so large:
# measured with 1, 8, 32 and 64 images on a processor with AVX2 alone.
_FEW_POSITIONS, _LARGE_WEIGHT = 4, 1 << 19


class _Beside(threading.local):
    """What passes beside the run of a session on this thread; onnxruntime calls kernels on the thread of the run."""

    tensors: dict[str, torch.Tensor] | None = None


_beside = _Beside()


@contextlib.contextmanager
def beside() -> Iterator[dict[str, torch.Tensor]]:
    """Around a run: name -> gradient, of what `pass_beside` has taken out of the session."""
    before, _beside.tensors = _beside.tensors, {}
    try:
        yield _beside.tensors
    finally:
        _beside.tensors = before


def _check(function: type, fits: bool, *tensors: torch.Tensor) -> None:
    """torch's own kernels of gradients trust the sizes that they are given, and a file may lie about those.

    Raises:
        RunError: The tensors do not fit one another.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if not fits or len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        shown = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        raise RunError.damaged(
            f"a call of {qualified_name(function)}", f"its tensors are {shown}, which do not fit one another or its numbers"
        )


def _few_positions(sizes: Sequence[Any], weight: Sequence[int] | None) -> bool:
    """Whether a result of these sizes has few positions, for a large weight of this shape; False where a size is not known."""
    if weight is None or len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
        return False
    return math.prod(sizes) <= _FEW_POSITIONS and math.prod(weight) >= _LARGE_WEIGHT


class ConvolutionGradient(torch.autograd.Function):
    """The gradients of a convolution, of those of its input, weight and bias that are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        g: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        wanted: Sequence[bool],
        name: str = "",
    ) -> tuple[torch.Tensor, ...]:
        """As torch.ops.aten.convolution_backward.

        Args:
            ctx: autograd's; nothing is kept.
            g: (N, M, *outputs), the gradient of the result.
            x: (N, C, *inputs).
            weight: (M, C, *kernel).
            stride, padding, dilation: One per spatial axis.
            wanted: Of x, weight and bias, which gradients are returned.
            name: The name under which the weight's passes `beside` the session, which gets an empty tensor; "" for not so.

        Raises:
            RunError: The sizes do not fit.
        """
        axes = range(x.dim() - 2)
        fits = len(axes) == len(stride) == len(padding) == len(dilation) and x.dim() == weight.dim() and 1 <= len(axes) <= 3 == len(wanted)
        if fits := fits and min(*stride, *dilation) > 0 <= min(padding) and x.shape[1] == weight.shape[1]:
            reach = [x.shape[i + 2] + 2 * padding[i] - dilation[i] * (weight.shape[i + 2] - 1) - 1 for i in axes]
            fits = g.shape == (x.shape[0], weight.shape[0], *(reach[i] // stride[i] + 1 for i in axes))
        _check(ConvolutionGradient, fits, g, x, weight)
        if g.dtype is torch.float32 and _few_positions(g.shape[2:], weight.shape):
            found = _by_columns(g, x, weight, wanted, stride=stride, padding=padding, dilation=dilation)
        else:
            found = torch.ops.aten.convolution_backward(
                g, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), 1, list(wanted)
            )
        if name and _beside.tensors is not None:
            _beside.tensors[name] = found[1]
            found = (found[0], g.new_empty(0), found[2])
        return tuple(t for t, want in zip(found, wanted, strict=True) if want)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        """Never called: gradients of gradients are those of the standard operators."""
        raise NotImplementedError


def _by_columns(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool], **geometry: Sequence[int]
) -> tuple[Any, ...]:
    """The gradients of a convolution of images as products with the matrix of what each position of the result reads.

    ``geometry`` is stride, padding and dilation.
    """
    sizes: dict[str, Any] = {"kernel_size": weight.shape[2:], **geometry}
    dx = dw = db = None
    flat = g.transpose(0, 1).reshape(weight.shape[0], -1)  # (M, N * positions)
    if wanted[0]:
        columns = (weight.reshape(weight.shape[0], -1).t() @ flat).view(-1, x.shape[0], g.shape[2:].numel())
        dx = torch.nn.functional.fold(columns.transpose(0, 1), x.shape[2:], **sizes)
    if wanted[1]:
        columns = torch.nn.functional.unfold(x, **sizes).transpose(0, 1)  # (C * kernel, N, positions)
        dw = (flat @ columns.reshape(columns.shape[0], -1).t()).view(weight.shape)
    if wanted[2]:
        db = flat.sum(1)
    return dx, dw, db


class BatchNormGradient(torch.autograd.Function):
    """The gradients of a batch normalization that trains, of its input, scale and bias."""

    @staticmethod
    def forward(
        ctx: Any, g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, ...]:
        """As torch.ops.aten.native_batch_norm_backward.

        Args:
            ctx: autograd's; nothing is kept.
            g, x: (N, C, *).
            scale, mean, variance: (C,): of the batch, the variance biased.
            epsilon: What is added to the variance.

        Raises:
            RunError: The sizes do not fit.
        """
        fits = x.dim() > 1 and g.shape == x.shape and scale.shape == mean.shape == variance.shape == x.shape[1:2]
        _check(BatchNormGradient, fits, g, x, scale, mean, variance)
        inverse = (variance + epsilon).rsqrt()
        found: tuple[torch.Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
            g, x, scale, None, None, mean, inverse, True, epsilon, [True, True, True]
        )
        return found

    backward = ConvolutionGradient.backward


def _same_kind(*values: ir.Value) -> bool:
    return values[0].dtype in _KINDS and all(value.dtype == values[0].dtype for value in values)


def _convolution(
    op: Builder, g: ir.Value, x: ir.Value, w: ir.Value, b: ir.Value | None, *, y: ir.Value, node: ir.Node, group: int, kernel_shape: Ints
) -> Grads:
    pads = attr(node, "pads") or [0] * (2 * (0 if w.shape is None else len(w.shape) - 2))
    n = len(pads) // 2
    usual = attr(node, "auto_pad", "NOTSET") == "NOTSET" and 0 < n <= 3 and list(pads[:n]) == list(pads[n:])
    # Of a depthwise convolution torch's kernel is the slower one, but for channels last; of few positions it is products of matrices here,
    # too (`_by_columns`), which onnxruntime is quicker at.
    if not usual or group > 1 or not _same_kind(g, x, w) or _few_positions((y.shape or ())[2:], static_shape(w)):
        return conv(op, g, x, w, b, y=y, node=node, group=group, kernel_shape=kernel_shape)
    inputs = (x, w, b)
    wanted = tuple(value is not None and value in op.scope.active for value in inputs)
    constants = (tuple(attr(node, "strides") or [1] * n), tuple(pads[:n]), tuple(attr(node, "dilations") or [1] * n), wanted)
    likes = [value for value, want in zip(inputs, wanted, strict=True) if want and value is not None]
    found = iter(add_call(op, ConvolutionGradient, [g, x, w], constants, likes))
    return [next(found) if want else None for want in wanted]


def _batch_normalization(
    op: Builder, gs: Sequence[ir.Value | None], x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, variance: ir.Value, *,
    ys: Sequence[ir.Value], node: ir.Node, epsilon: float, momentum: float, training_mode: int,
) -> Grads:  # fmt: skip
    g, *others = gs
    # The statistics of the batch are outputs: `exporter.train_mode.batch_norm` has seen to it.
    own = training_mode and momentum == 0 and len(ys) == 3 and all(o.name for o in ys)
    if not own or g is None or any(v is not None for v in others) or not _same_kind(g, x, scale, *ys[1:]):
        more: dict[str, Any] = {"epsilon": epsilon, "momentum": momentum, "training_mode": training_mode}
        return batch_normalization(op, gs, x, scale, bias, mean, variance, ys=ys, node=node, **more)
    return [*add_call(op, BatchNormGradient, [g, x, scale, *ys[1:]], (epsilon,), (x, scale, bias)), None, None]


def are_worth_it(model: ir.Model, own_gradients: Collection[str]) -> bool:
    """Whether a model has convolutions that nothing is quicker for, and as much of what these kernels are for as products of matrices.

    Beside torch's kernels onnxruntime's threads sleep, and each operator wakes them: a backward of a few convolutions and many products
    takes a tenth more so.

    Args:
        model: The forward.
        own_gradients: As `exporter.runtime.accelerate.Accelerator.own_gradients`.
    """
    nodes = [node for node in model.graph if node.domain == ""]
    dense = [node for node in nodes if node.op_type == "Conv" and attr(node, "group", 1) == 1]
    if "ConvWeight" in own_gradients and all(_is_of_images(node) for node in dense):
        return False
    own = len(dense) + sum(node.op_type == "BatchNormalization" for node in nodes)
    return own >= sum(node.op_type in ("MatMul", "Gemm") for node in nodes)


def _is_of_images(node: ir.Node) -> bool:
    """Whether a Conv has two axes: the accelerator may compute the gradient for its weights."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return weight is not None and weight.shape is not None and len(weight.shape) == 4


def pass_beside(backward: ir.Model) -> frozenset[str]:
    """Take gradients of weights that nothing in a backward reads out of its outputs: the node hands them over `beside` it.

    Args:
        backward: Changed.

    Returns:
        The names of the outputs that it no longer has.
    """
    taken = set()
    for node in backward.graph:
        if not is_python_op(node) or attr(node, "name") != qualified_name(ConvolutionGradient) or LINKED in node.attributes:
            continue
        call = read_attributes(values_of(node))
        if call.args[-1][:2] != (True, True):
            continue
        _, dx, weight, *_ = node.outputs
        if (
            weight.is_graph_output() and not weight.uses() and (dx.uses() or dx.is_graph_output())
        ):  # onnxruntime drops a node that nobody reads
            name = name_of(weight)
            call = dataclasses.replace(call, args=(*call.args, name))
            node.attributes.update({a.name: a for a in ir_attributes(write_attributes(call))})
            weight.shape = ir.Shape([0])
            backward.graph.outputs.remove(weight)
            taken.add(name)
    return frozenset(taken)


#: What the backward of a loaded file may call, where these rules made it; a file that names them itself is refused.
FUNCTIONS = (BatchNormGradient, ConvolutionGradient)

#: operator -> the rule that takes the place of the standard one.
OVERRIDES: dict[str, Callable[..., Grads]] = {
    "BatchNormalization": _batch_normalization,
    "Conv": _convolution,
}

assert all(("", name) in RULES for name in OVERRIDES)
