"""QONNX: a fake-quantised model with Quant and BipolarQuant nodes, for what builds hardware of it; and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.errors import short
from exporter.files.program import Program
from exporter.quantization.evaluation import Constants
from exporter.quantization.grids import Grid, WeightGrid, thresholds
from exporter.quantization.prepared import forget, in_memory, prepare
from exporter.quantization.products import weights_of
from exporter.quantization.qonnx_nodes import DOMAIN, ends_of, from_qonnx_nodes
from exporter.quantization.quantizers import Quantizer, find_bipolar, find_quantizers, function_of
from symbolics.errors import ExportError, FormatError
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import describe, graph_of, name_of
from symbolics.graph.walk import remove_unread
from symbolics.text import clean

__all__ = ["Qonnx", "QonnxQuantizer", "from_qonnx", "to_qonnx"]


@dataclass(frozen=True)
class QonnxQuantizer:
    """A Quant or BipolarQuant node.

    Attributes:
        name: The value that it gives.
        operator: ``"Quant"`` or ``"BipolarQuant"``.
        weight: Whether it rounds a weight, which is then bit by bit the model's.
        bits: Its bit width.
        signed, narrow: As its attributes say.
        zero_point: Its zero point.
        floats: By how many float32 numbers a threshold between two levels is away from the model's, at most.
        moved: How many thresholds are.
    """

    name: str
    operator: str
    weight: bool
    bits: int
    signed: bool
    narrow: bool
    zero_point: int = 0
    floats: int = 0
    moved: int = 0


@dataclass(repr=False)
class Qonnx(Program):
    """A model with quantisers of QONNX. Save it as any other `Program`. onnxruntime does not run it; use `from_qonnx` for that.

    Attributes:
        quantizers: Its Quant and BipolarQuant nodes.
        left: What rounds but stayed as it was -> why.
    """

    quantizers: list[QonnxQuantizer] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The counts, and a line for what stayed as it was."""
        weights = sum(each.weight for each in self.quantizers)
        moved = sum(each.moved for each in self.quantizers)
        floats = max((each.floats for each in self.quantizers), default=0)
        lines = [
            f"{len(self.quantizers)} quantisers of QONNX, {weights} of weights",
            f"{moved} thresholds of activations moved by {floats} float32 at most",
            *(f"  left: {clean(name)}: {reason}" for name, reason in self.left.items()),
        ]
        return "\n".join(lines)


@short
def to_qonnx(model: Any) -> Qonnx:
    """Write the quantisers of a fake-quantised model as nodes of QONNX, for FINN and hls4ml.

    The nodes are Quant, and BipolarQuant for two levels around 0 (``qonnx.custom_op.general``). Quantisers are found as by
    `quantize`, of activations and of the weights of convolutions and matrix products. All else stays as it is. Weights stand in
    the file as the model multiplies by them, before a Quant that changes no bit of them.

    Args:
        model: As `quantize` takes it. It is not changed.

    Returns:
        The model, with a list of its quantisers.

    Raises:
        ExportError: Nothing in the model is quantised.
        FormatError: The model is not valid.
    """
    prepared = prepare(model)
    copy = prepared.model
    constants = Constants(copy)
    weights = weights_of(copy, constants)
    quantizers, missed = find_quantizers(copy, constants)
    bipolar = find_bipolar(copy, constants)
    scope = Scope(free_prefix(copy.graph, "qonnx/"), lambda value: False)
    made = [_weight(scope, node, grid, constants) for node, grid in weights.items() if isinstance(grid, WeightGrid)]
    functions = [function_of(copy, constants, each) for each in quantizers]
    made += [_activation(scope, each, function) for each, function in zip(quantizers, functions, strict=True)]
    made += [_two_levels(scope, *each) for each in bipolar]
    if not made:
        reasons = [f"  {describe(node)}: {grid}" for node, grid in weights.items()][:2] + [
            f"  {describe(m.step)}: {m.reason}" for m in missed[:1]
        ]
        raise ExportError(
            "\n".join(["nothing in the model is quantised.", *reasons, "  way out: train with quantisers, and export with portable=True"])
        )
    scope.register(copy.graph)
    remove_unread(copy.graph, prepared.kept)
    copy.opset_imports[DOMAIN] = 1
    forget(copy)
    return Qonnx(copy, quantizers=made, left={each.step.outputs[0].name or "": each.reason for each in missed})


@short
def from_qonnx(model: Any) -> Program:
    """Make a model in standard operators of one with quantisers of QONNX: Quant, IntQuant and BipolarQuant.

    The model may come from `to_qonnx`, brevitas or other tools. The result runs on onnxruntime, in rounded floats. `quantize`
    makes integers of it, and takes a QONNX file directly, too.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one. It is not changed.

    Returns:
        The model in standard operators, a `Program`.

    Raises:
        FormatError: The model is not valid, has no such quantiser, or one that is damaged or not read (Trunc, FloatQuant).
    """
    copy = in_memory(model)
    if not from_qonnx_nodes(copy):
        raise FormatError(f"the model has no quantiser of QONNX: no Quant, IntQuant or BipolarQuant of the domain {DOMAIN}")
    return Program(copy)


