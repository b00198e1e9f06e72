"""How long a gradient graph takes to build, and how large it gets.

    python -m benchmarks.gradient_graph [--sizes 300 3000 30000] [--gpt2 12 48]

Beside each build stand ONNX's own shape inference and checker on the same model, for a ratio that does not depend on the
machine. The best of several runs counts, in processor time: other users of the machine disturb that less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from benchmarks._report import Figure, tell
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.node.names import ORT_DOMAIN, OWN_DOMAIN

GROWTH = 1.1
#: layers -> limits, in seconds and as a ratio.
GPT2: dict[int, dict[str, float | None]] = {12: {"build": 0.6, "nodes": 2.6, "session": 2.0}, 48: {"build": 2.5, "nodes": 2.6}}


def transformer_like(nodes: int, width: int = 8, activation: Callable[[ir.Value, str], ir.Node] | None = None) -> ir.Model:
    """A chain of blocks of LayerNormalization, MatMul, Add, Gelu, Mul, Softmax, Tanh, Sigmoid, Mul and residual Add.

    Args:
        nodes: How many; blocks have ten.
        width: Of the last of three dimensions; the input ``x`` is float32[2, 4, width].
        activation: Makes a node of its input and its name, in the place of Gelu; the activation is its last output.
    """
    shape = ir.Shape([2, 4, width])
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    opsets = {"": 20} if activation is None else {"": 20, ORT_DOMAIN: 1, OWN_DOMAIN: 1}
    graph = ir.Graph([x], [], nodes=[], name="blocks", opset_imports=opsets)
    rng = np.random.default_rng(0)

    def weight(name: str, *dims: int) -> ir.Value:
        tensor = ir.tensor(rng.standard_normal(dims, dtype=np.float32) / 4, name=name)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims), const_value=tensor)
        graph.register_initializer(value)
        return value

    def node(op_type: str, *inputs: ir.Value) -> ir.Value:
        return add(ir.node(op_type, inputs))

    def add(new: ir.Node) -> ir.Value:
        out = new.outputs[-1]
        out.name, out.type, out.shape = f"v{len(graph)}", x.type, shape
        graph.append(new)
        return out

    h = x
    for i in range(nodes // 10):
        w, b = weight(f"w{i}", width, width), weight(f"b{i}", width)
        a = node("LayerNormalization", h, weight(f"s{i}", width), b)
        a = node("Add", node("MatMul", a, w), b)
        a = node("Gelu", a) if activation is None else add(activation(a, f"call{i}"))
        p = node("Softmax", node("Mul", a, a))
        h = node("Add", h, node("Mul", node("Tanh", p), node("Sigmoid", a)))
    graph.outputs.append(h)
    return ir.Model(graph, ir_version=10)


def best(function: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def growth(models: list[ir.Model], rounds: int) -> float:
    """Build time a node of the last model over that of the first, which is built as often as the last has nodes more.

    The two take turns, so that a slow minute of the machine meets both; the median of the rounds' ratios.
    """
    small, large = models[0], models[-1]
    more = len(large.graph) // len(small.graph)
    ratios = []
    for _ in range(rounds):
        spent = []
        for model, times in ((small, more // 2), (large, 1), (small, more - more // 2)):
            start = time.process_time()
            for _ in range(times):
                build_gradient_graph(model)
            spent.append(time.process_time() - start)
        ratios.append(spent[1] / len(large.graph) / ((spent[0] + spent[2]) / (more * len(small.graph))))
    return statistics.median(ratios)


def session_seconds(model: ir.Model) -> float:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    return best(lambda: onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]), 1)


def row(name: str, model: ir.Model, runs: int, limits: dict[str, float | None]) -> list[Figure]:
    """The figures of one model."""
    count = len(model.graph)
    build = best(lambda: build_gradient_graph(model), runs)
    proto = ir.to_proto(model)
    for initializer in [t for t in proto.graph.initializer if len(t.raw_data) > 4096]:
        value = onnx.helper.make_tensor_value_info(initializer.name, initializer.data_type, list(initializer.dims))
        proto.graph.initializer.remove(initializer)
        if initializer.name not in {v.name for v in proto.graph.input}:
            proto.graph.input.append(value)
    infer = best(lambda: onnx.shape_inference.infer_shapes(proto), runs)
    check = best(lambda: onnx.checker.check_model(proto), runs)
    training = build_gradient_graph(model)
    note = f"{count} nodes, {build / count * 1e6:.0f} us a node"
    figures = [
        Figure(f"{name}: build", build, "s", limits.get("build"), runs, note),
        Figure(f"{name}: build / (onnx's inference + checker)", build / (infer + check), "ratio", None, runs),
        Figure(f"{name}: training nodes / forward nodes", len(training.graph) / count, "ratio", limits.get("nodes")),
    ]
    if "session" in limits:
        figures.append(Figure(f"{name}: session of the training graph", session_seconds(training), "s", limits["session"]))
    return figures


def gpt2(layers: int) -> ir.Model:
    """GPT-2 small's shapes with few words, exported and optimized."""
    import torch
    import transformers

    import exporter

    config = transformers.GPT2Config(
        vocab_size=100, n_positions=32, n_embd=48, n_layer=layers, n_head=12, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    return exporter.export(Logits(), (torch.zeros(2, 16, dtype=torch.int64),)).model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[300, 3000, 30000])
    parser.add_argument("--gpt2", type=int, nargs="*", default=[12, 48])
    parser.add_argument("--rounds", type=int, default=3, help="of the growth (default 3)")
    options = parser.parse_args()
    figures: list[Figure] = []
    models = [transformer_like(size) for size in sorted(options.sizes)]
    for size, model in zip(sorted(options.sizes), models, strict=True):
        figures += row(f"blocks of {size}", model, max(1, min(5, 15000 // size)), {"session": None} if size <= 3000 else {})
    if len(models) > 1:
        ratio = growth(models, options.rounds)
        figures.append(Figure("growth of a node's build from the smallest to the largest", ratio, "ratio", GROWTH, options.rounds))
    for layers in options.gpt2:
        figures += row(f"GPT-2, {layers} layers", gpt2(layers), 3, GPT2.get(layers, {}))
    return tell("gradient_graph", figures)


if __name__ == "__main__":
    sys.exit(main())
