"""A training step (forward, loss, backward, AdamW) as one ONNX model, beside what people would use instead.

    python -m benchmarks.training_step                  # every model
    python -m benchmarks.training_step gpt-b2 resnet    # some

Per model, in one process of its own: our step in onnxruntime, eager PyTorch (foreach AdamW), torch.compile, and the gradient
graph of onnx-ad (without optimizer) where it can make one; they take turns of a few steps, so that what else the machine does hits
all alike. Figures are medians of the steps after those of warming up, as ratios to eager. Peak memory, parameters and optimizer state
counted, is measured in processes that run one of them alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._process import status
from benchmarks._report import Figure, tell

#: model -> the most that our time may be of eager's.
LIMITS = {
    "gpt-b8": 0.65, "gpt-b2": 0.65, "gpt-b1-512": 0.65, "gpt-b1-1024": 0.65, "gpt-b2-gelu": 0.65, "bloom": 0.7,
    "cnn": 1.0, "resnet": 0.8, "resnet18": 1.0, "convnext": 1.0,
    "rnn": 0.85, "gru": 0.85, "lstm": 0.85, "bi-lstm": 0.85, "snntorch": 0.4, "chain-100": 1.0,
}  # fmt: skip
#: The same where the Functions of the model are ONNX functions (portable=True).
PORTABLE_LIMITS = {"gpt-b2-gelu": 1.0, "bloom": 1.0, "snntorch": 1.0, "chain-100": 0.35}
#: The same of the file as a module, its loss and optimizer eager.
LOADED_LIMITS = {
    "gpt-b8": 0.65, "gpt-b2": 0.65, "gpt-b1-512": 0.65, "gpt-b1-1024": 0.65, "cnn": 1.0, "resnet18": 1.0, "convnext": 1.0, "chain-100": 1.15,
}  # fmt: skip
MEMORY_LIMIT = 0.9
#: Measured with recompute="auto" as well, whose memory is then held to the limit: eager's attention of long sequences keeps no matrices.
RECOMPUTED = ("gpt-b1-1024", "bloom")
#: ORTModule 1.19.2 over eager with torch 2.4.1 on another machine of two threads, spinning off: for orientation.
ORTMODULE = {"gpt-b2-gelu": 1.19, "resnet": 1.7, "chain-100": 1.65}
ALLOWED = ["benchmarks._models:*", "transformers.models.bloom.*", "snntorch.surrogate*"]
THREADS = 2
#: Seconds between two contenders: OpenMP's threads spin for some 10 ms after their last work.
PAUSE = 0.03
#: Steps of a turn that are not counted, and that are.
UNCOUNTED, COUNTED = 2, 3
#: Contenders that must run, and learn as eager does.
OWN = ("ours", "eager", "loaded", "portable", "recompute")


def ours(sample: Any, portable: bool = False, recompute: Any = None) -> Callable[[], float]:
    """A step of ours; each call runs it and returns the loss."""
    step = exported(sample, portable, recompute)
    run = runs(step, sample)
    step.initial.clear()
    return run


def exported(sample: Any, portable: bool = False, recompute: Any = None) -> Any:
    """A step with AdamW as a Program."""
    import exporter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exporter.export_training_step(
            sample.model, sample.args, loss=sample.loss, targets=sample.targets, optimizer="adamw", portable=portable, recompute=recompute
        )


def runs(step: Any, sample: Any, threads: int = THREADS, accelerate: bool = True, providers: Any = None) -> Callable[[], float]:
    """A trainer of a step; each call makes a step of the same batch and returns the loss."""
    import onnxruntime

    from exporter.runtime.arena import use_training_arena
    from exporter.training.trainer import Trainer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    use_training_arena(options)  # as inference_session's own options for a step
    trainer = Trainer(step, allow=ALLOWED, sess_options=options, providers=providers, accelerate=accelerate)
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    batch = dict(zip(names, (*sample.args, *sample.targets), strict=True))
    return lambda: trainer.step(batch)


def eager(sample: Any, compiled: bool = False, bfloat16: bool = False) -> Callable[[], float]:
    import torch

    forward = torch.compile(sample.model) if compiled else sample.model
    optimizer = torch.optim.AdamW(sample.model.parameters(), foreach=True)

    def run() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = sample.loss(forward(*sample.args), *sample.targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def _loaded(sample: Any) -> Callable[[], float]:
    """The file as a module, its loss and optimizer eager."""
    import dataclasses

    import exporter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(sample.model, sample.args)
    return eager(dataclasses.replace(sample, model=exporter.load(program, allow=ALLOWED).train()))


def _onnx_ad(sample: Any) -> Callable[[], float]:
    """Forward and backward by onnx-ad, every parameter an input, without an optimizer."""
    import numpy as np
    import onnx
    import onnxruntime
    from onnx_ad import reverse

    import exporter
    from exporter.training.objective import Objective

    objective = Objective(sample.model, sample.args, {}, sample.loss, sample.targets, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = exporter.export(objective, objective.args).model_proto
    parameters = {name: p.detach().numpy() for name, p in objective.named_parameters()}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in parameters]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    proto.graph.input.extend(onnx.helper.make_tensor_value_info(name, 1, array.shape) for name, array in parameters.items())
    adjoint = reverse(proto)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(adjoint.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [*objective.names, *objective.target_names]
    feeds = {**dict(zip(names, (t.numpy() for t in (*sample.args, *sample.targets)), strict=True)), **parameters}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.ones([d if isinstance(d, int) else 1 for d in value.shape], np.float32)
    return lambda: float(np.asarray(session.run(None, feeds)[0]).reshape(-1)[0])


def _contenders(name: str, compiled: bool) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    import torch

    from benchmarks._models import MODELS

    made: dict[str, Callable[[Any], Callable[[], float]]] = {"ours": ours, "eager": eager, "loaded": _loaded}
    if name in PORTABLE_LIMITS:
        made["portable"] = lambda sample: ours(sample, True)
    if name in RECOMPUTED:
        made["recompute"] = lambda sample: ours(sample, recompute="auto")
    if compiled:
        made["torch.compile"] = lambda sample: eager(sample, True)
    made["onnx-ad, no optimizer"] = _onnx_ad
    found, refused = {}, {}
    for kind, make in made.items():
        torch.manual_seed(0)
        try:
            run = make(MODELS[name]())
            run()
            found[kind] = run
        except Exception as error:
            if kind in OWN:
                raise
            refused[kind] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}"
    return found, refused


def _measure(name: str, steps: int, compiled: bool) -> dict[str, Any]:
    import torch

    torch.set_num_threads(THREADS)
    found, refused = _contenders(name, compiled)
    seconds, losses = turns(found, steps)
    if any(abs(losses[kind] - losses["eager"]) > 2e-2 * max(1, abs(losses["eager"])) for kind in OWN if kind in losses):
        raise RuntimeError(f"{name}: the losses differ: {losses}")
    return {"seconds": seconds, "refused": refused}


def turns(contenders: dict[str, Callable[[], float]], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step of each, over at least so many; and the loss of its last step.

    They take turns of a few steps, of which the first find the processor's caches full of another's data: who trains runs one in a loop.
    Between two turns is a pause, in which the threads of the one before cease to spin. The first turn of each warms up.
    """
    times: dict[str, list[float]] = {kind: [] for kind in contenders}
    losses: dict[str, float] = {}
    for turn in range(1 + math.ceil(steps / COUNTED)):
        for kind, run in contenders.items():
            time.sleep(PAUSE)
            for number in range(UNCOUNTED + COUNTED):
                begin = time.perf_counter()
                losses[kind] = run()
                if turn and number >= UNCOUNTED:
                    times[kind].append(time.perf_counter() - begin)
    return {kind: statistics.median(values) for kind, values in times.items()}, losses