# ------------------------------------------------------------------------------------------------------------- the nodes
def _weight(scope: Scope, node: ir.Node, grid: WeightGrid, constants: Constants) -> QonnxQuantizer:
    value = node.inputs[1]
    assert value is not None
    op = Emitter(scope)
    held = op.constant(constants.array(value), ir.DataType.FLOAT)
    levels = grid.levels.astype(np.int64) - grid.zero
    shape = [1] * levels.ndim
    if grid.axis is not None:
        shape[grid.axis] = -1
    scale = grid.scale.reshape(shape) if grid.scale.size > 1 else grid.scale.reshape(())
    signed, name = levels.min() < 0, name_of(value)
    if set(np.unique(levels)) == {-1, 1}:
        result = op.node("BipolarQuant", [held, op.constant(scale, ir.DataType.FLOAT)], domain=DOMAIN)
        row = QonnxQuantizer(name, "BipolarQuant", True, 1, True, False)
    else:
        bits, narrow, zero = _range(int(min(levels.min(), 0)), int(levels.max()), shift=bool(grid.zero))
        result = _quant(op, held, scale, zero, bits, signed and not zero, narrow)
        row = QonnxQuantizer(name, "Quant", True, bits, bool(signed and not zero), narrow, zero)
    result.shape = ir.Shape(levels.shape)
    graph_of(node).insert_before(node, op.nodes)
    node.replace_input_with(1, result)
    return row


def _range(low: int, high: int, *, shift: bool) -> tuple[int, bool, int]:
    """The bits, whether the range is narrow, and the zero point, in which the levels from ``low`` to ``high`` fit; with ``shift`` in the fewest bits."""
    if low >= 0:
        return max(high.bit_length(), 1), False, 0
    bits = max(high.bit_length(), (-low).bit_length() if -low != 1 << (-low).bit_length() - 1 else (-low).bit_length() - 1) + 1
    whole = (high - low).bit_length()
    if shift and 0 < whole < bits:  # far from the middle: a zero point takes a bit less
        return whole, False, -low
    return max(bits, 2), low >= ends_of(max(bits, 2), True, True)[0], 0


def _activation(scope: Scope, quantizer: Quantizer, function: Any) -> QonnxQuantizer:
    grid, result = quantizer.grid, quantizer.result
    producer = result.producer()
    assert producer is not None
    low, high = grid.low - grid.zero, grid.high - grid.zero
    bits, narrow, zero = _range(low, high, shift=True)
    signed = low < 0 and not zero
    op = Emitter(scope)
    source = quantizer.source
    first, last = (end - zero for end in ends_of(bits, signed, narrow))
    if (first, last) != (low, high):  # no number of bits ends there
        source = op.Clip(source, float(np.float32(low) * grid.scale), float(np.float32(high) * grid.scale))
        source.shape = quantizer.source.shape
    value = _quant(op, source, np.array(grid.scale), zero, bits, signed, narrow)
    gap = _apart(grid, function, zero)
    replace(scope, producer, op.nodes, [value if each is result else None for each in producer.outputs])
    return QonnxQuantizer(name_of(value), "Quant", False, bits, signed, narrow, zero, int(gap.max(initial=0)), int((gap > 0).sum()))


def _apart(grid: Grid, function: Any, zero: int) -> np.ndarray:
    """By how many float32 numbers each threshold of what is written, as the definition computes it, is away from the model's."""

    def written(x: np.ndarray) -> np.ndarray:
        q = np.rint(np.clip(x / grid.scale + np.float32(zero), grid.low - grid.zero + zero, grid.high - grid.zero + zero))
        return np.asarray((q - np.float32(zero)) * grid.scale, np.float32)

    return np.abs(thresholds(function, grid.values) - thresholds(written, grid.values))


def _two_levels(scope: Scope, source: ir.Value, result: ir.Value, scale: np.float32) -> QonnxQuantizer:
    producer = result.producer()
    assert producer is not None
    op = Emitter(scope)
    value = op.node("BipolarQuant", [source, op.constant(scale, ir.DataType.FLOAT)], domain=DOMAIN)
    replace(scope, producer, op.nodes, [value if each is result else None for each in producer.outputs])
    return QonnxQuantizer(name_of(value), "BipolarQuant", False, 1, True, False)


def _quant(op: Emitter, source: ir.Value, scale: np.ndarray, zero: int, bits: int, signed: bool, narrow: bool) -> ir.Value:
    made: ir.Value = op.node(
        "Quant", [source, op.constant(scale, ir.DataType.FLOAT), float(zero), float(bits)], domain=DOMAIN,
        signed=int(signed), narrow=int(narrow), rounding_mode="ROUND",
    )  # fmt: skip
    return made
