"""How cost grows: with the nodes of a graph up to 100,000, and with the batch and the threads of a training step.

    python -m benchmarks.scale [--sizes 300 3000 30000 100000] [--batches 1 4 16 64] [--threads 1 2]

The graphs are chains of blocks of ten nodes, one of them a PythonOp, each size in a process of its own: building the gradient graph,
making its session, a step (forward and gradient), and the peak of memory, each per node of the forward. onnxruntime's optimizers take
longer a node the larger the graph is: all sizes are measured without them, those up to 30,000 with them as well. Beside these stands
a plain onnxruntime.InferenceSession, without pythonop, of the same training graph with Gelu in the place of the Function. Times are
processor time, on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks._process import status
from benchmarks._report import Figure, tell
from benchmarks.training_step import child, eager, exported, runs, turns

#: How much more a node of the largest graph may cost than one of the smallest, where the work is pythonop's: what is in line with the
#: nodes costs up to twice as much where it is no longer in the processor's caches, and large graphs are listed anew in between.
GROWTH = {"build": 1.8, "prepare": 2.5, "memory of build": 1.5, "memory of session": 1.5}
#: The largest graph that onnxruntime optimizes here: its optimizers need a minute for this one, and more than ten times that for 100,000.
OPTIMIZED = 30_000
#: The most that a training step may take of eager's.
LIMITS = {"gpt": 0.95, "cnn": 1.3}
_WIDTH = 8


def _seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result


def _peak(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, MiB of the peak above what was resident before, and the result."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    seconds, result = _seconds(function)
    return seconds, status("VmHWM") - before, result


def graph(nodes: int, functions: bool = True) -> Any:
    """The forward: a chain of blocks, in each a GELU that is a PythonOp, or the operator Gelu."""
    import torch

    from benchmarks._models import Gelu
    from benchmarks.gradient_graph import transformer_like
    from tests.exporter.runtime import build

    call = build.record(Gelu, torch.zeros(2, 4, _WIDTH, requires_grad=True))

    def activation(x: Any, name: str) -> Any:
        return build.python_op(build.with_id(call, int(name.removeprefix("call"))), [x], name, context=False)

    return transformer_like(nodes, _WIDTH, activation if functions else None)


def _options(optimized: bool) -> Any:
    import onnxruntime

    import exporter

    options = exporter.session_options(allow=["benchmarks._models:Gelu"])
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _steps(session: Any, count: int, names: list[str] | None = None) -> float:
    """Median seconds of a step after the first, which hands out these outputs: None for all."""
    import numpy as np

    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal((2, 4, _WIDTH), dtype=np.float32) for value in session.get_inputs()}
    times = [_seconds(lambda: session.run(names, feeds)) for _ in range(count + 1)]
    assert all(np.isfinite(array).all() for array in times[-1][1])
    return statistics.median(seconds for seconds, _ in times[1:])


def _plain(nodes: int, repeat: int, steps: int) -> tuple[float, float]:
    """Seconds of a session of onnxruntime's own, and of a step."""
    import onnx_ir as ir
    import onnxruntime

    from exporter.gradient_graph.build import build_gradient_graph
    from exporter.runtime.node_order import MANY_NODES, list_as_they_can_run

    proto = ir.to_proto(build_gradient_graph(graph(nodes, functions=False)))
    if len(proto.graph.node) >= MANY_NODES:  # as pythonop does: otherwise 30,000 nodes take minutes
        list_as_they_can_run(proto.graph)
    data = proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_mem_pattern = 1, False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = [_seconds(lambda: onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])) for _ in range(repeat)]
    return min(seconds for seconds, _ in made), _steps(made[-1][1], steps)


