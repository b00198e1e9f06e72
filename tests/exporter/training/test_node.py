"""A training step without PythonOps needs no Python: npm's onnxruntime-node runs the same file to the same losses."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.training.step import export_training_step
from symbolics.node.names import GRADIENT_DOMAIN
from tests.exporter.training.javascript import (
    HELPER,
    Spiking,
    artifacts,
    assert_in_envelope,
    evaluated,
    in_node,
    network,
    package,
    restored,
    run_node,
    spiking_task,
    write_batches,
)
from tests.exporter.training.loop import run
from tests.processes import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def _node(tmp_path, step, batches):
    """The losses of a training loop in Node."""
    step.save(tmp_path / "step.onnx")
    write_batches(tmp_path, step, batches)
    done = run_node(ROOT / "examples" / "train.mjs", tmp_path / "step.onnx", tmp_path / "batches.json")
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_node_trains_as_python_does(tmp_path):
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = export_training_step(
        network(), batches[0][:1], loss=F.cross_entropy, targets=batches[0][1:], optimizer="adamw", hyperparameters={"lr": 0.01}
    )
    losses = _node(tmp_path, step, batches)
    model = onnx.load(tmp_path / "step.onnx")
    assert {node.domain for part in (model.graph, *model.functions) for node in part.node} == {"", GRADIENT_DOMAIN}
    expected, _ = run(step, batches)
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def test_node_trains_a_function_with_a_backward_of_its_own(dynamo, tmp_path):
    """200 steps of AdamW on the same file: Node beside Python's onnxruntime, and beside eager from a start that is off by rounding."""
    model, batches = spiking_task()
    step = export_training_step(
        model,
        batches[0][:1],
        loss=F.cross_entropy,
        targets=batches[0][1:],
        optimizer="adamw",
        hyperparameters={"lr": 0.01},
        dynamo=dynamo,
        portable=True,
    )
    assert {call.kind for call in step.portable} == {"function"}
    losses = _node(tmp_path, step, batches)
    assert len(losses) == 200
    np.testing.assert_allclose(losses[:20], run(step, batches[:20])[0], rtol=1e-4)
    assert_in_envelope(losses, model, batches)


