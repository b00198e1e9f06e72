"""Artifacts train in a real browser: npm's onnxruntime-web in Chromium, beside Node, Python and eager."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from examples.web import build
from tests.browser import WEBGPU, chromium, told_by
from tests.exporter.training.javascript import (
    DRIVER,
    FOLDER,
    HELPER,
    artifacts,
    assert_in_envelope,
    evaluated,
    in_node,
    network,
    package,
    restored,
    spiking_task,
    write_batches,
)
from tests.exporter.training.loop import run
from tests.support import missing

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# `parts` are trainings one after the other: [first batch, end, number of the part whose state it goes on from, or null].
_PAGE = """<script type="module">
import * as ort from "/ort/ort.wasm.bundle.min.mjs";
import { Trainer } from "/pythonop.mjs";
import { drive } from "/drive.mjs";
ort.env.wasm.numThreads = 1;
const batches = await (await fetch("/batches.json")).json();
const answers = [];
for (const [first, end, before] of PARTS)
  answers.push(await drive(ort, Trainer, "artifacts", { batches, first, end, from: before === null ? null : answers[before].saved }));
tell(answers.map((answer) => ({ ...answer, saved: btoa(Array.from(answer.saved, (byte) => String.fromCharCode(byte)).join("")) })));
</script>"""


def _in_browser(folder, parts):
    """What drive.mjs answers for each part, in a new browser; states are bytes."""
    places = {
        "/ort": package("onnxruntime-web") / "dist", "/pythonop.mjs": HELPER, "/drive.mjs": DRIVER,
        "/artifacts": folder / "artifacts", "/batches.json": folder / "batches.json",
    }  # fmt: skip
    answers = told_by(_PAGE.replace("PARTS", json.dumps(parts)), places)
    return [{**answer, "saved": base64.b64decode(answer["saved"])} for answer in answers]


def _needed():
    """Leave the test at once, before anything is exported."""
    chromium()
    package("onnxruntime-web")


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def test_a_browser_trains_a_function_with_a_backward_of_its_own(dynamo, tmp_path):
    """200 steps of AdamW on the same files: Chromium beside Node, Python's onnxruntime and eager; what it saved goes on to the same bits."""
    _needed()
    model, batches = spiking_task()
    step = artifacts(tmp_path / "artifacts", model, batches[0], portable=True, dynamo=dynamo)
    write_batches(tmp_path, step, batches)
    whole, first, second = _in_browser(tmp_path, [[0, 200, None], [0, 77, None], [77, 200, 1]])
    assert len(whole["losses"]) == 200
    assert_in_envelope(whole["losses"], model, batches)
    np.testing.assert_allclose(whole["losses"][:20], run(step, batches[:20])[0], rtol=1e-4)
    node = in_node(tmp_path, tmp_path / "artifacts", 0, 20)  # a spike more or less makes a curve of its own later on
    np.testing.assert_allclose(whole["losses"][:20], node["losses"], rtol=1e-4)

    assert [*first["losses"], *second["losses"]] == whole["losses"]
    assert first["saved"] != whole["saved"]
    assert second["saved"] == whole["saved"]
    assert second["output"] == whole["output"] != first["output"]


def test_a_browser_trains_what_node_trains(tmp_path):
    """Without spikes, where nothing leaps: dropout from the seed and running statistics, each of 200 losses, and the evaluation."""
    _needed()
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(200)]
    step = artifacts(tmp_path / "artifacts", network(), batches[0])
    write_batches(tmp_path, step, batches)
    (browser,) = _in_browser(tmp_path, [[0, 200, None]])
    node = in_node(tmp_path, tmp_path / "artifacts", 0, 200)
    np.testing.assert_allclose(browser["losses"], node["losses"], rtol=1e-5)
    # Of the same state: AdamW makes whole steps of a gradient that is nothing but rounding, a bias's in front of batch norm.
    inputs = {step.layout.inputs[0]: batches[0][0].numpy()}
    expected = evaluated(tmp_path / "artifacts", restored(browser["saved"]), inputs)
    assert tuple(browser["dims"]) == expected.shape
    np.testing.assert_allclose(browser["output"], expected.ravel(), rtol=1e-4, atol=1e-5)


_WORKER = """
import * as ort from "/ort/ort.wasm.bundle.min.mjs";
import { Trainer } from "/pythonop.mjs";
ort.env.wasm.numThreads = 1;
try {
  const fetched = async (path) => ({ path, data: new Uint8Array(await (await fetch(`/artifacts/${path}`)).arrayBuffer()) });
  const externalData = await Promise.all(NAMES.map(fetched));
  const model = await Trainer.load(ort, new URL("/artifacts", location.origin).href, { externalData });
  const batch = (rows) => ({
    input: new ort.Tensor("float32", Float32Array.from({ length: 8 * rows }, (_, at) => Math.sin(at * rows)), [rows, 8]),
    target: new ort.Tensor("int64", BigInt64Array.from({ length: rows }, (_, at) => BigInt(at % 3)), [rows]),
  });
  const start = model.save(), output = async (answer) => Array.from(Object.values(await answer)[0].data);
  const apart = [await model.step(batch(8)), await output(model.evaluate({ input: batch(3).input }))];
  await model.restore(start);
  const together = await Promise.all([model.step(batch(8)), output(model.evaluate({ input: batch(3).input }))]);
  postMessage({ apart, together });
} catch (error) { postMessage({ failed: String(error.stack) }); }
"""


