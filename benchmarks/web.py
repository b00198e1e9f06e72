"""The page of examples/web in numbers: a training step of the same file in Python, in Node and in Chromium, and what a visitor loads.

Usage::

    python -m benchmarks.web              # medians of 5 runs of 300 steps each, on one thread, after 50 steps of warming up
    python -m benchmarks.web --runs 1 --steps 50

Needs `make node` and a Chromium; where one is missing, its figure is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks._report import Figure, tell
from examples.web import build
from tests import browser
from tests.processes import ROOT

WARM = 50
# For each run, what a step took in milliseconds: the loop of pythonop.mjs on batches that are made before.
_MEASURE = """
export async function measure(ort, Trainer, source, about, bytes, { runs, steps, warm, ...session }) {
  const { batch, size, training, test } = about, area = size * size, from = training + test;
  const batches = Array.from({ length: training / batch }, (_, at) => ({
    image: new ort.Tensor("float32", Float32Array.from(bytes.subarray(from + at * batch * area, from + (at + 1) * batch * area), (value) => value / 255), [batch, area]),
    target: new ort.Tensor("int32", Int32Array.from(bytes.subarray(at * batch, (at + 1) * batch)), [batch]),
  }));
  const model = await Trainer.load(ort, source, { intraOpNumThreads: 1, ...session });
  const took = [];
  for (let at = 0; at < warm; at++) await model.step(batches[at % batches.length]);
  for (let run = 0; run < runs; run++) {
    const start = performance.now();
    for (let at = 0; at < steps; at++) await model.step(batches[at % batches.length]);
    took.push((performance.now() - start) / steps);
  }
  return took;
}
"""
_NODE = """
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const [measure, helper, page, options] = process.argv.slice(2);
const [{ measure: run }, { Trainer }] = [await import(measure), await import(helper)];
const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const about = JSON.parse(readFileSync(`${page}/about.json`));
console.log(JSON.stringify(await run(ort, Trainer, `${page}/model`, about, readFileSync(`${page}/digits.bin`), JSON.parse(options))));
"""
_PAGE = """<script type="module">
import * as ort from "/page/ort/RUNTIME";
import { Trainer } from "/page/pythonop.mjs";
import { measure } from "/measure.mjs";
ort.env.wasm.numThreads = 1;
const about = await (await fetch("/page/about.json")).json();
const bytes = new Uint8Array(await (await fetch("/page/digits.bin")).arrayBuffer());
tell({ took: await measure(ort, Trainer, "/page/model", about, bytes, OPTIONS), version: ort.env.versions.web, browser: navigator.userAgent });
</script>"""


def in_python(page: Path, runs: int, steps: int) -> list[float]:
    """Milliseconds of a step, for each run: the loop of docs/training.md."""
    about = json.loads((page / "about.json").read_text())
    data = np.frombuffer((page / "digits.bin").read_bytes(), np.uint8)
    batch, count = about["batch"], about["training"] + about["test"]
    labels, images = data[:count].astype(np.int32), data[count:].reshape(count, -1).astype(np.float32) / 255
    batches = [{"image": images[at : at + batch], "target": labels[at : at + batch]} for at in range(0, about["training"], batch)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session, initial = (onnxruntime.InferenceSession(page / "model" / f"{name}.onnx", options) for name in ("training", "initial"))
    state = dict(zip([value.name for value in initial.get_outputs()], initial.run(None, {}), strict=True))
    names = [value.name for value in session.get_outputs()]

    def step(at: int) -> None:
        results = session.run(None, {**state, **batches[at % len(batches)]})
        state.update((name[: -len(".next")], value) for name, value in zip(names, results, strict=True) if name.endswith(".next"))

    for at in range(WARM):
        step(at)
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        for at in range(steps):
            step(at)
        took.append(1000 * (time.perf_counter() - start) / steps)
    return took


def in_node(page: Path, folder: Path, options: dict[str, int]) -> list[float]:
    """The same in a new Node."""
    (folder / "node.mjs").write_text(_NODE)
    command = ["node", str(folder / "node.mjs"), (folder / "measure.mjs").as_uri(), (ROOT / "examples" / "pythonop.mjs").as_uri()]
    done = subprocess.run([*command, str(page), json.dumps(options)], cwd=build.packages(), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def in_chromium(page: Path, folder: Path, options: dict[str, int]) -> list[Figure]:
    """The same in a page, on WebAssembly, and on WebGPU as SwiftShader computes it on the processor: a twentieth of the steps."""
    places = {"/page": page, "/measure.mjs": folder / "measure.mjs"}
    fewer = {"runs": options["runs"], "steps": max(options["steps"] // 20, 1), "warm": max(options["warm"] // 20, 1)}
    figures = []
    for name, runtime, chosen, flags in (
        ("WebAssembly", build.RUNTIME[0], {**options, "executionProviders": ["wasm"]}, ()),
        ("WebGPU by SwiftShader", build.RUNTIME[2], {**fewer, "executionProviders": ["webgpu"]}, browser.WEBGPU),
    ):
        script = _PAGE.replace("OPTIONS", json.dumps(chosen)).replace("RUNTIME", runtime)
        told = browser.told_by(script, places, timeout=600, flags=flags)
        figures.append(_figure(f"Chromium, {name}", told["took"], f"onnxruntime-web {told['version']}, {told['browser'].split()[-2]}"))
    return figures


def loaded(page: Path) -> list[Figure]:
    """What a visitor's browser loads: each file as it is, and by gzip, which most servers send."""
    used = [
        path
        for path in sorted(page.rglob("*"))
        if path.is_file() and (path.parent.name != "ort" or "wasm.bundle" in path.name or "threaded.wasm" in path.name)
    ]
    sizes = {path: (path.stat().st_size, len(gzip.compress(path.read_bytes(), 9))) for path in used}
    rows = [
        Figure(str(path.relative_to(page)), plain / 1000, "kB", note=f"by gzip {small / 1000:.1f} kB")
        for path, (plain, small) in sizes.items()
    ]
    plain, small = (sum(size[at] for size in sizes.values()) / 1000 for at in (0, 1))
    return [*rows, Figure("together", plain, "kB", note=f"by gzip {small:.1f} kB")]


def _figure(what: str, took: list[float] | None, note: str) -> Figure:
    return Figure(f"a step in {what}", statistics.median(took) if took else None, "ms", runs=len(took or [0]), note=note)


def main() -> int:
    """Measure, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    options = {"runs": given.runs, "steps": given.steps, "warm": WARM}
    try:
        build.runtime(build.packages())
    except FileNotFoundError as error:
        return tell("web", [Figure("a step in the browser", None, "ms", note=str(error))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "page"
        build.build(page)
        (folder / "measure.mjs").write_text(_MEASURE)
        figures = [_figure("Python", in_python(page, given.runs, given.steps), f"onnxruntime {onnxruntime.__version__}")]
        if shutil.which("node"):
            package: Any = json.loads((build.packages() / "node_modules" / "onnxruntime-node" / "package.json").read_text())
            figures.append(_figure("Node", in_node(page, folder, options), f"onnxruntime-node {package['version']}"))
        if browser.installed():
            figures += in_chromium(page, folder, options)
        figures += loaded(page)
    return tell("web", figures)


if __name__ == "__main__":
    sys.exit(main())