def measure(nodes: int) -> dict[str, float]:
    """One size, in this process: seconds and MiB.

    Returns:
        nodes of the training graph; build, prepare (what pythonop does before onnxruntime gets the graph), session (what that does,
        without its optimizers), step, step of one output; up to `OPTIMIZED` optimized (all of inference_session with them), plain session and plain
        step; memory of build, memory of session (and of the steps, without optimizers).
    """
    import torch

    from exporter.gradient_graph.build import build_gradient_graph
    from exporter.runtime import session as sessions

    torch.set_num_threads(1)
    repeat = max(1, min(5, 10_000 // nodes))
    steps = max(5, min(100, 30_000 // nodes))
    inside: list[float] = []
    actual = sessions.Session.__init__

    def timed(*arguments: Any, **keywords: Any) -> None:
        inside.append(_seconds(lambda: actual(*arguments, **keywords))[0])

    def opened(model: Any, optimized: bool) -> tuple[float, float, Any]:
        with mock.patch.object(sessions.Session, "__init__", timed):
            seconds, session = _seconds(lambda: sessions.inference_session(model, sess_options=_options(optimized)))
        return seconds - inside[-1], inside[-1], session

    forward = graph(nodes)
    opened(build_gradient_graph(graph(10)), True)  # what is imported and registered once
    first, building, training = _peak(lambda: build_gradient_graph(forward))
    build = min([first, *(_seconds(lambda: build_gradient_graph(forward))[0] for _ in range(repeat - 1))])

    def whole() -> tuple[float, ...]:
        own, onnxruntimes, session = opened(training, False)
        return own, onnxruntimes, _steps(session, steps), _steps(session, steps, [session.get_outputs()[0].name])

    _, running, (own, onnxruntimes, step, lean) = _peak(whole)
    for _ in range(repeat - 1):
        own, onnxruntimes = (min(pair) for pair in zip((own, onnxruntimes), opened(training, False)[:2], strict=True))
    found = {
        "nodes": len(training.graph),
        "build": build,
        "prepare": own,
        "session": onnxruntimes,
        "step": step,
        "step of one output": lean,
    }
    if nodes <= OPTIMIZED:
        found["optimized"] = min(sum(opened(training, True)[:2]) for _ in range(repeat))
        found["plain session"], found["plain step"] = _plain(nodes, repeat, steps)
    return {**found, "memory of build": building, "memory of session": running}


#: Key of `measure` -> what it is called.
_TIMES = {
    "build": "build_gradient_graph",
    "prepare": "inference_session, pythonop's part",
    "session": "inference_session, onnxruntime's part without its optimizers",
    "plain session": "plain onnxruntime, the same without a Function and optimizers: session",
    "optimized": "inference_session as it is by default",
    "step": "step",
    "plain step": "plain onnxruntime: step",
    "step of one output": "step that hands out one output",
}
_MEMORY = {"memory of build": "peak of build_gradient_graph", "memory of session": "peak of session and steps"}


def sizes(numbers: list[int]) -> list[Figure]:
    """Chains of these many nodes."""
    found = {number: child("--size", str(number), program="scale") for number in numbers}
    figures = []
    for number, values in found.items():
        name = f"{number} nodes"
        for key, what in _TIMES.items():
            if key in values:
                note = f"{values[key]:.3g} s" + (f"; {values['nodes']:.0f} nodes with the gradient" if key == "build" else "")
                figures.append(Figure(f"{name}: {what}", 1e6 * values[key] / number, "us a node", None, 1, note))
        for key, what in _MEMORY.items():
            figures.append(Figure(f"{name}: {what}", 1024 * values[key] / number, "KiB a node", None, 1, f"{values[key]:.0f} MiB"))
    for key, what in {**_TIMES, **_MEMORY}.items():
        small, *_, large = [number for number in found if key in found[number]] * 2
        if small != large:
            ratio = found[large][key] / large / (found[small][key] / small)
            figures.append(Figure(f"{what}: growth of a node's, {small} to {large}", ratio, "ratio", GROWTH.get(key)))
    return figures


def steps_of(name: str, batch: int, threads: list[int], steps: int) -> dict[str, dict[str, float]]:
    """Threads -> median seconds of a training step of ours and of eager, in turns."""
    import torch

    from benchmarks import _models

    torch.manual_seed(0)
    sample = _models.gpt(batch, length=32) if name == "gpt" else _models.cnn(batch)
    program = exported(sample)
    plain, found = eager(sample), {}
    for count in threads:
        torch.set_num_threads(count)
        found[str(count)] = turns({"ours": runs(program, sample, count), "eager": plain}, steps)[0]
    return found


def batches(numbers: list[int], threads: list[int], steps: int) -> list[Figure]:
    """Training steps of a transformer and of a convolutional network."""
    figures = []
    for name, said in (("gpt", "GPT of 4 layers, {} x 32"), ("cnn", "four convolutions, {} x 3 x 32 x 32")):
        for batch in numbers:
            arguments = ["--batch", name, str(batch), "--threads", *map(str, threads), "--steps", str(steps)]
            for count, seconds in child(*arguments, program="scale").items():
                what = f"{said.format(batch)}, {count} thread{'s' if count != '1' else ''}: ours / eager"
                note = f"{1e3 * seconds['ours']:.1f} ms; eager {1e3 * seconds['eager']:.1f} ms"
                figures.append(Figure(what, seconds["ours"] / seconds["eager"], "ratio", LIMITS[name], steps, note))
    return figures


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[300, 3000, 30_000, 100_000])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=9, help="of a batch (default 9)")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--batch", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.size:
        print(json.dumps(measure(options.size)))
        return 0
    if options.batch:
        print(json.dumps(steps_of(options.batch[0], int(options.batch[1]), options.threads, options.steps)))
        return 0
    figures = sizes(sorted(options.sizes)) if options.sizes else []
    return tell("scale", [*figures, *batches(options.batches, options.threads, options.steps)])


if __name__ == "__main__":
    sys.exit(main())
