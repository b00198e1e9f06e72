"""The honest files that the fuzzer starts from, made in code: of both exporters, of other exporters, of every shape of graph."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import nn

import exporter
from symbolics.node.names import MARK_COUNT_KEY, OUTPUTS_KEY, STATE_KEY, VERSION_KEY
from symbolics.node.operators import Operator
from tests.exporter.runtime import build
from tests.fuzz import functions as F
from tests.fuzz.operators import operator_models

__all__ = ["ABSOLUTE", "ALLOW", "CANARY", "Seed", "make_seeds"]

ALLOW = ["tests.fuzz.functions:*", "tests.fuzz.functions:helper", "tests.fuzz.functions:Bomb", "fuzz_operators::*"]
CANARY = b"CANARY:5f1d7c:this lies outside the folder of the model:" * 8
#: Stands for the absolute path of the canary, which has as many characters there: slashes fill it up.
ABSOLUTE = "@secret".ljust(160, "@")


@dataclass
class Seed:
    """A file: the bytes of the model, and those of other files beside it, by name."""

    model: bytes
    files: dict[str, bytes] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- files of our exporter


class Network(nn.Module):
    """State of every kind: tied, frozen, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.first
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(self.first(x)) * self.mask + self.frozen
        with torch.no_grad():
            stopped = F.Sine.apply(h)
        values, index = F.Largest.apply(F.Scale.apply(h, 0.1) + stopped.detach())
        return F.Pair(values, F.Sine.apply(self.tied(h))), {"index": index}


class Containers(nn.Module):
    dataclass = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.weight
        parts = {"a": y, "b": [y * 2, 3]}
        z = F.Sums.apply(y, parts)
        z = F.Takes.apply(
            z, F.Config(2, (1, 2.5)), F.Mode.UP, F.Bits.A | F.Bits.B, F.Pair(1, None), F.helper, torch.float16, slice(1, None)
        )
        z = F.Takes.apply(
            z, {1: {2, 3}, "k": [True, float("inf"), 1 << 70]}, b"\0\xff", np.arange(3), torch.Size([1, 2]), 1 + 2j, range(3), ...
        )
        a, none, text, more = F.Odd.apply(z)
        b, c = F.TwoOut.apply(a, more["more"])
        wrap = F.Result if self.dataclass else F.Pair  # TorchScript has no dataclasses
        return wrap(b, F.Pair(F.InPlace.apply(c * 1), [F.Sized.apply(x, x.shape[0])]))


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.Product.apply(x, self.weight)
        return y.float() + F.Scale.apply(x[:, :0], 1.0).sum()


class Plain(nn.Module):
    """No PythonOp, dropout in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.softmax(self.body(x), -1)


class Average(nn.Module):
    """A forward that changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
            self.steps.add_(1)
        return F.Sine.apply(x * self.weight) - self.mean


class Calls(nn.Module):
    """Functions that a graph can stand for: with a kept value, an attribute, two results of which one is read, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        a, _ = F.TwoOut.apply(F.Sine.apply(x * self.weight), x)
        return F.Scale.apply(F.Sine.apply(a), 0.5) + F.Product.apply(x, self.weight[:, None])


class One(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(x * self.weight)


class Rounded(nn.Linear):
    """A linear layer of a declared quantiser."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.01, 0, -127, 127)
        return nn.functional.linear(F.Steps.apply(x, torch.tensor(0.03), 8), weight, self.bias)


