"""Each operator's gradient along axes that no node test varies: types of floats and of indices; one element, one channel, none, another size.

The graph is built once with open sizes, and once for each size. The reference is torch in float64.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from exporter.gradient_graph.build import build_gradient_graph
from tests.symbolics.gradients.operator_axes import ROWS, Row
from tests.symbolics.gradients.tools import opset_of

SIZES = {
    "open": {"N": 3, "C": 4},
    "second size": {"N": 5, "C": 2},
    "one channel": {"N": 3, "C": 1},
    "one element": {"N": 1, "C": 1},
    "none": {"N": 0, "C": 4},
    "no channel": {"N": 3, "C": 0},
}
OPSET = 23  # from 22 on most operators take bfloat16
#: Name in ONNX -> a unit in the last place.
FLOATS = {"float": 2.0**-23, "double": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}


NO_KERNEL = re.compile("NOT_IMPLEMENTED|MLFloat16 data type is not supported with Scatter")
#: What onnx's evaluator cannot do, where onnxruntime has no kernel either: row -> (the types, why).
NO_EVALUATOR = {
    "LayerNormalization": ({"bfloat16"}, "its statistics are of the type of the input"),
    "LayerNormalization of the channels": ({"bfloat16"}, "its statistics are of the type of the input"),
    "Pad": ({"bfloat16"}, "it cuts nothing off"),
    "Conv, strided": ({"bfloat16", "double"}, "it cuts nothing off"),
    "Conv, grouped": ({"bfloat16", "double"}, "it takes all filters for one group's"),
    "LRN": ({"bfloat16", "double"}, "it misses channels"),
}
pytestmark = pytest.mark.unusable("in some of the types ONNX infers no shape of the output, and onnxruntime has no kernel")


def typed(row: Row, floats: str, integers: str) -> str:
    return re.sub(r"\bF\b", floats, re.sub(r"\bK\b", integers, row.signature))


def forward(row: Row, signature: str, floats: str) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : {opset_of(row.body, OPSET)}]> model ({signature}) => ({floats} y) {{ {row.body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


@functools.lru_cache(maxsize=4)
def built(row: Row, signature: str, floats: str) -> bytes:
    model = forward(row, signature, floats)
    training = ir.to_proto(build_gradient_graph(model))
    if model.graph.output[0].type.tensor_type.HasField("shape"):
        onnx.checker.check_model(training, full_check=True)
    return training.SerializeToString()


def is_valid(row: Row, floats: str) -> bool:
    """Whether the operator takes that type."""
    try:
        onnx.checker.check_model(forward(row, typed(row, floats, "int64"), floats), full_check=True)
    except onnx.shape_inference.InferenceError:
        return False
    except onnx.checker.ValidationError as error:
        return "Field 'shape'" in str(error)  # it is not inferred
    return True


def run(model: bytes, feeds: dict[str, np.ndarray], anywhere: bool) -> dict[str, np.ndarray]:
    """By onnxruntime; by onnx's evaluator where that has no kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if not anywhere:
        try:
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))
        except Exception as error:
            if not NO_KERNEL.search(str(error)):
                raise
    evaluator = ReferenceEvaluator(onnx.load_from_string(model))
    with np.errstate(all="ignore"):
        return dict(zip(evaluator.output_names, evaluator.run(None, feeds)))


def values(row: Row, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """The inputs, in float64 and int64; what bfloat16 has is what all have."""
    rng, made, bounds = np.random.default_rng(seed), {}, list(row.most)
    for entry in row.signature.split(", "):
        kind, name = entry.split(" ")
        shape = [sizes.get(d, d) for d in kind[kind.index("[") + 1 : -1].split(",")] if "[" in kind else []
        shape = [int(d) for d in shape]
        if kind[0] == "F":
            size = int(np.prod(shape))
            steps = rng.permutation(max(size, 1))[:size].reshape(shape) + 0.3 + 0.4 * rng.random()
            spread = row.low + (row.high - row.low) * steps / (max(size, 1) + 0.5)
            made[name] = torch.from_numpy(np.asarray(spread)).bfloat16().double().numpy()
        elif (most := bounds.pop(0)) == "apart":
            made[name] = np.broadcast_to(rng.permutation(5)[: shape[0]].reshape(-1, *[1] * (len(shape) - 1)), shape).copy()
        else:
            made[name] = rng.integers(0, sizes.get(most, most) if isinstance(most, str) else most, shape)
    return made


def check(name: str, sizes: dict[str, int], floats: str = "float", integers: str = "int64", fixed: bool = False) -> None:
    row = ROWS[name]
    signature = typed(row, floats, integers)
    if fixed:
        signature = re.sub(r"\b[NC]\b", lambda found: str(sizes[found[0]]), signature)
    given = values(row, sizes)
    dtype = ir.DataType[floats.upper()].numpy()
    leaves = {k: torch.tensor(v, requires_grad=v.dtype.kind == "f") for k, v in given.items()}
    y = row.function(*leaves.values())
    seed = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 1, y.shape)).bfloat16().double()
    y.backward(seed)
    feeds = {k: np.asarray(v).astype(dtype) for k, v in given.items()}
    for kind, k in (entry.split(" ") for entry in signature.split(", ")):
        if kind.startswith("int"):
            feeds[k] = np.asarray(given[k]).astype(kind.partition("[")[0])
    found = run(built(row, signature, floats), {**feeds, "y_grad": seed.numpy().astype(dtype)}, anywhere=floats == "bfloat16")
    unit = FLOATS["float" if row.coarse and floats == "double" else floats]
    for k, wanted in {"y": y.detach(), **{f"{k}_grad": x.grad for k, x in leaves.items() if x.grad is not None}}.items():
        got = np.asarray(found[k])
        assert got.dtype == dtype, f"{k} is {got.dtype}"
        assert got.shape == tuple(wanted.shape), f"{k} has the shape {got.shape}, in torch {tuple(wanted.shape)}"
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        np.testing.assert_allclose(got.astype(np.float64), wanted.numpy(), rtol=0, atol=64 * unit * max(scale, 0.1), err_msg=k)


def cases():
    for name, row in ROWS.items():
        for size, sizes in SIZES.items():
            if all(sizes[letter] or letter in row.empty for letter in "NC" if re.search(rf"\b{letter}\b", row.signature)):
                yield name, size


@pytest.mark.parametrize("name", ROWS)
def test_sizes_of_an_open_graph(name):
    for size in (size for row, size in cases() if row == name):
        check(name, SIZES[size])


@pytest.mark.parametrize("name", ROWS)
def test_fixed_sizes(name):
    for size in (size for row, size in cases() if row == name and size not in ("open", "second size")):
        check(name, SIZES[size], fixed=True)


@pytest.mark.parametrize("name", ROWS)
def test_types_of_floats(name):
    for floats in FLOATS.keys() - NO_EVALUATOR.get(name, ((), ""))[0]:
        if is_valid(ROWS[name], floats):
            check(name, SIZES["open"], floats)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "K" in row.signature])
def test_indices_of_int32(name):
    for size in (size for row, size in cases() if row == name):
        check(name, SIZES[size], integers="int32")