def _memory(name: str, kind: str) -> float:
    """What steps 3 to 8 need at their peak, in MiB, with the parameters and the optimizer's moments, which eager makes at its first step."""
    import torch

    from benchmarks._models import MODELS

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    sample = MODELS[name]()
    if kind == "eager":
        run = eager(sample)
        held = sum(parameter.nbytes for parameter in sample.model.parameters())
    else:
        step = exported(sample, recompute="auto" if kind == "recompute" else None)
        run = runs(step, sample)
        held = sum(array.nbytes for array in step.initial.values())
        step.initial.clear()
        sample = None
    return peak(run) + held / 2**20


def peak(run: Callable[[], float]) -> float:
    """Peak resident memory of runs 3 to 8 above what was resident before the first, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an export has freed would count as ours already
    before = status("VmRSS")
    for _ in range(2):
        run()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    for _ in range(6):
        run()
    return status("VmHWM") - before


def child(*arguments: str, program: str = "training_step") -> Any:
    """What a benchmark tells in a process of its own, as its last line of JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: its first step takes half a minute")
    parser.add_argument("--no-memory", action="store_true", help="leave memory out, which is measured in processes of its own")
    parser.add_argument("--time", help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.time:
        print(json.dumps(_measure(options.time, options.steps, not options.no_compile)))
        return 0
    if options.memory:
        print(json.dumps(_memory(*options.memory)))
        return 0
    figures = []
    for name in options.models or LIMITS:
        found = child("--time", name, "--steps", str(options.steps), *(["--no-compile"] if options.no_compile else []))
        seconds = found["seconds"]
        note = f"{1e3 * seconds['ours']:.1f} ms; eager {1e3 * seconds['eager']:.1f} ms"
        figures.append(Figure(f"{name}: ours / eager", seconds["ours"] / seconds["eager"], "ratio", LIMITS[name], options.steps, note))
        for kind, value in seconds.items():
            if kind not in ("ours", "eager"):
                limit = {"portable": PORTABLE_LIMITS, "loaded": LOADED_LIMITS}.get(kind, {}).get(name)
                figures.append(Figure(f"{name}: {kind} / eager", value / seconds["eager"], "ratio", limit, options.steps))
        for kind, reason in found["refused"].items():
            figures.append(Figure(f"{name}: {kind}", None, "", None, 0, f"cannot: {reason}"))
        if name in ORTMODULE:
            figures.append(Figure(f"{name}: ORTModule 1.19.2 / eager", ORTMODULE[name], "ratio", None, 0, "recorded earlier, torch 2.4.1"))
        if options.no_memory:
            continue
        kinds = ("ours", "recompute") if name in RECOMPUTED else ("ours",)
        memory = {kind: child("--memory", name, kind) for kind in (*kinds, "eager")}
        limit = MEMORY_LIMIT if memory["eager"] > 16 else None  # of less it says nothing
        for kind in kinds:
            figures.append(
                Figure(
                    f"{name}: memory of a step, {kind} / eager",
                    memory[kind] / memory["eager"],
                    "ratio",
                    limit if kind == kinds[-1] else None,
                    6,
                    f"{memory[kind]:.0f} MiB; eager {memory['eager']:.0f} MiB",
                )
            )
    return tell("training_step", figures)


if __name__ == "__main__":
    sys.exit(main())
