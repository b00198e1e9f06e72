"""Memory and time of a training step: GPT-2 of 4 layers, d=256, batch 8, 128 tokens, eager and loaded file.

    python -m benchmarks.training_memory                                # both, each in a process of its own, as a table
    python -m benchmarks.training_memory --steps 1000                   # does anything grow?
    python -m benchmarks.training_memory --steps 1000 --model bloom     # the same of a model with PythonOps, in seconds

Memory is the peak resident set during steps 3 to 8 less what was resident before the first step: activations, gradients,
optimizer state, and for the file its sessions. The limit, of GPT-2 alone, is 1.2 times eager's.

Growth is what the resident set has gained since the first fifth of the steps: a sample every hundredth of them, after the C
library has given back what is free (its heap's own holes come and go by tens of MiB, in eager, too), the median of the last
ten less that of the first ten. The limit is 4 MiB; one leaked activation of GPT-2 a step would be 800 MiB, and the contexts
of PythonOps that are alive at the end must be none.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._process import status
from benchmarks._report import Figure, tell

LIMIT = 1.2
#: MiB from the first fifth of the steps to the last: 5 KiB a step of 1000.
GROWTH_LIMIT = 4.0


def gpt2() -> tuple[Any, tuple[Any, ...]]:
    import torch

    from benchmarks._models import gpt

    torch.manual_seed(0)
    sample = gpt(8)
    return sample.model, sample.args


def bloom() -> tuple[Any, tuple[Any, ...]]:
    """BLOOM of the demo, whose GeLU is a Function: (2, 7) token ids and their mask."""
    from examples import demo

    case = demo.bloom()
    return case.model, case.args


MODELS = {"gpt2": gpt2, "bloom": bloom}


def growth(step: Callable[[], None], steps: int) -> float:
    """MiB that the resident set gains over many steps, warm-up left out."""
    marks = []
    for index in range(steps):
        step()
        if index >= steps // 5 and index % max(1, steps // 100) == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            marks.append(status("VmRSS"))
    return statistics.median(marks[-10:]) - statistics.median(marks[:10])


def measure(name: str, kind: str, steps: int, path: str | None) -> dict[str, float]:
    """One kind of training, in this process."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model, args = MODELS[name]()
    ids = args[0]
    if kind == "file":
        import exporter

        assert path is not None
        del model
        model = exporter.load(path, allow=["transformers.models.*"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        logits = model(*args)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    gc.collect()
    before = status("VmRSS")
    step()
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    result = {"step_mib": status("VmHWM") - before, "seconds": statistics.median(times), "resident_mib": before}
    if steps:
        result["growth_mib"] = growth(step, steps)
    if kind == "file":
        result["live_contexts"] = len(model._onnx.plans.store)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="also train for so many steps, and say whether anything grows")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--one", choices=("eager", "file"), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measure(options.model, options.one, options.steps, options.path)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        code = f"import exporter; from benchmarks.training_memory import MODELS; m, a = MODELS[{options.model!r}](); exporter.export(m, a).save({path!r})"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        found = {}
        for kind in ("eager", "file"):
            command = [sys.executable, "-m", "benchmarks.training_memory", "--one", kind, "--path", path]
            done = subprocess.run(
                [*command, "--model", options.model, "--steps", str(options.steps)], check=True, capture_output=True, text=True
            )
            found[kind] = json.loads(done.stdout.splitlines()[-1])
    eager, file = found["eager"], found["file"]
    limit = LIMIT if options.model == "gpt2" else None  # of a model of 40 thousand parameters the sessions are most of what there is
    note = f"{file['step_mib']:.0f} MiB; eager {eager['step_mib']:.0f}"
    figures = [
        Figure(f"{options.model}: memory of a step, file / eager", file["step_mib"] / eager["step_mib"], "ratio", limit, 1, note),
        Figure(f"{options.model}: time of a step, file / eager", file["seconds"] / eager["seconds"], "ratio", None, 6),
        Figure(f"{options.model}: contexts alive at the end", file["live_contexts"], "", 0),
    ]
    if options.steps:
        note = f"eager {eager['growth_mib']:+.2f}"
        figures.append(Figure(f"{options.model}: growth over {options.steps} steps", file["growth_mib"], "MiB", GROWTH_LIMIT, 1, note))
    return tell("training_memory", figures)


if __name__ == "__main__":
    sys.exit(main())
