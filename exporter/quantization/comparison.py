"""A model in integers beside the same model in rounded floats: levels that differ, by quantiser, and what becomes of the outputs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from symbolics.errors import ArgumentError, RunError
from symbolics.graph.values import describe, is_python_op
from symbolics.graph.walk import walk
from symbolics.text import clean, reason

__all__ = ["Comparison", "compare", "quantized_name"]

#: Of an input, how many shapes a report says.
_SHAPES = 4

#: By what share of the largest element of an output another one differs because sums are in another order, at most.
_ORDER = 1e-3

#: Behind the name of a quantiser's value: the input that takes its place.
_GIVEN = "/given"


@dataclass(frozen=True)
class Comparison:
    """What was compared on some inputs.

    Attributes:
        levels: Quantiser -> the share of its levels that are not the fake-quantised model's.
        steps: Quantiser -> by how many steps a level differs at most.
        layers: Quantiser -> how many of its levels differ from what the fake-quantised model makes of the very levels that the integers
            have before it, and how many levels there are. It does not grow with the depth of the model.
        outputs: Output -> the largest difference of the file as it is opened elsewhere, with no output but its own.
        opened: Output -> the share of its elements that are others there than where the levels are outputs, too: an optimizer of onnxruntime that finds
            no level among the outputs may take some of them out.
        tails: Output -> its difference from what the fake-quantised model makes of the very levels that the integers have, as root mean
            square over that of the output; the share of elements for an output of integers. An output that is a quantiser is in ``levels``.
        classes: Output of two axes -> the share of rows whose largest element is another one.
        runs: How many inputs.
        different: How many of them are different.
        shapes: Input of the model -> its types and shapes on them, each once: ``float32[2, 3, 48, 48]``.
    """

    levels: dict[str, float]
    steps: dict[str, float]
    layers: dict[str, tuple[int, int]]
    outputs: dict[str, float]
    opened: dict[str, float]
    tails: dict[str, float]
    classes: dict[str, float]
    runs: int
    different: int
    shapes: dict[str, list[str]]

    def __str__(self) -> str:
        """A line for each quantiser and each output."""
        return "\n".join(
            [f"{self._count}, beside the model in rounded floats"]
            + [f"  input {clean(name)}: {_listed(shapes)}" for name, shapes in self.shapes.items()]
            + [
                f"  levels of {clean(name)}: {share:.4%} differ, by {self.steps[name]:.0f} at most; "
                f"with the same levels before it: {self.layers[name][0]} of {self.layers[name][1]}"
                for name, share in self.levels.items()
            ]
            + [
                f"  output {clean(name)}: {gap:.1e} at most"
                + (f", {self.tails[name]:.1e} (rms, of its own) with the same levels" if name in self.tails else "")
                + (f", another class in {self.classes[name]:.2%}" if name in self.classes else "")
                for name, gap in self.outputs.items()
            ]
        )

    @property
    def _count(self) -> str:
        count = f"{self.runs} input{'s' * (self.runs != 1)}"
        return count if self.different == self.runs else f"{count}, {self.different} of them different"


def _listed(shapes: Sequence[str]) -> str:
    return ", ".join(shapes[:_SHAPES]) + (f" and {len(shapes) - _SHAPES} more" if len(shapes) > _SHAPES else "")


def compare(rounded: ir.Model, integers: ir.Model, scales: Mapping[str, float], inputs: Sequence[Mapping[str, Any]]) -> Comparison:
    """Run both models on inputs, on onnxruntime's CPU.

    Args:
        rounded: The model in rounded floats, its functions inlined.
        integers: The model in integers.
        scales: Value of a quantiser in ``rounded`` -> its step. In ``integers`` it is called what `quantized_name` says.
        inputs: The arrays of each run, by input.

    Raises:
        ArgumentError: There are no inputs.
        RunError: onnxruntime does not open a model, or cannot run it on the inputs.
    """
    if not inputs:
        raise ArgumentError("there is nothing to compare on: give at least one dictionary of arrays, by input")
    outputs = [str(value.name) for value in rounded.graph.outputs]
    held = {str(value.name) for node in integers.graph for value in node.outputs}
    names = {name: place for name in scales if (place := quantized_name(name, outputs)) in held}
    if missing := [name for name in outputs if name not in {value.name for value in integers.graph.outputs}]:
        raise ArgumentError(
            f"the model has the output {clean(missing[0])!r}, and the file in integers has {', '.join(clean(str(value.name)) for value in integers.graph.outputs)}: "
            "give the very file that was quantised, or give both exports the same output_names="
        )
    level = onnxruntime.GraphOptimizationLevel
    one = _session(rounded, [name for name in names if name not in outputs], level.ORT_DISABLE_ALL)
    two = _session(integers, [name for name in names.values() if name not in outputs], level.ORT_ENABLE_ALL)
    as_opened = _session(integers, [], level.ORT_ENABLE_ALL)
    given = [name for name in names if name not in outputs]
    behind = _session(_from_levels(rounded, given), [], level.ORT_DISABLE_ALL)
    tails = {name: _Apart() for name in outputs if name not in names}
    off, total, steps = dict.fromkeys(names, 0), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    alone = dict.fromkeys(names, 0)
    gaps, rows, moved = dict.fromkeys(outputs, 0.0), dict.fromkeys(outputs, 0), dict.fromkeys(outputs, 0)
    others, sizes = dict.fromkeys(outputs, 0), dict.fromkeys(outputs, 0)
    different: set[bytes] = set()
    shapes: dict[str, dict[str, None]] = {str(value.name): {} for value in one.get_inputs()}
    for feeds in inputs:
        wanted = _run(one, feeds)
        values, opened = _run(two, feeds), _run(as_opened, feeds)
        arrays = {name: np.asarray(feeds[name]) for name in shapes if name in feeds}
        different.add(_digest(arrays))
        for name, array in arrays.items():
            shapes[name][f"{array.dtype}{list(array.shape)}"] = None
        found = {name: values[names.get(name, name)] for name in (*outputs, *names)}
        same_levels = _run(behind, {**feeds, **{f"{name}{_GIVEN}": found[name] for name in given}})
        for name in names:
            apart, apart_alone = (np.abs(each[name] - found[name]) / scales[name] for each in (wanted, same_levels))
            alone[name] += int((apart_alone > 0.5).sum())
            off[name] += int((apart > 0.5).sum())
            total[name] += apart.size
            steps[name] = max(steps[name], float(np.rint(apart.max(initial=0.0))))
        for name, apart_by in tails.items():
            apart_by.add(same_levels[name], found[name])
        for name in outputs:
            result = opened[names.get(name, name)]
            others[name] += _others(found[name], result)
            sizes[name] += result.size
            gaps[name] = max(gaps[name], float(np.abs(wanted[name].astype(np.float64) - result).max(initial=0.0)))
            if wanted[name].ndim == 2 and wanted[name].size:
                choices = wanted[name].argmax(-1)
                rows[name] += choices.size
                moved[name] += int((choices != result.argmax(-1)).sum())
    return Comparison(
        {name: off[name] / max(total[name], 1) for name in names},
        steps,
        {name: (alone[name], total[name]) for name in names},
        gaps,
        {name: others[name] / max(sizes[name], 1) for name in outputs},
        {name: apart_by.share for name, apart_by in tails.items()},
        {name: moved[name] / rows[name] for name in outputs if rows[name]},
        len(inputs),
        len(different),
        {name: list(each) for name, each in shapes.items() if each},
    )


def _others(one: np.ndarray, two: np.ndarray) -> int:
    """How many elements of an output are others, by more than the order of a sum explains."""
    if one.dtype.kind != "f":
        return int((one != two).sum())
    a, b = one.astype(np.float64), two.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        return int((~same & ~(np.abs(a - b) <= _ORDER * scale)).sum())


class _Apart:
    """How far arrays are from others, over all of them."""

    def __init__(self) -> None:
        self.difference = self.size = 0.0

    def add(self, wanted: np.ndarray, found: np.ndarray) -> None:
        one, other = (each.astype(np.float64) if each.dtype.kind == "f" else each for each in (wanted, found))
        same = (one == other) | ((one != one) & (other != other))
        if wanted.dtype.kind == "f":
            self.difference += float((np.subtract(one, other, out=np.zeros_like(one), where=~same) ** 2).sum())  # two infinities have none
            self.size += float((one[np.isfinite(one)] ** 2).sum())
        else:
            self.difference += int((~same).sum())
            self.size += one.size
        self.floats = wanted.dtype.kind == "f"

    @property
    def share(self) -> float:
        if self.difference != 0:  # so is NaN
            share = self.difference / self.size if self.size else math.inf
            return math.sqrt(share) if self.floats else share
        return 0.0


def _from_levels(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of a model that is given the values of these names, and gives what it would have made them."""
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    for name in names:
        given = ir.Value(name=f"{name}{_GIVEN}", type=values[name].type or ir.TensorType(ir.DataType.FLOAT))
        values[name].replace_all_uses_with(given)
        copy.graph.inputs.append(given)
        copy.graph.outputs.append(values[name])
    return copy


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The same for the same inputs."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        numbers = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + numbers)
    return digest.digest()


def quantized_name(name: str, outputs: Container[str]) -> str:
    """What a quantiser's value is called in the model in integers: an output keeps its name."""
    return name if name in outputs else f"{name}/quantized"


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    try:
        results = session.run(None, dict(feeds))
    except Exception as error:
        raise RunError(f"onnxruntime cannot run the model on these inputs: {reason(error)}") from error
    return dict(zip([value.name for value in session.get_outputs()], results, strict=True))


def _session(model: ir.Model, more: Sequence[str], level: Any) -> onnxruntime.InferenceSession:
    """A session of a model that gives more of its values. Of QuantizeLinear in rounded floats, an optimizer would make integers of its own."""
    if (call := next((describe(node) for node in walk(model.graph) if is_python_op(node)), None)) is not None:
        raise RunError(
            f"a model is compared without Python, and {call} runs it\n  way out: export with portable=True, or declare it with exporter.quantizer"
        )
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.extend(values[name] for name in more)
    for value in copy.graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads, options.graph_optimization_level = 4, 1, level
    try:
        return onnxruntime.InferenceSession(ir.to_proto(copy).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RunError(f"onnxruntime does not open the model: {reason(error)}") from error
