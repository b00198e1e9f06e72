"""Resident memory over many runs: flat after warm-up, or something is kept that nobody will use.

And tensors of 64 MB, whose memory onnxruntime takes for other values as soon as it may: outputs and gradients right in each of
50 runs, for Functions that save their input, their output, an intermediate, their input on ctx, and nothing.

Run: python benchmarks/runtime_growth.py [--quick]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import onnxruntime
import torch

from benchmarks._report import Figure, tell
from exporter.runtime.session import inference_session
from exporter.runtime.store import ContextStore
from tests.exporter.runtime.build import record, sandwich, training
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]
X = torch.randn(64, 64, requires_grad=True)  # 16 KB: what leaks shows
FEEDS = {"x0": X.detach().numpy()}
SEED = {"g0": np.ones((64, 64), np.float32)}


def resident() -> float:
    """Megabytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def training_steps() -> tuple[Callable[[], object], ContextStore]:
    session = inference_session(training(record(F.SavesInput, X), repeat=3), ALLOW)
    return lambda: session.run(None, {**FEEDS, **SEED}), session.store


def single_steps() -> tuple[Callable[[], object], ContextStore]:
    session = inference_session(training(record(F.SavesInput, X)), ALLOW)
    return lambda: session.run(None, {**FEEDS, **SEED}), session.store


def forwards() -> tuple[Callable[[], object], ContextStore]:
    # The whole training graph is there, only its forward output is asked for.
    session = inference_session(training(record(F.SavesInput, X), repeat=3), ALLOW)
    name = session.get_outputs()[0].name
    return lambda: session.run([name], {**FEEDS, **SEED}), session.store


def sessions() -> tuple[Callable[[], object], ContextStore]:
    model = training(record(F.SavesInput, X))
    store = ContextStore()
    return lambda: inference_session(model, ALLOW, store=store).run(None, {**FEEDS, **SEED}), store


def exceptions() -> tuple[Callable[[], object], ContextStore]:
    positive = X.detach().abs().requires_grad_()
    session = inference_session(training(record(F.Raises, positive), repeat=3), ALLOW)
    bad = {"x0": np.ones((64, 64), np.float32), "g0": -SEED["g0"]}

    def run() -> None:
        try:
            session.run(None, bad)
        except F.CustomError:
            return
        raise AssertionError("it should have raised")

    return run, session.store


def large_tensors(cls: type) -> tuple[Callable[[], object], ContextStore]:
    x, seed = torch.randn(1 << 24), torch.randn(1 << 24)
    leaf = x.clone().requires_grad_()
    y = -cls.apply(leaf.relu() * 0.5)  # type: ignore[attr-defined]
    (gradient,) = torch.autograd.grad(y, leaf, seed)
    session = inference_session(sandwich(cls, x), ALLOW)
    feeds = {"x0": onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()), "g0": onnxruntime.OrtValue.ortvalue_from_numpy(seed.numpy())}

    def run() -> None:
        for found, expected in zip(session.run_with_ort_values(None, feeds), (y, gradient), strict=True):
            torch.testing.assert_close(torch.from_numpy(found.numpy()), expected.detach(), rtol=1e-6, atol=1e-7)

    return run, session.store


_LARGE = (F.SavesInput, F.SavesOutput, F.SavesIntermediate, F.KeepsInputOnCtx, F.SavesNothing)

#: name -> (what, how often)
CASES: dict[str, tuple[Callable[[], tuple[Callable[[], object], ContextStore]], int]] = {
    "training steps": (training_steps, 10_000),
    "training steps, one call": (single_steps, 10_000),
    "forwards without backward": (forwards, 10_000),
    "sessions": (sessions, 1000),
    "exceptions": (exceptions, 1000),
    **{f"64 MB, {cls.__name__}": (lambda cls=cls: large_tensors(cls), 50) for cls in _LARGE},  # type: ignore[misc]
}

#: Megabytes from the first fifth of the runs to the end: 10,000 leaked tensors would be 160 MB, and forty of the large ones 2.6 GB.
#: A large tensor that happens to be free at one end and not at the other is none that leaked.
AT_MOST, AT_MOST_LARGE = 4.0, 68.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    parser.add_argument("--only", nargs="*", help="cases by name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onnxruntime.set_default_logger_severity(4)
    figures = []
    for name, (make, times) in CASES.items():
        if options.only and name not in options.only:
            continue
        times //= 10 if options.quick else 1
        run, store = make()
        for _ in range(times // 5):
            run()
        gc.collect()
        start = resident()
        for _ in range(times - times // 5):
            run()
        gc.collect()
        at_most = AT_MOST_LARGE if name.startswith("64 MB") else AT_MOST
        grown, live = resident() - start, len(store)
        figures.append(Figure(f"{name}: growth", grown, "MB", at_most, 1, f"{times} runs"))
        figures.append(Figure(f"{name}: contexts alive at the end", live, "", 0))
    return tell("runtime_growth", figures)


if __name__ == "__main__":
    sys.exit(main())