def test_a_worker_trains_with_data_files_and_evaluates_meanwhile(tmp_path):
    """What the page says of Web Workers, of `externalData`, and of calls that wait for each other."""
    _needed()
    torch.manual_seed(0)
    x, target = torch.randn(8, 8), torch.randint(0, 3, (8,))
    folder = tmp_path / "artifacts"
    model = torch.nn.Sequential(torch.nn.Linear(8, 64).requires_grad_(False), torch.nn.Linear(64, 3))
    artifacts(folder, model, (x, target), dynamic_shapes=({0: "batch"},), external_data=True)
    names = sorted(path.name for path in folder.glob("*.data"))
    assert [name.partition(".onnx.")[0] for name in names] == ["eval", "initial", "training"], "one beside each model that has weights"
    (tmp_path / "worker.mjs").write_text(_WORKER.replace("NAMES", json.dumps(names)))
    places = {
        "/ort": package("onnxruntime-web") / "dist", "/pythonop.mjs": HELPER, "/artifacts": folder, "/worker.mjs": tmp_path / "worker.mjs",
    }  # fmt: skip
    page = """<script type="module">new Worker("/worker.mjs", { type: "module" }).onmessage = ({ data }) => tell(data);</script>"""
    found = told_by(page, places)
    assert found["together"] == found["apart"]
    assert np.isfinite(found["apart"][0]) and len(found["apart"][1]) == 9


_FALLS_BACK = """<script type="module">
import * as ort from "/ort/ort.webgpu.bundle.min.mjs";
import { Trainer } from "/pythonop.mjs";
ort.env.wasm.numThreads = 1;
const adapter = Boolean(await navigator.gpu?.requestAdapter().catch(() => null));
const x = new ort.Tensor("float32", new Float32Array(64).fill(0.5), [8, 8]), target = new ort.Tensor("int32", new Int32Array(8), [8]);
const opened = async (...executionProviders) => {
  try { return await (await Trainer.load(ort, "artifacts", { executionProviders })).step({ input: x, target }); } catch { return "refused"; }
};
tell([adapter, await opened("webgpu"), await opened("webgpu", "wasm"), await opened("wasm")]);
</script>"""


def test_without_an_adapter_wasm_behind_webgpu_goes_on(tmp_path):
    _needed()
    torch.manual_seed(0)
    artifacts(tmp_path, torch.nn.Linear(8, 3), (torch.randn(8, 8), torch.randint(0, 3, (8,))), provider="webgpu")
    places = {"/ort": package("onnxruntime-web") / "dist", "/pythonop.mjs": HELPER, "/artifacts": tmp_path}
    adapter, alone, both, plain = told_by(_FALLS_BACK, places)
    if adapter:
        missing("webgpu", "this Chromium has an adapter without being asked for one")
    assert alone == "refused"
    assert both == plain and np.isfinite(plain)


