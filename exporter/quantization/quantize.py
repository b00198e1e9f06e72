"""exporter.quantize: a fake-quantised model as a file that runs in integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from exporter.errors import short
from exporter.files.program import Program
from exporter.quantization.barriers import keep_in_float
from exporter.quantization.comparison import Comparison, compare
from exporter.quantization.evaluation import Constants
from exporter.quantization.groups import SIZES
from exporter.quantization.kernels import kernels_of
from exporter.quantization.prepared import count_declared, forget, prepare
from exporter.quantization.products import Product, find_products, group_weights, products_in_bodies, weights_of
from exporter.quantization.quantizers import find_quantizers
from exporter.quantization.refused import nothing_in_integers
from exporter.quantization.writer import Writer
from symbolics.errors import ArgumentError, ExportError
from symbolics.graph.values import describe
from symbolics.graph.walk import remove_unread, walk
from symbolics.text import clean

__all__ = ["Activation", "Quantized", "QuantizedProduct", "quantize"]

#: The opset since which weights may be of 4 bits in blocks, and what has changed its meaning on the way there from the oldest that files have.
_BLOCKS, _CHANGED = 21, {"DFT", "GridSample", "GroupNormalization"}
#: What a share that is an estimate is told as: the next of these.
_SHARES = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1)


@dataclass(frozen=True)
class QuantizedProduct:
    """A convolution or matrix product of a quantised model.

    Attributes:
        name: The name of its node.
        operator: ``"Conv"``, ``"Gemm"`` or ``"MatMul"``.
        kernel: The operator that onnxruntime runs in integers for it on this machine's CPU, "" where it runs in float.
        bits: The bits that its weight needs, 0 where it has none in integers.
        moved: The share of what it gives that the rounding of its bias to int32 moves by a level, about; linear layers keep theirs in float.
        reason: Why it runs in float, "" where it does not.
        error: Of a weight that was rounded to 4 bits: the root of the mean square that it is off by, over that of the weight. 0.0: it is the model's, bit by bit.
    """

    name: str
    operator: str
    kernel: str
    bits: int
    moved: float
    reason: str
    error: float = 0.0


@dataclass(frozen=True)
class Activation:
    """A quantiser of activations.

    Attributes:
        name: The value that it gave in the model.
        scale: Its step.
        zero_point, low, high: The levels of 0.0, of the lowest and of the highest number, in uint8.
        floats: By how many float32 numbers a threshold between two levels is away from the model's, at most.
        moved: How many thresholds are.
    """

    name: str
    scale: float
    zero_point: int
    low: int
    high: int
    floats: int
    moved: int


@dataclass(repr=False)
class Quantized(Program):
    """A model in integers. Save and load it as any other `Program`; ``print`` shows what runs in integers.

    Attributes:
        products: Its convolutions and matrix products, and which of them run in integers.
        activations: Its quantisers of activations.
        left: What rounds but stayed as it was -> why.
        rounded: The model before, in rounded floats, for `compare`.
    """

    products: list[QuantizedProduct] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    rounded: ir.Model | None = None

    @short
    def compare(self, *inputs: Mapping[str, Any]) -> Comparison:
        """Run the model in integers and the one in rounded floats on your data, on onnxruntime's CPU.

        Args:
            inputs: Dictionaries of arrays by input name, one for each run. Real data says more than random numbers.

        Returns:
            The share of levels that differ for each quantiser, and the largest difference of each output.

        Raises:
            ArgumentError: There are no inputs.
            RunError: onnxruntime cannot run a model on the inputs.
        """
        assert self.rounded is not None
        return compare(self.rounded, self.model, {each.name: each.scale for each in self.activations}, inputs)

    def __str__(self) -> str:
        """A line for each product that runs in float, and the counts."""
        integers = sum(bool(each.kernel) for each in self.products)
        moved = sum(each.moved for each in self.activations)
        most = max((each.moved for each in self.products), default=0.0)
        bound = next((share for share in _SHARES if most <= share), 1.0)
        few = [each for each in self.products if each.kernel == "MatMulNBits"]
        off = [each.error for each in few if each.error]
        lines = [
            f"{integers} of {len(self.products)} products run in integers",
            *([f"{len(few)} of them by weights of 4 bits, {_off(off)}; what they take is rounded to 8 bits by the kernel"] if few else []),
            f"{len(self.activations)} quantisers of activations, {moved} of their thresholds moved by {max((a.floats for a in self.activations), default=0)} float32 at most",
            *(
                [f"biases of convolutions in int32 move up to about {bound:.2%} of the levels of one, by one level (mean of its channels)"]
                if most > 0
                else []
            ),
            *(f"  float: {clean(each.operator)} {clean(each.name)}: {each.reason}" for each in self.products if not each.kernel),
            *(f"  left: {clean(name)}: {reason}" for name, reason in self.left.items()),
        ]
        return "\n".join(lines)


def _off(errors: Sequence[float]) -> str:
    return f"{len(errors)} of which are rounded, {max(errors):.1%} off at most (rms)" if errors else "bit by bit the model's"


@short
def quantize(model: Any, *, weights: Literal["int4"] | None = None, group: int | None = None) -> Quantized:
    """Make a model in integers of a fake-quantised model, in a form that onnxruntime runs in integer kernels.

    A fake-quantised model rounds its floats to evenly spaced levels. Quantisers are found by what they compute: torch's
    fake_quantize, Functions of your own (export with ``portable=True``), operators, or QuantizeLinear and DequantizeLinear.
    Each threshold between two levels is found to the last bit, and compared with that of the file. Weights become integers
    only where they are whole multiples of a float32, bit by bit. Batch normalizations behind convolutions go into scales and
    biases. Biases of convolutions become int32, in steps of the activation's scale times the weight's. Biases of linear layers
    stay.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one, such as a `Program`. Export it
            after training, in eval mode. It is not changed.
        weights: "int4": matrix products that would stay in float get weights of 4 bits. Each group of numbers has a step and a
            zero point of its own. A weight on such a grid stays the same bit by bit; any other is rounded, and ``products``
            says by how much. The file has opset 21. None: no such weights.
        group: With ``weights``: how many numbers of a column share a step: 16, 32, 64, 128 or 256. None: the largest group in
            which the weight is exact, or 32.

    Returns:
        The model in integers, and what became of each product.

    Raises:
        ArgumentError: ``weights`` or ``group`` has another value, or ``group`` is given without ``weights``.
        ExportError: Nothing in the model is quantised. The message has the reasons.
        FormatError: The model is not valid.

    Examples:
        >>> small = exporter.quantize(linear_program, weights="int4")
        >>> small.save("small.onnx")
    """
    _check_choice(weights, group)
    prepared = prepare(model)
    copy, declared = prepared.model, prepared.declared
    constants = Constants(copy)
    grids = weights_of(copy, constants)
    quantizers, missed = find_quantizers(copy, constants)
    for quantizer in quantizers:
        count_declared(quantizer, declared)
    products = find_products(copy, constants, grids, quantizers, missed)
    if weights is not None:
        group_weights(products, constants, group)
    products += products_in_bodies(copy)
    if all(product.reason for product in products):
        raise nothing_in_integers(copy, products, quantizers, missed)
    rounded, writer = copy.clone(), Writer(copy)
    for product in products:
        if product.groups is not None:
            writer.write_groups(product.node, product.groups)
        elif not product.reason:
            writer.write_product(product)
    names = {each: writer.write_quantizer(each) for each in quantizers}
    remove_unread(copy.graph, prepared.kept)
    keep_in_float(copy, products)
    if any(product.groups is not None for product in products):
        _raise_opset(copy)
    forget(copy)
    kernels = kernels_of(copy, [product.node for product in products if not product.reason])
    rows = [_row(product, kernels) for product in products]
    activations = [
        Activation(n, float(e.grid.scale), e.grid.zero, e.grid.low, e.grid.high, e.grid.floats, e.grid.moved) for e, n in names.items()
    ]
    left = {each.step.outputs[0].name or "": each.reason for each in missed}
    return Quantized(copy, products=rows, activations=activations, left=left, rounded=rounded)


def _check_choice(weights: Any, group: Any) -> None:
    if weights not in (None, "int4"):
        raise ArgumentError(f"exporter.quantize: weights is 'int4' or None, not {clean(repr(weights))[:60]}")
    if group is not None and (weights is None or isinstance(group, bool) or group not in SIZES):
        raise ArgumentError(
            f"exporter.quantize: group is {', '.join(map(str, SIZES))}, with weights='int4' alone, not {clean(repr(group))[:60]}"
        )


def _raise_opset(model: ir.Model) -> None:
    """Name the opset in which DequantizeLinear has blocks of 4 bits; of operators that mean something else there, none may be in the model."""
    old = model.opset_imports[""]
    if old >= _BLOCKS:
        return
    other = next((node for node in walk(model.graph) if not node.domain and node.op_type in _CHANGED), None)
    if other is not None:
        raise ExportError(
            f"weights='int4' needs opset {_BLOCKS}, in which {describe(other)} means something else than in {old}.\n"
            f"  way out: export with opset_version={_BLOCKS}"
        )
    model.opset_imports[""], model.ir_version = _BLOCKS, max(model.ir_version, 10)


def _row(product: Product, kernels: dict[ir.Node, str] | str) -> QuantizedProduct:
    bits, kernel = 0, "" if isinstance(kernels, str) else kernels.get(product.node, "")
    if product.weight is not None and not product.reason:
        levels = product.weight.levels.astype(np.int64) - product.weight.zero
        levels //= max(int(np.gcd.reduce(levels, axis=None)), 1)
        bits = max(int(levels.max()).bit_length(), (~int(levels.min())).bit_length() if levels.min() < 0 else 0) + int(levels.min() < 0)
    if product.groups is not None:
        bits = 4
    error = product.groups.error if product.groups is not None else 0.0
    reason = product.reason or ("" if kernel else kernels if isinstance(kernels, str) else "onnxruntime does not fuse it here")
    return QuantizedProduct(product.node.name or "", product.operator, kernel, bits, product.moved, reason, error)