def _exported() -> Iterator[tuple[str, Seed]]:
    torch.export.register_dataclass(F.Result, serialized_type_name="tests.fuzz.functions.Result")
    x = torch.randn(3, 4)
    models: dict[str, tuple[nn.Module, bool]] = {
        "network": (Network().eval(), True),
        "training": (Network().train(), False),
        "containers": (Containers(), True),
        "cast": (Cast(), True),
        "plain": (Plain().train(), True),
        "average": (Average().train(), True),
        "sine": (One(F.Sine), True),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, dynamo) in models.items():
            for exported in (True, False) if dynamo else (False,):
                shapes = ({0: torch.export.Dim("rows")},) if exported else ({0: "rows"},)
                if name == "sine":
                    shapes = None
                model.dataclass = exported
                program = exporter.export(model, (x,), dynamo=exported, dynamic_shapes=shapes, eager_check=False)
                label = f"{name}-{'dynamo' if exported else 'torchscript'}"
                yield label, _saved(program, folder)
                if not exported:
                    yield f"{label}-gradient", Seed(ir.to_proto(exporter.build_gradient_graph(program)).SerializeToString())
                    yield f"{label}-tangent", Seed(ir.to_proto(exporter.build_tangent_graph(program)).SerializeToString())
        yield "external", _saved(program, folder, external_data=True)
        exporter.quantizer(F.Steps, scale="scale", bits="bits")
        for portable in (False, True):
            program = exporter.export(Rounded(), (x,), dynamo=False, portable=portable)
            yield f"declared-{'function' if portable else 'call'}", _saved(program, folder)
        for exported in (True, False):
            shapes = ({0: torch.export.Dim("rows")},) if exported else ({0: "rows"},)
            program = exporter.export(Calls(), (x,), dynamo=exported, dynamic_shapes=shapes, eager_check=False, portable=True)
            label = f"portable-{'dynamo' if exported else 'torchscript'}"
            yield label, _saved(program, folder)
            yield f"{label}-gradient", Seed(ir.to_proto(exporter.build_gradient_graph(program)).SerializeToString())
        for schema in ("documented", "ort-1.15", "ort-1.16", "ort-1.17"):
            yield schema, _saved(exporter.export(One(F.Scale), (x,), dynamo=False, eager_check=False), folder, schema=schema)
        for function in (F.Raises, F.RaisesBackward):
            call = build.record(F.Sine, torch.ones(2, 4, requires_grad=True), id="7")
            model = build.training(call)
            for node in model.graph.node:
                for attribute in node.attribute:
                    if attribute.name == "name":
                        attribute.s = f"{F.__name__}:{function.__name__}".encode()
            yield function.__name__.lower(), Seed(model.SerializeToString())
        step = exporter.export_training_step(
            One(F.Sine), (x,), loss=torch.nn.functional.mse_loss, targets=(torch.ones(3, 4),), optimizer="adamw", dynamo=False
        )
        step.save(Path(folder, "step.onnx"))
        yield "step", Seed(Path(folder, "step.onnx").read_bytes())
        yield "step-init", Seed(Path(folder, "step.init.onnx").read_bytes())
        averages = exporter.export_training_step(
            Average(), (x,), loss=torch.nn.functional.mse_loss, targets=(torch.ones(3, 4),), optimizer="sgd", dynamo=False
        )
        averages.save(Path(folder, "step.onnx"))
        yield "step-buffers", Seed(Path(folder, "step.onnx").read_bytes())


def _saved(program: Any, folder: str, **options: Any) -> Seed:
    path = Path(folder, "model.onnx")
    program.save(path, **options)
    data = path.with_name("model.onnx.data")
    files = {data.name: data.read_bytes()} if data.exists() else {}
    data.unlink(missing_ok=True)
    return Seed(path.read_bytes(), files)


def _nodes() -> Iterator[tuple[str, Seed]]:
    """One PythonOp each, as `tests.exporter.runtime.build` writes them: chains, contexts, strings."""
    x = torch.ones(2, 4, requires_grad=True)
    yield "chain", Seed(build.forward(build.record(F.Sine, x), repeat=3).SerializeToString())
    yield "chain-gradient", Seed(build.training(build.record(F.Scale, x, 0.5, "mean"), repeat=3).SerializeToString())
    yield "pair-gradient", Seed(build.training(build.record(F.TwoOut, x, x), absent=[1]).SerializeToString())
    square = torch.ones(4, 4, requires_grad=True)
    second = ir.from_proto(build.forward(build.record(F.Product, square, square)))
    for _ in range(2):
        second = exporter.build_gradient_graph(second)
    yield "second-order", Seed(ir.to_proto(second).SerializeToString())
    operator = Operator.of(torch.ops.fuzz_operators.scaled.default)
    yield "operator", Seed(build.training(build.record(operator, x, 0.5, [1, 2], "up"), repeat=2).SerializeToString())
    yield "context", Seed(build.forward(build.record(F.Largest, x), context=True).SerializeToString())
    strings = build.forward(build.record(F.Sine, x))
    for value in (*strings.graph.input, *strings.graph.output):
        value.type.tensor_type.elem_type = TensorProto.STRING
    for attribute in strings.graph.node[0].attribute:
        if attribute.name == "name":
            attribute.s = f"{F.__name__}:Strings".encode()
        elif attribute.name in ("input_tensor_types", "output_tensor_types"):
            attribute.ints[:] = [TensorProto.STRING]
        elif attribute.name in ("input_requires_grads", "output_tensor_requires_grads"):
            attribute.ints[:] = [0]
    yield "strings", Seed(strings.SerializeToString())


# ------------------------------------------------------------------------------------------- files of other exporters

