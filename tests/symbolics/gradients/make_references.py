"""Makes data/references.xz, what test_conformance.py compares with: ``python -m tests.symbolics.gradients.make_references``.

The gradients come from onnx.reference alone, nothing of ours is asked: the node tests of the installed onnx are turned into
float64, and the derivative of ``sum(output * cotangent)`` is taken by central differences at each element (of large inputs:
at some), with two steps h and h/2 and Richardson's extrapolation ``(4 d(h/2) - d(h)) / 3``. Where the two steps or the slopes
of both sides do not agree, the point stands on a kink: another point is drawn, and elements that stay on one are left out.

    --only test_conv     cases whose name contains this, compared with what is stored; nothing is written
    --out FILE           where to, default: data/references.xz; takes an hour on one core

Cases that are gone, new or other than before are told by name. data/unusable.json has the names of node tests that
say nothing of a gradient, by the reason.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

__all__ = ["DATA", "FLOATS", "LOW", "Reference", "Unusable", "load", "node_tests", "reference_of", "unlike"]

DATA = Path(__file__).parent / "data"
STEP = 1e-3
#: Inputs of up to ALL elements are compared whole, larger ones at SAMPLES of them.
ALL, SAMPLES = 160, 96
#: How many points are tried, further and further from the test's own, until none of its elements is on a kink.
POINTS = 6

LOW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, *LOW}
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
#: Float inputs that say how to compute, and not what.
NOT_WRT = {
    "Resize": {1, 2}, "Upsample": {1}, "Dropout": {1}, "QuantizeLinear": {1}, "DequantizeLinear": {1}, "RoiAlign": {1}, "MaxRoiPool": {1},
    "NonMaxSuppression": {0, 1, 3, 4}, "OneHot": {0, 1}, "Range": {0, 1, 2}, "TreeEnsemble": {0}, "NegativeLogLikelihoodLoss": {2},
    "SoftmaxCrossEntropyLoss": {2},
}  # fmt: skip
#: The evaluator computes these in float32 whatever the type: their bodies stand in for them.
BODIES = {"LayerNormalization", "RMSNormalization"}
EXCLUDED = {"test_l1normalization_axis_last": "the evaluator leaves the absolute value out of p=1"} | {
    f"test_attention_{name}": "bfloat16, of which the evaluator rounds too much"
    for name in ("4d_padded_kv_bf16", "4d_padded_kv_bf16_expanded", "4d_causal_padded_kv_bf16", "4d_causal_padded_kv_bf16_expanded", "3d_causal_bf16")
}  # fmt: skip


class Unusable(Exception):
    """A node test that says nothing of a gradient."""


@dataclass
class Reference:
    """A case: where it was taken, and the gradients there.

    Attributes:
        op: The operator.
        feeds, cotangents, forward: By name, in the order of the file: inputs, gradients of the float outputs, outputs.
        exact: Whether the evaluator computed in float64 throughout.
        gradients: input -> (indices into the flat input, derivatives there, how much the two steps differed at most).
    """

    op: str
    feeds: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray]
    forward: dict[str, np.ndarray]
    exact: bool
    gradients: dict[str, tuple[np.ndarray, np.ndarray, float]] = field(default_factory=dict)


def node_tests() -> dict[str, tuple[onnx.ModelProto, Any]]:
    """name -> model and data of every node test of the installed onnx."""
    import onnx.backend.test.loader as loader

    found: dict[str, tuple[onnx.ModelProto, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in loader.load_model_tests(kind="node"):
            name = case.name
            while name in found:
                name += "_"
            found[name] = case.model, case.data_sets
    return found


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _operator(name: str, tests: dict[str, tuple[onnx.ModelProto, Any]]) -> str:
    """The operator that a test is of; an expanded one is of the operator whose body it is."""
    for candidate in (name, name.split("_expanded")[0]):
        if candidate in tests and len(tests[candidate][0].graph.node) == 1:
            return str(tests[candidate][0].graph.node[0].op_type)
    return "graph"


def _in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if bodies := [("", node.op_type) for node in model.graph.node if node.op_type in BODIES]:
        copy = onnx.inliner.inline_selected_functions(copy, bodies, inline_schema_functions=True)

    def turn(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in FLOATS:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        tensors = [*graph.initializer, *(a.t for node in graph.node for a in node.attribute if a.type == AttributeProto.TENSOR)]
        for tensor in tensors:
            if tensor.data_type in FLOATS:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    turn(attribute.g)
                elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                    array = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float64)
                    attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
                elif attribute.name in ("to", "dtype", "stash_type", "softmax_precision", "output_dtype") and attribute.i in FLOATS:
                    attribute.i = TensorProto.DOUBLE
            if node.op_type == "ConstantOfShape" and not node.attribute:
                node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))

    turn(copy.graph)
    return copy


def _asked(model: onnx.ModelProto, inputs: dict[str, np.ndarray], op: str) -> tuple[list[str], list[str], set[str]]:
    """The inputs to differentiate, the float outputs, and those of them that are by-products, whose cotangent is 0."""
    graph, nodes = model.graph, list(_nodes(model.graph))
    skipped = {node.input[i] for node in nodes for i in NOT_WRT.get(node.op_type, ()) if i < len(node.input)}
    skipped |= {graph.input[i].name for i in NOT_WRT.get(op, ()) if i < len(graph.input)}
    beside: set[str] = set()
    if len(nodes) == 1 and op == "BatchNormalization":
        beside = set(nodes[0].output[1:3])
        if any(a.name == "training_mode" and a.i for a in nodes[0].attribute):
            skipped |= set(nodes[0].input[3:5])
    wrt = [v.name for v in graph.input if v.type.tensor_type.elem_type in FLOATS and v.name not in skipped and inputs[v.name].size]
    outputs = [v.name for v in graph.output if v.type.tensor_type.elem_type in FLOATS]
    if not wrt or not set(outputs) - beside:
        raise Unusable("no float input" if not wrt else "no float output")
    return wrt, outputs, beside


def _inputs(model: onnx.ModelProto, data: Any) -> dict[str, np.ndarray]:
    nodes = list(_nodes(model.graph))
    if not data or model.functions or {node.domain for node in nodes} - {"", "ai.onnx", "ai.onnx.preview"}:
        raise Unusable("no data, or not the standard's operators alone")
    if any(node.op_type in RANDOM or (node.op_type == "Dropout" and any(node.input[2:])) for node in nodes):
        raise Unusable("random")
    if not all(value.type.HasField("tensor_type") for value in (*model.graph.input, *model.graph.output)):
        raise Unusable("sequence, optional or sparse value")
    arrays = [numpy_helper.to_array(a) if isinstance(a, TensorProto) else np.asarray(a) for a in data[0][0]]
    if len(arrays) != len(model.graph.input):
        raise Unusable("inputs missing")
    return {value.name: array for value, array in zip(model.graph.input, arrays, strict=True)}


def reference_of(name: str, tests: dict[str, tuple[onnx.ModelProto, Any]]) -> Reference:
    """The reference of one node test: of the points that were tried, the one with fewest elements on a kink.

    Raises:
        Unusable: It has none; the message says why.
    """
    if name in EXCLUDED:
        raise Unusable(EXCLUDED[name])
    model, data = tests[name]
    op = _operator(name, tests)
    inputs = _inputs(model, data)
    wrt, outputs, beside = _asked(model, inputs, op)
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    evaluator = ReferenceEvaluator(_in_double(model))
    names = [value.name for value in model.graph.output]
    live = [output for output in outputs if output not in beside]

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            return dict(zip(names, evaluator.run(None, feeds), strict=True))

    best: tuple[int, Reference] | None = None
    for point in range(POINTS):
        random = np.random.default_rng([zlib.crc32(name.encode()), point])
        feeds = {k: _moved(array, types[k], random, point, k in wrt) for k, array in inputs.items()}
        try:
            results = run(feeds)
        except Exception as error:
            raise Unusable(f"the evaluator: {type(error).__name__}: {str(error)[:120]}") from error
        cotangents = {}
        for output in outputs:
            shape = np.shape(results[output])
            drawn = np.asarray(random.uniform(0.25, 1, shape) * random.choice([-1, 1], shape)).astype(np.float16).astype(np.float64)
            cotangents[output] = np.zeros(shape) if output in beside else drawn
        if not all(np.isfinite(np.asarray(results[output], np.float64)).all() for output in live):
            continue

        def total(feeds: dict[str, np.ndarray], cotangents: dict[str, np.ndarray] = cotangents) -> float:
            found = run(feeds)
            if any(np.shape(found[output]) != cotangents[output].shape for output in live):
                raise Unusable("the shape of an output depends on a value")
            return sum(float(np.sum(np.asarray(found[output], np.float64) * cotangents[output])) for output in live)

        exact = all(np.asarray(results[output]).dtype == np.float64 for output in live) and _smooth_at_all(total, feeds, wrt, random)
        forward = {output: np.asarray(results[output], np.float64) for output in live}
        reference, left_out, count = Reference(op, feeds, cotangents, forward, exact), 0, 0
        for k in wrt:
            size = feeds[k].size
            index = np.arange(size) if size <= ALL else np.sort(random.choice(size, SAMPLES, replace=False))
            values, smooth, jitter = differences(total, feeds, k, index, exact)
            reference.gradients[k] = index[smooth], values[smooth], jitter
            left_out, count = left_out + int((~smooth).sum()), count + len(index)
        if left_out < count and (best is None or left_out < best[0]):
            best = left_out, reference
        if best is not None and best[0] == 0:
            break
    if best is None:
        raise Unusable("no smooth point found")
    return best[1]


def _moved(array: np.ndarray, kind: int, random: np.random.Generator, point: int, wrt: bool) -> np.ndarray:
    """An input at a point: the test's own at the first, and rounded to what its type can hold."""
    if kind not in FLOATS:
        return array
    array = array.astype(np.float64)
    if point and wrt:
        noise = random.uniform(-1, 1, array.shape)
        array = np.where(np.isfinite(array), array, noise)
        array = array * (1 + 0.05 * point * noise) + 0.02 * point * noise * (np.abs(array) < 1e-2)
    return array.astype(np.float16 if kind in LOW else np.float32).astype(np.float64)


