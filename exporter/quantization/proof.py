"""A file in integers against its fake-quantised model: thresholds, levels, outputs, and whether that is within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.errors import short
from exporter.quantization.comparison import Comparison, compare, quantized_name
from exporter.quantization.evaluation import Constants, compiled
from exporter.quantization.grids import TOLERATED_FLOATS, TOLERATED_SHARE, number_of, thresholds
from exporter.quantization.prepared import in_memory, prepare
from exporter.quantization.products import MOVES
from exporter.quantization.quantizers import Quantizer, find_quantizers, function_of
from symbolics.errors import ExportError
from symbolics.graph.values import name_of
from symbolics.text import clean

__all__ = ["Limits", "Proof", "Thresholds", "verify_quantized"]

#: So many levels of a layer may be others because its sums are rounded in another order: where a value is on a threshold.
_ON_THRESHOLDS = 2

#: So many steps from its ends every quantiser to bytes has cut off.
_FURTHER = 300


@dataclass(frozen=True)
class Limits:
    """What may differ.

    Attributes:
        floats, levels, classes, outputs: As `verify_quantized` takes them.
    """

    floats: int | None
    levels: float
    classes: float
    outputs: float


@dataclass(frozen=True)
class Thresholds:
    """The thresholds between the levels of a quantiser, in both models, found by bisection.

    Attributes:
        count: How many there are.
        moved: How many are not the same number.
        floats: By how many float32 numbers one is away, at most.
        share: By which share of a step, at most.
        beyond: How many levels further than the model's the integers go, at both ends together.
    """

    count: int
    moved: int
    floats: int
    share: float
    beyond: int = 0


@dataclass(frozen=True)
class Proof:
    """What became of a comparison.

    Attributes:
        thresholds: Quantiser of the fake-quantised model -> its thresholds in both.
        absent: Quantisers that the file in integers has not: what they round stays in float, and is the same in both.
        compared: Levels and outputs on the inputs.
        limits: What may differ.
        biases: Quantiser -> the share of its levels that may move, at most, because the bias of the convolution before it is rounded to int32:
            half a step of the bias in each channel. `QuantizedProduct.moved` is the mean of what the channels do move.
    """

    thresholds: dict[str, Thresholds]
    absent: list[str]
    compared: Comparison
    limits: Limits
    biases: dict[str, float]

    @property
    def failures(self) -> list[str]:
        """What passes a limit, a line each."""
        limits = self.limits
        levels = [
            f"{share:.3%} of the levels of {clean(name)} differ, more than {limits.levels:.3%}"
            for name, share in self.compared.levels.items()
            if share > limits.levels
        ]
        layers = []
        for name in self._over:
            off, count = self.compared.layers[name]
            beside = (
                f"; rounding the bias before it to int32 moves {self.biases[name]:.1%} at most, half a step in each channel (quantize tells the mean)"
                if self._rounds(name)
                else ""
            )
            layers.append(
                f"{off} of {count} levels of {clean(name)} differ where all before it are the same, more than {limits.outputs:.3%}{beside}"
            )
        return [*self._of_thresholds, *levels, *layers, *self._of_outputs]

    @property
    def _of_thresholds(self) -> list[str]:
        limits, found = self.limits, []
        for name, each in self.thresholds.items():
            most = TOLERATED_FLOATS if limits.floats is None else limits.floats
            if each.floats > most and (limits.floats is not None or each.share > TOLERATED_SHARE):
                found.append(f"a threshold of {clean(name)} is {each.floats} float32 away, {each.share:.1e} of a step")
            elif each.beyond and each.share < 0.25:  # with another step the ends are elsewhere, too
                found.append(
                    f"{clean(name)} goes {each.beyond} level{'s' if each.beyond > 1 else ''} further than the model's: what is large is cut off elsewhere"
                )
        return found

    @property
    def _of_outputs(self) -> list[str]:
        limits = self.limits
        classes = [
            f"{share:.3%} of the rows of {clean(name)} have another class, more than {limits.classes:.3%}"
            for name, share in self.compared.classes.items()
            if share > limits.classes
        ]
        opened = [
            f"{share:.3%} of the elements of {clean(name)} are others when the file is opened as it is than with its levels among the outputs, more than "
            f"{limits.levels:.3%}: an optimizer of onnxruntime takes levels out"
            for name, share in self.compared.opened.items()
            if share > limits.levels
        ]
        return [*classes, *opened] + [
            f"the output {clean(name)} differs by {share:.3%} (rms) where all levels are the same, more than {limits.outputs:.3%}"
            for name, share in self.compared.tails.items()
            if not share <= limits.outputs
        ]

    @property
    def _over(self) -> list[str]:
        """The quantisers of which more levels differ than may where all before them are the same."""
        return [name for name, (off, count) in self.compared.layers.items() if off > 1 + self.limits.outputs * count]

    def _rounds(self, name: str) -> bool:
        """Whether no more levels of a quantiser differ than the rounding of a bias may move."""
        off, count = self.compared.layers[name]
        return off <= self.biases.get(name, 0.0) * count

    @property
    def way_out(self) -> str:
        """The limits to set, where too much differs and each layer by itself is as `quantize` writes it; "" where one is not.

        A layer may differ by the biases of convolutions, which are rounded to int32, or by a level or two on a threshold. What that does to levels
        further on follows from it; another class is never explained.
        """
        over, levels = self._over, max(self.compared.levels.values(), default=0.0)
        rounded = bool(over) and all(map(self._rounds, over))
        right = all(self._rounds(name) or self.compared.layers[name][0] <= _ON_THRESHOLDS for name in over)
        if not rounded and (not right or self._of_thresholds or self._of_outputs or not self.failures):
            return ""
        shares = {name: off / max(count, 1) for name, (off, count) in self.compared.layers.items()}
        wanted = {"outputs": max(map(shares.__getitem__, over))} if over else {}
        if levels > self.limits.levels:
            wanted["levels"] = levels
        numbers = {name: f"{math.ceil(share * 1000) / 1000:g}" for name, share in wanted.items()}
        options = " ".join(f"--max-{name} {number}" for name, number in numbers.items())
        limits = f"set {', '.join(f'{name}={number}' for name, number in numbers.items())} ({options})"
        if rounded:
            return f"way out: quantize rounds the biases of convolutions to int32. If {max(wanted.values()):.2%} of the levels may move by that, {limits}"
        classes = max(self.compared.classes.values(), default=None)
        judged = "are as good on your data" if classes is None else f"are as good (another class in {classes:.2%} of the rows)"
        alone = f"{max(shares.values(), default=0.0):.3%} of its levels differ at most where all before it are the same"
        return f"way out: each layer alone is right ({alone}); all else comes from the layers before. If the outputs {judged}, {limits}"

    @property
    def ok(self) -> bool:
        """Whether everything is within the limits."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        return {**asdict(self), "failures": self.failures, "way_out": self.way_out, "ok": self.ok}

    def __str__(self) -> str:
        """The counts, a line for each quantiser and output, and what passes a limit."""
        lines = [
            f"  thresholds of {clean(name)}: {each.moved} of {each.count} moved, by {each.floats} float32 at most ({each.share:.1e} of a step)"
            for name, each in self.thresholds.items()
        ]
        lines += [f"  not in integers: {clean(name)}" for name in self.absent]
        verdict = [f"  too far: {failure}" for failure in self.failures] or ["within the limits"]
        verdict += [f"  {self.way_out}"] if self.way_out else []
        return "\n".join([f"{len(self.thresholds)} quantisers of activations, by bisection", *lines, str(self.compared), *verdict])