_TEXTS = {
    "mlp": """<ir_version: 8, opset_import: ["": 18]> g (float[N, 4] x) => (float[N, 2] y)
        <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] b = {1, 2}, int64[2] shape = {-1, 2}>
        { h = MatMul(x, w) s = Add(h, b) r = Relu(s) y = Reshape(r, shape) }""",
    "old-opset": """<ir_version: 6, opset_import: ["": 11]> g (float[2, 4] x) => (float[2, 1] y)
        <float[2, 4] w = {1, 2, 3, 4, 5, 6, 7, 8}> { h = Mul(x, w) y = ReduceSum<axes = [1], keepdims = 1>(h) }""",
    "functions": """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}>
        { h = own.outer<alpha = 0.5>(x, w) y = own.inner(h) }
        <domain: "own", opset_import: ["": 20, "own": 1]> outer <alpha: float = 1.0> (a, b) => (c)
        { s = Constant<value_float: float = @alpha>() m = Mul(a, s) n = own.inner(m) c = Mul(n, b) }
        <domain: "own", opset_import: ["": 20]> inner (a) => (c) { e = Exp(a) c = Identity(e) }""",
    "if": """<ir_version: 10, opset_import: ["": 20]> g (float[4] x, bool flag) => (float[4] y) <float[4] w = {1, 2, 3, 4}>
        { h = Mul(x, w) y = If (flag) <
            then_branch = yes () => (float[4] a) { a = Exp(h) },
            else_branch = no () => (float[4] b) <float[4] k = {1, 1, 1, 1}> { b = Add(h, k) } > }""",
    "loop": """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float[4] y, float[K, 4] all)
        <float[4] w = {1, 2, 3, 4}, int64 trips = {3}, bool go = {1}>
        { y, all = Loop (trips, go, x) < body = body (int64 i, bool c, float[4] s) => (bool c2, float[4] t, float[4] o)
            { c2 = Identity(c) t = Mul(s, w) o = Sin(t) } > }""",
    "scan": """<ir_version: 10, opset_import: ["": 20]> g (float[4] s, float[3, 4] x) => (float[4] last, float[3, 4] all)
        { last, all = Scan (s, x) < num_scan_inputs = 1, body = body (float[4] a, float[4] b) => (float[4] c, float[4] d)
            { c = Add(a, b) d = Mul(c, b) } > }""",
    "shapes": """<ir_version: 10, opset_import: ["": 20]> g (float[N, 4] x) => (float[M] y)
        <float[1] w = {2}, int64[1] many = {6}, int64[1] one = {1}, int64 start = {0}, int64 stop = {6}, int64 delta = {1}, int64[2] twice = {2, 1}>
        { zero = ConstantOfShape<value: tensor = float[1] {0}>(many) wide = Expand(w, many) r = Range(start, stop, delta) f = Cast<to = 1>(r)
          t = Tile(x, twice) flat = Flatten<axis = 0>(t) total = ReduceSum<keepdims = 0>(flat) s = Add(zero, wide) u = Mul(s, f) y = Mul(u, total) }""",
    "quantized": """<ir_version: 10, opset_import: ["": 21]> g (float[4] x) => (float[4] y) <float scale = {0.5}, uint8 zero = {128}, float[4] w = {1, 2, 3, 4}>
        { q = QuantizeLinear(x, scale, zero) d = DequantizeLinear(q, scale, zero) y = Mul(d, w) }""",
    "integers": """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float[2] y)
        <float s = {0.05}, uint8 z = {128}, int8[4, 2] w = {1, -2, 3, -4, 5, -6, 7, -8}, float t = {0.02}, int8 none = {0}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, t, none) y = MatMul(d, v) }""",
    "rounded": """<ir_version: 10, opset_import: ["": 18]> g (float[2, 3] x) => (float[2, 2] y)
        <float s = {0.05}, float low = {-128}, float high = {127}, float[3, 2] w = {0.5, -0.25, 1, 0.75, 0.25, -1}>
        { a = Div(x, s) b = Round(a) c = Clip(b, low, high) d = Mul(c, s) y = MatMul(d, w) }""",
    "qonnx": """<ir_version: 10, opset_import: ["": 18, "qonnx.custom_op.general": 1]> g (float[2, 3] x) => (float[2, 2] y)
        <float s = {0.05}, float z = {3}, float n = {0}, float bits = {8}, float t = {0.25}, float[3, 2] w = {0.5, -0.25, 1, 0.75, 0.25, -1}, float one = {1}>
        { q = qonnx.custom_op.general.Quant<signed = 0, narrow = 0, rounding_mode = "ROUND">(x, s, z, bits)
          v = qonnx.custom_op.general.IntQuant<signed = 1, narrow = 1, rounding_mode = "HALF_UP">(w, t, n, bits)
          p = MatMul(q, v) y = qonnx.custom_op.general.BipolarQuant(p, one) }""",
    "sequence": """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float[8] y)
        { s = SequenceConstruct(x, x) y = ConcatFromSequence<axis = 0>(s) }""",
    "string-outputs": """<ir_version: 10, opset_import: ["": 20]> g (float[2] x, string[2] s) => (float[2] y, string[2] t)
        { y = Exp(x) t = Identity(s) }""",
}