@pytest.mark.parametrize("kind", ["dropout and batch norm", "a portable Function"])
def test_node_trains_saves_and_resumes_to_the_same_bits(kind, tmp_path):
    torch.manual_seed(0)
    portable = kind == "a portable Function"
    model, size = (Spiking().train(), (8,)) if portable else (network(), (1, 8, 8))
    batches = [(torch.randn(8, *size), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = artifacts(tmp_path / "artifacts", model, batches[0], portable=portable, external_data=portable)
    assert any(path.suffix == ".data" for path in (tmp_path / "artifacts").iterdir()) == portable
    write_batches(tmp_path, step, batches)
    source = tmp_path / "artifacts"
    whole = in_node(tmp_path, source, 0, 30)
    first = in_node(tmp_path, source, 0, 13, to="half")
    second = in_node(tmp_path, source, 13, 30, "half", "end")
    assert [*first["losses"], *second["losses"]] == whole["losses"]
    assert (tmp_path / "end").read_bytes() == (tmp_path / "saved").read_bytes()
    assert second["output"] == whole["output"]
    assert first["output"] != whole["output"]
    np.testing.assert_allclose(whole["losses"], run(step, batches)[0], rtol=1e-4)

    state, layout = restored((tmp_path / "end").read_bytes()), step.layout
    assert set(state) == set(step.initial)
    expected = evaluated(source, state, {layout.inputs[0]: batches[0][0].numpy()})
    assert tuple(whole["dims"]) == expected.shape
    np.testing.assert_allclose(np.array(whole["output"]).reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    learned = {key: torch.from_numpy(state[name].copy()) for key, name in {**layout.parameters, **layout.buffers}.items()}
    model.load_state_dict(learned, strict=False)
    eager = model.eval()(batches[0][0]).detach().numpy()
    np.testing.assert_allclose(expected, eager, rtol=1e-4, atol=1e-5)


def _squares(y, target):
    return (y * y).mean()


def test_a_loss_of_a_half_type_is_a_number_in_node(tmp_path):
    """JavaScript has the bits of a float16: the loss of a step is float32."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(5)]
    options = {"loss": _squares, "targets": batches[0][1:], "precision": "float16"}
    model = nn.Linear(8, 3)
    step = export_training_step(model, batches[0][:1], optimizer="sgd", **options)
    exporter.write_artifacts(step, exporter.export_evaluation(model, batches[0][:1], **options), tmp_path / "artifacts")
    write_batches(tmp_path, step, batches)
    expected = run(step, batches)[0]
    assert max(expected) < 10
    np.testing.assert_allclose(in_node(tmp_path, tmp_path / "artifacts", 0, 5)["losses"], expected, rtol=2e-3)


def test_node_reads_artifacts_from_a_url(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(3)]
    step = artifacts(tmp_path, nn.Linear(8, 3), batches[0])
    write_batches(tmp_path, step, batches)
    handler = functools.partial(_Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert in_node(tmp_path, f"{url}/", 0, 3) == in_node(tmp_path, tmp_path, 0, 3)
            with pytest.raises(AssertionError, match=f"{url}/no/manifest.json: 404"):
                in_node(tmp_path, f"{url}/no", 0, 3)
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_node_says_what_it_cannot_use(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]
    folders = {name: tmp_path / name for name in ("linear", "other", "python")}
    step = artifacts(folders["linear"], nn.Linear(8, 3), batches[0])
    artifacts(folders["other"], nn.Linear(8, 3, bias=False), batches[0])
    artifacts(folders["python"], Spiking(), batches[0])
    write_batches(tmp_path, step, batches)
    in_node(tmp_path, folders["linear"], 0, 1)
    with pytest.raises(AssertionError, match="the state of another model"):
        in_node(tmp_path, folders["other"], 0, 1, "saved")
    with pytest.raises(AssertionError, match="needs Python for tests.zoo.portable:Surrogate: export with --portable"):
        in_node(tmp_path, folders["python"], 0, 1)
    manifest = json.loads((folders["linear"] / "manifest.json").read_text())
    (folders["linear"] / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(AssertionError, match="has format 2, this module reads format 1"):
        in_node(tmp_path, folders["linear"], 0, 1)
    (folders["linear"] / "manifest.json").write_text(json.dumps(manifest)[:-40])
    with pytest.raises(AssertionError, match="linear/manifest.json is cut off, or damaged: "):
        in_node(tmp_path, folders["linear"], 0, 1)


def test_node_reads_artifacts_from_a_url_of_a_file(tmp_path):
    """As `new URL("artifacts", import.meta.url)` is one; with a blank, which such a URL escapes."""
    torch.manual_seed(0)
    folder = tmp_path / "a folder"
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]
    step = artifacts(folder, nn.Linear(8, 3), batches[0])
    write_batches(tmp_path, step, batches)
    assert in_node(tmp_path, folder.as_uri(), 0, 1) == in_node(tmp_path, folder, 0, 1)


def test_bundlers_find_nothing_of_node_in_the_trainer():
    """esbuild refuses a literal import of what a page does not have, also where it is never reached."""
    source = HELPER.read_text()
    assert not re.search(r"""(import|require)\s*\(?\s*["']|from\s*["']""", source)
    assert "`node:${name}`" in source


# [pythonop.mjs, folder, package of npm]: what is started together is what it is one after the other.
_TURNS = """
import { createRequire } from "node:module";
const [helper, source, name] = process.argv.slice(2);
const { Trainer } = await import(helper);
const ort = createRequire(process.cwd() + "/")(name);
if (ort.env.wasm) ort.env.wasm.numThreads = 1;
const batch = (rows) => ({
  input: new ort.Tensor("float32", Float32Array.from({ length: 8 * rows }, (_, at) => Math.sin(at * rows)), [rows, 8]),
  target: new ort.Tensor("int64", BigInt64Array.from({ length: rows }, (_, at) => BigInt(at % 3)), [rows]),
});
const { input } = batch(3);
const output = async (answer) => Array.from(Object.values(await answer)[0].data);
const options = name === "onnxruntime-web" ? { executionProviders: ["wasm"] } : {};
const model = await Trainer.load(ort, source, options);
const start = model.save(), same = (saved) => Buffer.compare(model.save(), saved) === 0;
const apart = [await model.step(batch(8)), await output(model.evaluate({ input })), await model.step(batch(5))];
const end = model.save();
await model.restore(start);
const back = same(start);
const together = await Promise.all([model.step(batch(8)), output(model.evaluate({ input })), model.step(batch(5))]);
const reached = same(end);

const running = model.step(batch(8)), restoring = model.restore(start);
await Promise.all([running, restoring]);
const held = same(start);

const other = await Trainer.load(ort, source, options);
const two = await Promise.all([model.step(batch(8)), output(other.evaluate({ input })), Trainer.load(ort, source, options), other.step(batch(8))]);
const failed = await Promise.allSettled([model.step({ ...batch(8), input: null }), other.step(batch(8))]);
console.log(JSON.stringify({ apart, together, back, reached, held, two: [two[0], two[3]], failed: failed.map(({ status }) => status) }));
"""


@pytest.mark.parametrize("name", ["onnxruntime-node", "onnxruntime-web"])
def test_what_is_started_together_waits_for_its_turn(name, tmp_path):
    """Steps, evaluations and restores of all trainers; WebAssembly cannot run two sessions at once."""
    package(name)
    torch.manual_seed(0)
    batch = (torch.randn(8, 8), torch.randint(0, 3, (8,)))
    artifacts(tmp_path / "linear", nn.Linear(8, 3), batch, dynamic_shapes=({0: "batch"},))
    (tmp_path / "turns.mjs").write_text(_TURNS)
    done = run_node(tmp_path / "turns.mjs", HELPER.as_uri(), tmp_path / "linear", name)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["back"] and found["reached"]
    assert found["together"] == found["apart"]
    assert found["held"], "the running step went over the restored state"
    first = found["apart"][0]
    assert found["two"] == [first, first]
    assert found["failed"] == ["rejected", "fulfilled"]


# [pythonop.mjs, folder, x and targets as JSON]: four steps without waiting for one, the same one after the other, and what is refused.
_STEPS = """
import { createRequire } from "node:module";
const [helper, source, given] = process.argv.slice(2);
const { Trainer } = await import(helper);
const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const { x, target } = JSON.parse(given);
const batch = { x: new ort.Tensor("float32", Float32Array.from(x), [8, 8]), target: new ort.Tensor("int64", BigInt64Array.from(target, BigInt), [8]) };
batch.input = batch.x; delete batch.x;
const [one, two] = [await Trainer.load(ort, source), await Trainer.load(ort, source)];
const rates = [0.1, 0.01, 0, 0.1];
const together = await Promise.all(rates.map((learning_rate) => one.step({ ...batch, learning_rate })));
const apart = [];
for (const learning_rate of rates)
  apart.push(await two.step({ ...batch, learning_rate: new ort.Tensor("float32", Float32Array.of(learning_rate), []) }));
const said = [];
const sixteen = new ort.Tensor("int64", BigInt64Array.from([...target, ...target], BigInt), [16]);
const fewer = new ort.Tensor("int64", BigInt64Array.from(target.slice(0, 5), BigInt), [5]);
for (const wrong of [
  () => one.step({ ...batch, learning_rat: 0.1 }), () => one.evaluate({ inptu: batch.input }), () => one.restore(one.save().slice(0, -1)),
  () => one.step({ ...batch, target: fewer }), () => one.step({ ...batch, input: batch.input.reshape([64]) }),
  () => one.step({ ...batch, input: batch.input.reshape([16, 4]), target: sixteen }), () => one.step({ ...batch, input: Float32Array.from(x) }),
  () => one.evaluate({ input: null }), () => one.step({ ...batch, learning_rate: "0.1" }),
])
  try { await wrong(); said.push(""); } catch (error) { said.push(error.message); }
const after = await one.step(batch);
const evaluated = Object.values(await one.evaluate(batch))[0].dims;
console.log(JSON.stringify({ together, apart, said, after, evaluated }));
"""


SAID = {
    False: "target has the shape [5], the file takes [8]: axis 0 is fixed, give 8 there, or export with --dynamic for batches of any size",
    True: "input has 8 batch, target has 5: the file has one size batch for both",
}


@pytest.mark.parametrize("by_name", [False, True])
def test_node_takes_its_turns_and_says_what_it_does_not_know(by_name, tmp_path):
    """Two steps at once are two steps; a rate is a number; a name that no file has is none that is left out."""
    torch.manual_seed(0)
    x, target = torch.randn(8, 8), torch.randint(0, 3, (8,))
    artifacts(tmp_path / "linear", nn.Linear(8, 3), (x, target), **({"dynamic_shapes": ({0: "batch"},)} if by_name else {}))
    (tmp_path / "steps.mjs").write_text(_STEPS)
    given = json.dumps({"x": x.flatten().tolist(), "target": target.tolist()})
    done = run_node(tmp_path / "steps.mjs", HELPER.as_uri(), tmp_path / "linear", given)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["together"] == found["apart"] and len(set(found["apart"])) == 3  # the rate of 0 changes nothing
    rate, name, cut, sizes, axes, feature, bare, null, text = found["said"]
    assert rate == "the file has no input learning_rat: it takes input,target"
    assert name == "the file has no input inptu: it takes input,target"
    assert "cut off" in cut
    assert sizes == SAID[by_name]
    assert axes == f"input has the shape [64], the file takes [{'batch' if by_name else 8},8]"
    if by_name:
        assert feature == "input has the shape [16,4], the file takes [batch,8]: axis 1 is fixed, give 8 there"
    assert bare == "input is of the type Float32Array: give an ort.Tensor"
    assert null == "input is null: give an ort.Tensor"
    assert text == "learning_rate is of the type string: give a number or an ort.Tensor"
    assert np.isfinite(found["after"]) and found["evaluated"] == [8, 3]


def test_node_refuses_a_manifest_that_does_not_fit_its_files(tmp_path):
    """Neither a file elsewhere nor a state that stays as it was: what would train in silence, or read what lies beside the folder."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]
    folder = tmp_path / "linear"
    step = artifacts(folder, nn.Linear(8, 3), batches[0])
    write_batches(tmp_path, step, batches)
    (tmp_path / "initial.onnx").write_bytes((folder / "initial.onnx").read_bytes())
    whole = json.loads((folder / "manifest.json").read_text())
    by_name = {entry["name"]: entry for entry in whole["state"]}
    weight, bias = (by_name[f"param.{name}"] for name in ("weight", "bias"))
    others = [entry for entry in whole["state"] if entry not in (weight, bias)]

    def refused(says, **changes):
        (folder / "manifest.json").write_text(json.dumps({**whole, **changes}))
        with pytest.raises(AssertionError, match=says):
            in_node(tmp_path, folder, 0, 1)

    for text in ("null", "[]", "3", json.dumps({key: value for key, value in whole.items() if key != "files"})):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(AssertionError, match="manifest.json is damaged: it has no format, or names no files"):
            in_node(tmp_path, folder, 0, 1)
    refused("is damaged: it has no format", python=None)
    for place in ("../initial.onnx", "..\\initial.onnx", str(tmp_path / "initial.onnx"), "%2e%2e/initial.onnx", "initial.onnx\0", "..", 3):
        refused("which is not beside it", files={**whole["files"], "initial": place})
    refused("no state", state=[])
    refused("no file gives the loss other", loss="other")
    refused(r"no file has the state \\u\{1b\}\[31m\\u\{202e\}", state=[*whole["state"], {"name": "\x1b[31m\u202e", "next": weight["next"]}])
    refused("does not say what param.bias becomes", state=[weight, *others])
    refused("param.none", state=[*whole["state"], {"name": "param.none", "next": weight["next"]}])
    refused("of another type or shape than param.weight", state=[{**weight, "next": bias["next"]}, bias, *others])
    refused("no file has the state param.weight, or nothing.next", state=[{**weight, "next": "nothing.next"}, bias, *others])
    for name in ("constructor", "__proto__", "batch"):  # the first two are names that every object of JavaScript has
        shapes = {key: [{**one, "shape": [name, *one["shape"][1:]]} for one in whole[key]] for key in ("inputs", "targets")}
        (folder / "manifest.json").write_text(json.dumps({**whole, **shapes}))
        assert len(in_node(tmp_path, folder, 0, 1)["losses"]) == 1
