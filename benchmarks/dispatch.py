"""What one PythonOp costs on onnxruntime above the same Function called directly.

Medians of rounds in which both sides alternate, so that a busy machine slows both; processor time, which other users of the
machine disturb less. Run: python benchmarks/dispatch.py

Pairs that feed one another directly run as one autograd graph (exporter/runtime/link.py). Pairs with an operator between them
do not: each backward is a call of the autograd engine, which by itself costs more than the 6 us that a pair in a chain may. So
they are measured against eager code that calls the engine for each Function as well.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Idle threads of one library must not take the cores from the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent))

import onnx
import onnxruntime
import torch
from torch.autograd import Function

from benchmarks._report import Figure, tell
from exporter.runtime.session import inference_session, session_options
from symbolics.node.operators import Operator
from tests.exporter.runtime import build


class Double(Function):
    """Nothing kept: what remains is dispatch."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Scale(Function):
    """The pair: saves its input, as most do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


@torch.library.custom_op("pythonop_benchmarks::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    """Scale as an operator."""
    return x * 2


scale.register_fake(torch.empty_like)
scale.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def alternate(sides: dict[str, Callable[[], object]], number: int, rounds: int) -> dict[str, float]:
    """Median seconds of one call of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, call in sides.items():
            start = time.process_time()
            for _ in range(number):
                call()
            times[name].append((time.process_time() - start) / number)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def forward_chain(length: int, rounds: int) -> dict[str, float]:
    x = torch.randn(2, 4, requires_grad=True)
    model = build.forward(build.record(Double, x), repeat=length)
    session = onnxruntime.InferenceSession(model.SerializeToString(), _quiet(session_options([Double])))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x.detach().numpy())
    binding = session.io_binding()
    binding.bind_ortvalue_input("x0", value)
    binding.bind_output(session.get_outputs()[0].name)
    plain = x.detach()

    def direct() -> None:
        y = plain
        for _ in range(length):
            y = Double.apply(y)

    found = alternate({"onnxruntime": lambda: session.run_with_iobinding(binding), "direct": direct}, max(1, 2000 // length), rounds)
    return {**found, "above_us": (found["onnxruntime"] - found["direct"]) / length * 1e6}


def pair_chain(length: int, rounds: int) -> dict[str, float]:
    x = torch.randn(2, 4, requires_grad=True)
    model = build.training(build.record(Scale, x), repeat=length)
    session = inference_session(model, sess_options=_quiet(session_options([Scale])))
    feeds = {"x0": x.detach().numpy(), "g0": torch.ones(2, 4).numpy()}
    seed = torch.ones(2, 4)

    def eager() -> None:
        y = x
        for _ in range(length):
            y = Scale.apply(y)
        torch.autograd.grad(y, x, seed)

    found = alternate({"onnxruntime": lambda: session.run(None, feeds), "eager": eager}, max(1, 1000 // length), rounds)
    above = (found["onnxruntime"] - found["eager"]) / length * 1e6
    return {**found, "above_us": above, "ratio": found["onnxruntime"] / found["eager"], "live_contexts": len(session.store)}


def operator_chain(length: int, rounds: int) -> dict[str, float]:
    """Pairs of an operator in a chain, beside those of a Function: what each costs above eager's calls of the same."""
    x, seed = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4)
    operator = Operator.of(torch.ops.pythonop_benchmarks.scale.default)
    feeds, sides = {"x0": x.detach().numpy(), "g0": seed.numpy()}, {}
    for name, call, called in (("function", Scale, Scale.apply), ("operator", operator, scale)):
        model = build.training(build.record(call, x), repeat=length)
        session = inference_session(model, sess_options=_quiet(session_options([Scale, "pythonop_benchmarks::*"])))
        sides[name] = lambda session=session: session.run(None, feeds)

        def eager(called=called) -> None:
            y = x
            for _ in range(length):
                y = called(y)
            torch.autograd.grad(y, x, seed)

        sides[f"eager {name}"] = eager
    found = alternate(sides, max(1, 1000 // length), rounds)
    ratios = {name: found[name] / found[f"eager {name}"] for name in ("function", "operator")}
    return {**found, "eager": found["eager operator"], "ratio": ratios["operator"] / ratios["function"]}


def pairs_apart(length: int, rounds: int) -> dict[str, float]:
    """Pairs with a Neg between any two, against eager and against eager that calls the engine once a pair."""
    x = torch.randn(2, 4, requires_grad=True)
    model = _with_neg(build.training(build.record(Scale, x), repeat=length))
    session = inference_session(model, sess_options=_quiet(session_options([Scale])))
    feeds = {"x0": x.detach().numpy(), "g0": torch.ones(2, 4).numpy()}
    seed = torch.ones(2, 4)

    def eager() -> None:
        y = x
        for _ in range(length):
            y = Scale.apply(y).neg()
        torch.autograd.grad(y, x, seed)

    def alone() -> None:
        pairs, y = [], x
        for _ in range(length):
            y = y.detach().requires_grad_()
            pairs.append((y, out := Scale.apply(y)))
            with torch.no_grad():
                y = out.neg()
        gradient = seed
        for leaf, out in reversed(pairs):
            (gradient,) = run_backward((out,), (gradient.neg(),), False, False, (leaf,), True, False)

    run_backward = torch.autograd.Variable._execution_engine.run_backward
    sides = {"onnxruntime": lambda: session.run(None, feeds), "eager": eager, "an engine call each": alone}
    found = alternate(sides, max(1, 1000 // length), rounds)
    above = {name: (found["onnxruntime"] - found[name]) / length * 1e6 for name in ("eager", "an engine call each")}
    return {
        **found,
        "above_us": above["an engine call each"],
        "above_eager_us": above["eager"],
        "ratio_to_eager": found["onnxruntime"] / found["eager"],
    }


def _with_neg(model: onnx.ModelProto) -> onnx.ModelProto:
    """A Neg behind each PythonOp, and one before each PythonOpGrad."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        before, after = [], []
        if node.op_type == "PythonOp":
            node.output[1], last = f"{node.output[1]}_apart", node.output[1]
            after.append(onnx.helper.make_node("Neg", [node.output[1]], [last]))
        else:
            before.append(onnx.helper.make_node("Neg", [node.input[1]], [f"{node.name}_in"]))
            node.input[1] = f"{node.name}_in"
            del node.input[2:]
        model.graph.node.extend([*before, node, *after])
    return model


def large(rounds: int) -> dict[str, float]:
    reuse_memory()
    x = torch.randn(1 << 24)  # 64 MB
    session = onnxruntime.InferenceSession(build.forward(build.record(Double, x)).SerializeToString(), _quiet(session_options([Double])))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x0", onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()))
    result = onnxruntime.OrtValue.ortvalue_from_numpy(torch.zeros_like(x).numpy())  # shares the memory, so not that of x
    binding.bind_ortvalue_output(session.get_outputs()[0].name, result)
    target = torch.empty_like(x)
    found = alternate(
        {"onnxruntime": lambda: session.run_with_iobinding(binding), "direct": lambda: Double.apply(x), "memcpy": lambda: target.copy_(x)},
        1,
        rounds,
    )
    return {**found, "memcpys_above": (found["onnxruntime"] - found["direct"]) / found["memcpy"]}


def reuse_memory() -> None:
    """Let malloc keep what is freed: first touching 64 MB anew takes six times as long as copying it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _quiet(options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    options.intra_op_num_threads = 1
    return options


def _unit(figure: str) -> str:
    return {"above_us": "us", "ratio": "ratio", "memcpys_above": "memcpys"}[figure]


#: measurement -> (how, figure, at most)
TARGETS: dict[str, tuple[Callable[[int], dict[str, float]], str, float]] = {
    "forward, one": (lambda rounds: forward_chain(1, rounds), "above_us", 12.0),
    "forward, chain of 100": (lambda rounds: forward_chain(100, rounds), "above_us", 3.0),
    "pair, chain of 100: us": (lambda rounds: pair_chain(100, rounds), "above_us", 6.0),
    "pair, chain of 100: ratio": (lambda rounds: pair_chain(100, rounds), "ratio", 1.4),
    "pair of an operator, chain of 100: ratio to a Function's": (lambda rounds: operator_chain(100, rounds), "ratio", 1.2),
    "pairs apart: us above engine calls": (lambda rounds: pairs_apart(100, rounds), "above_us", 12.0),
    "64 MB, memcpys above the call": (lambda rounds: large(rounds), "memcpys_above", 1.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for name, (measure, figure, most) in TARGETS.items():
        found = measure(options.rounds)
        told = ("onnxruntime", "direct", "eager", "an engine call each", "memcpy")
        note = ", ".join(f"{key} {value * 1e6:.1f} us" for key, value in found.items() if key in told)
        figures.append(Figure(name, found[figure], _unit(figure), most, options.rounds, note))
    return tell("dispatch", figures)


if __name__ == "__main__":
    sys.exit(main())