def _foreign() -> Iterator[tuple[str, Seed]]:
    for name, model in operator_models():
        yield name, Seed(model)
    for name, text in _TEXTS.items():
        yield name, Seed(parser.parse_model(text).SerializeToString())
    yield "deep", Seed(_deep(24).SerializeToString())
    yield "sparse", Seed(_sparse().SerializeToString())
    yield "kinds", Seed(_kinds().SerializeToString())
    tensor = numpy_helper.from_array(np.arange(8, dtype=">f4").reshape(2, 4).astype("<f4"), "w")
    tensor.raw_data = np.arange(8, dtype=">f4").tobytes()  # as a machine of the other byte order would have written them
    yield "big-endian", Seed(_with(tensor).SerializeToString())
    external = TensorProto(name="w", data_type=1, dims=[2, 4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data/w.bin", "offset": "8", "length": "32"}.items():
        external.external_data.add(key=key, value=value)
    yield "external-folder", Seed(_with(external).SerializeToString(), {"data/w.bin": np.arange(10, dtype=np.float32).tobytes()})
    metadata = _with(numpy_helper.from_array(np.ones((2, 4), np.float32), "w"))
    for key, text in {
        VERSION_KEY: "1",
        MARK_COUNT_KEY: "0",
        STATE_KEY: '{"w": {"initializer": "w", "kind": "parameter", "trainable": true, "persistent": true}}',
        OUTPUTS_KEY: '{"$mapping": ["tests.fuzz.functions:Output", {"loss": {"$tensor": 0}}]}',
    }.items():
        metadata.metadata_props.add(key=key, value=text)
    yield "metadata", Seed(metadata.SerializeToString())


def _with(tensor: TensorProto) -> onnx.ModelProto:
    """y = x * w."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", [value("x", 1, [2, 4])], [value("y", 1, [2, 4])], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _deep(levels: int) -> onnx.ModelProto:
    """An If in an If in an If."""
    value = helper.make_tensor_value_info
    body = helper.make_graph([helper.make_node("Exp", ["x"], ["o"])], "leaf", [], [value("o", 1, [2])])
    for level in range(levels):
        node = helper.make_node("If", ["c"], [f"o{level}"], then_branch=body, else_branch=helper.make_graph(
            [helper.make_node("Neg", ["x"], [f"n{level}"])], "no", [], [value(f"n{level}", 1, [2])]))  # fmt: skip
        body = helper.make_graph([node], f"level{level}", [], [value(f"o{level}", 1, [2])])
    body.input.extend([value("x", 1, [2]), value("c", TensorProto.BOOL, [])])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _sparse() -> onnx.ModelProto:
    model = _with(numpy_helper.from_array(np.ones((2, 4), np.float32), "w"))
    model.graph.ClearField("initializer")
    sparse = model.graph.sparse_initializer.add(dims=[2, 4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 5], np.int64), "w_indices"))
    return model


def _kinds() -> onnx.ModelProto:
    """An initializer of every element type, each given out."""
    model = _with(numpy_helper.from_array(np.ones((2, 4), np.float32), "w"))
    for kind in sorted(set(TensorProto.DataType.values()) - {0, TensorProto.STRING}):
        name = f"k{kind}"
        model.graph.initializer.append(TensorProto(name=name, data_type=kind, dims=[2], raw_data=bytes(_bytes_of(kind))))
        if kind in (1, 6, 7, 9, 10, 11, 16):
            model.graph.node.append(helper.make_node("Identity", [name], [f"o{kind}"]))
            model.graph.output.append(helper.make_tensor_value_info(f"o{kind}", kind, [2]))
    return model


def _bytes_of(kind: int) -> int:
    return max(1, ir.DataType(kind).bitwidth * 2 // 8)


# ----------------------------------------------------------------------------------------------------------- together


def make_seeds(progress: Callable[[str], None] = lambda _: None) -> dict[str, Seed]:
    """Every seed by its name; the same files each time, up to what the exporters vary."""
    torch.manual_seed(0)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    out: dict[str, Seed] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in (_foreign(), _nodes(), _exported()):
            for name, seed in source:
                out[name] = seed
                progress(name)
    return out