# The page of examples/web in a frame, used as somebody would: only by what it shows.
_FRAME = """<iframe src="/page/index.html?steps=40" width="1100" height="900"></iframe><script>
const frame = document.querySelector("iframe");
const id = (name) => frame.contentDocument.getElementById(name);
const until = async (holds) => { while (!holds()) await new Promise((done) => setTimeout(done, 20)); };
const status = (pattern) => until(() => pattern.test(id("status")?.textContent ?? ""));
"""
_USED = (
    _FRAME
    + """const seen = () => ({ step: id("step").textContent, print: id("print").textContent, accuracy: parseFloat(id("accuracy").textContent) });
const wrong = new Promise((_, fail) => setInterval(() => {
  if (id("status")?.className === "wrong") fail(new Error(id("status").textContent));
}, 20));
const clicked = new Set(), buttons = () => [...frame.contentDocument.querySelectorAll("button[id]")].map(({ id }) => id);
const count = () => frame.contentDocument.addEventListener("click", ({ target }) => clicked.add(target.closest("button")?.id));
const steps = async (from, to) => { for (let at = from + 1; at <= to; at++) { id("once").click(); await status(new RegExp(`^Step ${at}\\\\.`)); } };
const use = async () => {
  await status(/^Paused at step 40/), count();
  const answer = { trained: seen(), titles: [...frame.contentDocument.querySelectorAll("h2")].map((title) => title.textContent) };
  id("save").click(), await status(/^Saved step 40/);
  await steps(40, 45), (answer.later = seen());
  frame.src = "/page/index.html", await new Promise((done) => frame.addEventListener("load", done, { once: true }));
  await status(/^Ready/), (answer.again = seen()), count();
  id("resume").click(), await status(/^Back at step 40/), (answer.resumed = seen());
  await steps(40, 45), (answer.relived = seen());
  id("run").click(), await until(() => Number(id("step").textContent) > 60);
  id("run").click(), await status(/^Paused/), (answer.ran = seen());
  id("digits").children[3].click(), await until(() => id("digits").children[3].getAttribute("aria-pressed") === "true");
  id("clear").click(), await until(() => id("digits").children[3].getAttribute("aria-pressed") === "false");
  id("reset").click(), await status(/^At the start again/), (answer.over = seen());
  id("once").click(), await status(/^Step 1\\./), (answer.first = seen());
  answer.left = buttons().filter((name) => !clicked.has(name));
  const refused = new Promise((done) => frame.contentDocument.addEventListener("securitypolicyviolation", ({ blockedURI }) => done(blockedURI)));
  await frame.contentWindow.fetch("http://example.invalid/picture.png").catch(() => null);
  answer.refused = await Promise.race([refused, new Promise((done) => setTimeout(done, 5000, "nothing"))]);
  answer.unlabelled = [...frame.contentDocument.querySelectorAll("canvas:not([aria-label]):not(button canvas)")].length;
  tell(answer);
};
Promise.race([use(), wrong]);
</script>"""
)


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_the_page_trains_saves_and_resumes(dynamo, tmp_path):
    _needed()
    about = build.build(tmp_path / "page", dynamo=dynamo, node=FOLDER)
    assert about["exporter"] == ("torch.export" if dynamo else "TorchScript")
    seen = told_by(_USED, {"/page": tmp_path / "page"})
    assert [seen[name]["step"] for name in ("trained", "later", "again", "resumed", "relived")] == ["40", "45", "0", "40", "45"]
    assert seen["resumed"] == seen["trained"]
    assert seen["relived"] == seen["later"]
    assert len({seen[name]["print"] for name in ("trained", "later", "again", "ran")}) == 4
    assert seen["again"]["accuracy"] < 40 < seen["trained"]["accuracy"]
    assert seen["over"] == seen["again"], "Start over is where the page began"
    assert seen["first"]["step"] == "1"
    assert seen["left"] == [], "every button is clicked"
    assert len(seen["titles"]) == 4
    assert seen["unlabelled"] == 0
    assert seen["refused"] == "http://example.invalid/picture.png", "the page may ask for files of its own folder alone"


_MOVED = (
    _FRAME
    + """
const move = async () => {
  const select = id("backend"), wanted = select.options[1].disabled ? "no adapter" : "WebGPU";
  select.value = "webgpu";
  select.dispatchEvent(new Event("change"));
  await status(/^Runs on|does not train/);
  const said = id("status").textContent, print = id("print").textContent;
  id("once").click(), await status(/^Step 41\\./);
  return { wanted, said, print, loss: Number(id("loss").textContent), runs: select.value };
};
(async () => {
  await status(/^Paused at step 40/);
  const print = id("print").textContent;
  tell({ ...(await move()), before: print });
})();
</script>"""
)


@pytest.mark.slow
def test_the_page_goes_on_on_webgpu_or_stays(tmp_path):
    """Computed by SwiftShader where Chromium brings it; where a file is missing, or there is no adapter, WebAssembly goes on."""
    _needed()
    build.build(tmp_path / "page", dynamo=False, node=FOLDER)
    places = {"/page": tmp_path / "page"}
    moved = told_by(_MOVED, places, flags=WEBGPU)
    (tmp_path / "page" / "ort" / "ort.webgpu.bundle.min.mjs").unlink()
    stayed = told_by(_MOVED, places)
    assert (stayed["wanted"], stayed["runs"]) == ("no adapter", "wasm")
    assert stayed["said"].startswith("WebGPU (not here) does not train this model here, so WebAssembly goes on: ")
    assert moved["print"] == stayed["print"] == moved["before"], "two steps of trial leave nothing behind"
    assert abs(moved["loss"] - stayed["loss"]) < 1e-3
    if moved["wanted"] == "no adapter":
        missing("webgpu", "this Chromium has no adapter, not even SwiftShader")
    assert (moved["said"], moved["runs"]) == ("Runs on WebGPU, from step 40.", "webgpu")


def test_what_goes_wrong_in_a_page_is_told(tmp_path):
    """Otherwise each test above would wait for an answer that does not come."""
    (tmp_path / "there.txt").write_text("there")
    asked = """<script type="module">const answer = await fetch("/NAME"); if (!answer.ok) throw new Error(`NAME: ${answer.status}`);
    tell(await answer.text());</script>"""
    places = {"/there.txt": tmp_path / "there.txt"}
    assert told_by(asked.replace("NAME", "there.txt"), places) == "there"
    with pytest.raises(AssertionError, match="other.txt: 404"):
        told_by(asked.replace("NAME", "other.txt"), places)


def test_the_page_names_its_package(tmp_path):
    with pytest.raises(FileNotFoundError, match="npm install --ignore-scripts --prefix .* onnxruntime-web"):
        build.build(tmp_path / "page", node=tmp_path)
    assert list(tmp_path.iterdir()) == []