@short
def verify_quantized(
    integers: Any,
    model: Any,
    *inputs: Mapping[str, Any],
    floats: int | None = None,
    levels: float = 0.05,
    classes: float = 0.005,
    outputs: float = 0.001,
) -> Proof:
    """Compare a file that `quantize` wrote with the fake-quantised model that it was made of.

    Each threshold between two levels of each quantiser of activations is found by bisection in both, to the last bit. Then both
    run on your data, on onnxruntime's CPU. ``pythonop verify --quantized`` does the same.

    Args:
        integers: The file in integers: a path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one.
        model: The fake-quantised model, likewise. Its values must have the names that they had when the integers were made.
        inputs: Dictionaries of arrays by input name, one for each run.
        floats: By how many float32 numbers a threshold may be off. None: as far as `quantize` may write it, 2 or 1/32768 of a
            step.
        levels: The share of a quantiser's levels that may differ. It grows with the depth of the model, because a level on the
            other side of a threshold changes what comes behind it.
        classes: The share of an output's rows whose largest element may be another one.
        outputs: By how much an output may differ from what the fake-quantised model makes of the very levels that the integers
            have: root mean square over that of the output. Also the share of a quantiser's levels that may differ where all
            levels before it are the same, and one more.

    Returns:
        What was found. ``ok`` says whether it is within the limits.

    Raises:
        ArgumentError: There are no inputs.
        RunError: onnxruntime cannot run a model on the inputs.
        ExportError: The fake-quantised model has no quantiser, or the other file has none of them.
        FormatError: A model is not valid.
    """
    prepared, whole = prepare(model), in_memory(integers)
    constants = Constants(prepared.model)
    quantizers, _ = find_quantizers(prepared.model, constants)
    if not quantizers:
        raise ExportError(
            "the model has no quantiser of activations: there is nothing to compare with its integers.\n"
            "  way out: of weights of 4 bits alone, compare the outputs on your data: exporter.quantize(model, weights='int4').compare(*data), or --compare"
        )
    results = {name_of(value) for value in prepared.model.graph.outputs}
    made = {value.name: value for node in whole.graph for value in node.outputs}
    found: dict[str, Thresholds] = {}
    biases: dict[str, float] = {}
    absent: list[str] = []
    for quantizer in quantizers:
        name = name_of(quantizer.result)
        value = made.get(quantized_name(name, results))
        source = None if value is None else _source(value)
        if value is None or source is None:
            absent.append(name)
            continue
        if step := _step_of_bias(source):
            biases[name] = 0.5 * step / float(quantizer.grid.scale)
        record = prepared.declared.get(quantizer.result)
        found[name] = _compared(
            function_of(prepared.model, constants, quantizer),
            _first(compiled(whole, [source], [value])),
            quantizer,
            record.floats if record else 0,
        )
    if not found:
        raise ExportError(
            f"the file in integers has none of the {len(quantizers)} quantisers of the model, {clean(absent[0])!r} and others: it was made of another export.\n"
            "  way out: give the very file that `pythonop quantize` was given, or quantise this one"
        )
    scales = {name_of(each.result): float(each.grid.scale) for each in quantizers}
    return Proof(found, absent, compare(prepared.model, whole, scales, inputs), Limits(floats, levels, classes, outputs), biases)