def _smooth_at_all(
    total: Callable[[dict[str, np.ndarray]], float], feeds: dict[str, np.ndarray], wrt: list[str], random: np.random.Generator
) -> bool:
    """Whether nothing inside rounds to float32: then a tiny step would jitter."""
    steps = {k: 1e-5 * feeds[k] * random.uniform(-1, 1, feeds[k].shape) for k in wrt}
    middle = total(feeds)
    ends = (total({**feeds, **{k: feeds[k] + sign * steps[k] for k in wrt}}) for sign in (1, -1))
    return abs(sum(ends) - 2 * middle) < 1e-8 * (abs(middle) + 1)


def differences(
    total: Callable[[dict[str, np.ndarray]], float], feeds: dict[str, np.ndarray], name: str, index: np.ndarray, exact: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Derivatives at elements of an input, which of them are smooth, and how much the two steps differ where not exact."""
    values, smooth, jitter, middle = np.zeros(len(index)), np.zeros(len(index), bool), 0.0, total(feeds)
    for place, element in enumerate(index):
        scale = max(abs(float(feeds[name].flat[element])), 0.05)

        def at(step: float, element: int = element, scale: float = scale) -> float:
            moved = feeds[name].copy()
            moved.flat[element] += step * scale
            return total({**feeds, name: moved})

        up, down, half_up, half_down = (at(step) for step in (STEP, -STEP, STEP / 2, -STEP / 2))
        whole, half = (up - down) / (2 * STEP), (half_up - half_down) / STEP
        # On a kink the slopes of both sides do not come together as the step shrinks.
        bend, half_bend = abs(up + down - 2 * middle) / STEP, abs(half_up + half_down - 2 * middle) / (STEP / 2)
        size = abs(half) + 1e-3 * (1 + abs(middle))
        agree = abs(whole - half) < 2e-3 * size + (0 if exact else 1e-3)
        smooth[place] = np.isfinite(whole + half) and agree and not (half_bend > 1e-2 * size and half_bend > 0.7 * bend)
        values[place] = (4 * half - whole) / 3 / scale
        jitter = max(jitter, 0.0 if exact else abs(whole - half) / scale)
    return values, smooth, jitter


# ---------------------------------------------------------------------------------------------------------- the file


def load(path: Path = DATA / "references.xz") -> dict[str, Reference]:
    """What is stored."""
    data = lzma.decompress(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]

    def array(key: str) -> np.ndarray:
        kind, shape, start = head["arrays"][key]
        return np.frombuffer(body, np.dtype(kind), int(np.prod(shape)), start).reshape(shape)

    return {
        name: Reference(
            case["op"],
            *({k: array(f"{name}/{part}/{i}") for i, k in enumerate(case[names])} for names, part in _PARTS.items()),
            case["exact"],
            {k: (array(f"{name}/idx/{i}"), array(f"{name}/val/{i}"), float(array(f"{name}/jit/{i}"))) for i, k in enumerate(case["wrt"])},
        )
        for name, case in head["cases"].items()
    }


_PARTS = {"feeds": "feed", "cotangents": "cot", "forward": "fwd"}


def save(references: dict[str, Reference], path: Path) -> None:
    """Write the file: 8 bytes of length, a JSON head, the arrays; all of it compressed."""
    cases: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    body = bytearray()

    def put(key: str, array: Any, kind: Any) -> None:
        array = np.asarray(array).astype(kind)
        arrays[key] = array.dtype.str, list(array.shape), len(body)
        body.extend(array.tobytes())

    for name, found in references.items():
        cases[name] = {"wrt": list(found.gradients), "exact": found.exact, "op": found.op, **{n: list(getattr(found, n)) for n in _PARTS}}
        for names, part in _PARTS.items():
            for i, array in enumerate(getattr(found, names).values()):
                floats = np.float16 if part == "cot" else np.float32
                put(f"{name}/{part}/{i}", array, floats if array.dtype.kind == "f" else array.dtype)
        for i, (index, values, jitter) in enumerate(found.gradients.values()):
            put(f"{name}/idx/{i}", index, np.int32)
            put(f"{name}/val/{i}", values, np.float32)
            put(f"{name}/jit/{i}", jitter, np.float32)
    head = json.dumps({"cases": cases, "arrays": arrays}).encode()
    path.write_bytes(lzma.compress(len(head).to_bytes(8, "little") + head + bytes(body), preset=9 | lzma.PRESET_EXTREME))


def unlike(found: Reference, stored: Reference) -> str:
    """How a reference differs from the stored one, "" where it does not."""
    for names in _PARTS:
        one, two = getattr(found, names), getattr(stored, names)
        if one.keys() != two.keys() or not all(np.allclose(one[k], two[k], rtol=1e-3, atol=1e-5, equal_nan=True) for k in one):
            return f"other {names}"
    if found.gradients.keys() != stored.gradients.keys():
        return f"gradients of {list(found.gradients)}, stored {list(stored.gradients)}"
    for k, (index, values, jitter) in stored.gradients.items():
        _, mine, theirs = np.intersect1d(found.gradients[k][0], index, return_indices=True)
        if not len(mine) and len(index):
            return f"no element of {k} in common"
        scale = max(float(np.abs(values).max(initial=0)), 1e-2)
        away = np.abs(found.gradients[k][1][mine] - values[theirs]).max(initial=0) - 4 * max(jitter, found.gradients[k][2])
        if away > 1e-3 * scale:
            return f"gradient of {k} is {away:.1e} away, of {scale:.1e}"
    return ""


def main() -> int:
    """Make the references and say what changed; 1 where something did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=DATA / "references.xz")
    options = parser.parse_args()
    tests, stored = node_tests(), load()
    found: dict[str, Reference] = {}
    unusable: dict[str, list[str]] = {}
    status = 0
    for name in (name for name in tests if options.only in name):
        try:
            found[name] = reference_of(name, tests)
            said = "new" if name not in stored else unlike(found[name], stored[name])
        except Unusable as error:
            unusable.setdefault(str(error), []).append(name)
            said = f"no longer usable: {error}" if name in stored else ""
        if said:
            status = 1
            print(f"{name}: {said}", flush=True)
    for name in (name for name in stored if name not in tests):
        status = 1
        print(f"{name}: gone from onnx {onnx.__version__}")
    if not options.only:
        save(found, options.out)
        options.out.with_name("unusable.json").write_text(json.dumps(unusable, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
