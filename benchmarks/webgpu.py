"""Training steps on onnxruntime-web's WebGPU beside its WebAssembly, in one page of Chromium: the six of docs/providers.md, with AdamW, written for WebGPU.

Usage::

    python -m benchmarks.webgpu            # medians of 15 runs each, after 3 of warming up
    python -m benchmarks.webgpu --runs 5

A graphics card's figures need a machine that has one, and ``--card``; without it SwiftShader computes WebGPU on the processor. Needs `make node` and a Chromium.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._report import Figure, tell
from tests import browser
from tests.providers.sessions import in_chromium
from tests.providers.steps import STEPS, StepOnAProvider

WARM = 3


def described(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Tensors as `tests/providers/answer.mjs` takes them."""
    return {
        name: {"type": array.dtype.name, "dims": array.shape, "data": base64.b64encode(np.ascontiguousarray(array)).decode()}
        for name, array in ((name, np.asarray(array)) for name, array in arrays.items())
    }


def main() -> int:
    """Measure, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--card", action="store_true", help="the machine's own adapter, not SwiftShader")
    given = parser.parse_args()
    figures = []
    with contextlib.ExitStack() as kept:
        ask = in_chromium(kept, browser.WEBGPU[:1] if given.card else browser.WEBGPU)
        for name in STEPS:
            if not name.endswith("AdamW"):
                continue
            found = StepOnAProvider.of(name)
            step = found.step.written_for("webgpu")
            kinds = {value.name: value.dtype.numpy() for value in step.model.graph.inputs if value.dtype is not None}
            batch = {key: array.astype(kinds[key]) for key, array in found.batches[0].items()}
            feeds, model = described({**step.initial, **batch}), base64.b64encode(step.model_proto.SerializeToString()).decode()
            for provider in ("wasm", "webgpu"):
                ask({"model": model, "options": {"executionProviders": [provider]}})
                took = [ask({"feeds": feeds})["took"] for _ in range(WARM + given.runs)][WARM:]
                note = "" if provider == "wasm" else "a graphics card" if given.card else "SwiftShader, on the processor"
                figures.append(Figure(f"{name}: {provider}", statistics.median(took), "ms", runs=given.runs, note=note))
    return tell("webgpu", figures)


if __name__ == "__main__":
    sys.exit(main())