def _first(call: Any) -> Any:
    return lambda x: call(x)[0]


def _source(value: ir.Value) -> ir.Value | None:
    """What is made levels of, and then a value."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    while node is not None and node.op_type in ("DequantizeLinear", "Clip", "QuantizeLinear") and not node.domain:
        source = node.inputs[0]
        if node.op_type == "QuantizeLinear":
            return source
        node = None if source is None else source.producer()
    return None


def _step_of_bias(value: ir.Value) -> float:
    """The step of a bias in int32, the largest of the channels: that of the convolution whose result a quantiser takes; 0.0 where there is none."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in {*MOVES, "Relu"}:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.domain or node.op_type != "Conv" or len(node.inputs) < 3 or node.inputs[2] is None:
        return 0.0
    bias = node.inputs[2].producer()
    if bias is None or bias.op_type != "DequantizeLinear" or any(each is None or each.const_value is None for each in bias.inputs[:2]):
        return 0.0
    levels, scale = (each.const_value for each in bias.inputs[:2] if each is not None)
    if levels is None or scale is None or levels.dtype != ir.DataType.INT32:
        return 0.0
    return float(np.abs(scale.numpy()).max(initial=0.0))


def _compared(function: Any, integers: Any, quantizer: Quantizer, beside: int) -> Thresholds:
    grid = quantizer.grid
    one, other = (thresholds(each, grid.values) for each in (function, integers))
    apart = np.abs(one - other)
    share = np.abs(number_of(one).astype(np.float64) - number_of(other)).max(initial=0.0) / float(grid.scale)
    far = np.float32(_FURTHER) * np.float32(grid.scale) * np.array([-1, 1], np.float32) + grid.values[[0, -1]].astype(np.float32)
    beyond = np.rint(np.abs(function(far).astype(np.float64) - integers(far)) / float(grid.scale)).sum()
    return Thresholds(len(apart), int((apart > 0).sum()), int(apart.max(initial=0)) + beside, float(share), int(beyond))
