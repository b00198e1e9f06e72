"""The trainer in JavaScript: what it says of what it cannot take, states that others spelled otherwise, `dispose`, and what TypeScript is told."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from tests import pages
from tests.exporter.training.javascript import HELPER, artifacts, run_node

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# [pythonop.mjs, folder or URL, ...]: in front of each script; `refused` is what an error says, and `batch` fits the folder.
_START = """
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
const [helper, source, ...rest] = process.argv.slice(2);
const module = await import(helper), { Trainer } = module;
const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const refused = async (work) => { try { await work(); return "nothing was refused"; } catch (error) { return error.message; } };
const input = new ort.Tensor("float32", Float32Array.from({ length: 16 }, (_, at) => Math.sin(at)), [8, 2]);
const batch = { input, target: new ort.Tensor("int64", BigInt64Array.from({ length: 8 }, (_, at) => BigInt(at % 2)), [8]) };
const tell = (answer) => console.log(JSON.stringify(answer));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("errors") / "artifacts"
    artifacts(path, nn.Linear(2, 3), (torch.randn(8, 2), torch.randint(0, 3, (8,))))
    return path


def _told(tmp_path, script, *arguments):
    (tmp_path / "script.mjs").write_text(_START + script)
    done = run_node(tmp_path / "script.mjs", HELPER.as_uri(), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


_WRONG = """
const model = await Trainer.load(ort, source), before = Buffer.from(model.save());
const tensor = (type, data, dims = [8]) => new ort.Tensor(type, data, dims);
const wrong = {
  "labels of 32 bits": { ...batch, target: tensor("int32", new Int32Array(8)) },
  "floats of 64 bits": { ...batch, input: tensor("float64", new Float64Array(16), [8, 2]) },
  "a rate of 64 bits": { ...batch, learning_rate: tensor("float64", Float64Array.of(0.1), []) },
  "no number": { ...batch, learning_rate: NaN },
  "an infinite number": { ...batch, learning_rate: Infinity },
  "a tensor of no number": { ...batch, learning_rate: tensor("float32", Float32Array.of(NaN), []) },
  "no batch": undefined,
};
const said = {};
for (const name in wrong) said[name] = await refused(() => model.step(wrong[name]));
said.evaluated = await refused(() => model.evaluate({ input: wrong["floats of 64 bits"].input }));
said["no runtime"] = await refused(() => Trainer.load(undefined, source));
said.same = Buffer.compare(model.save(), before) === 0;
model.manifest.inputs[0].shape = null; // as of a value whose shape no exporter knew
said.loss = await model.step({ ...batch, learning_rate: 0.5 });
tell(said);
"""


def test_wrong_types_and_rates_are_named_before_onnxruntime_runs(folder, tmp_path):
    said = _told(tmp_path, _WRONG, folder)
    floats = 'input has the type float64, the file takes float32: give new ort.Tensor("float32", Float32Array, sizes)'
    assert (
        said["labels of 32 bits"] == 'target has the type int32, the file takes int64: give new ort.Tensor("int64", BigInt64Array, sizes)'
    )
    assert said["floats of 64 bits"] == said["evaluated"] == floats
    assert said["a rate of 64 bits"].startswith("learning_rate has the type float64, the file takes float32")
    assert said["no number"] == said["a tensor of no number"] == "learning_rate is NaN: give a finite number"
    assert said["an infinite number"] == "learning_rate is Infinity: give a finite number"
    assert said["no batch"] == "a batch is undefined: give an object with a tensor for each of input,target"
    assert said["no runtime"].startswith('Trainer.load takes what "import * as ort"')
    assert said["same"] and said["loss"] > 0


_GIVEN = """
const model = await Trainer.load(ort, source), start = model.save();
await model.step(batch);
const later = Buffer.from(model.save());
const wrong = {
  null: null, undefined: undefined, "a Blob": new Blob([start]), "a promise": Promise.resolve(start), text: "saved", "an object": {}, empty: new Uint8Array(),
  "no head": start.slice(10), "no state": new TextEncoder().encode("[null]\\n"), cut: start.slice(0, -1), long: Buffer.concat([start, Buffer.of(0)]),
};
const said = {};
for (const name in wrong) said[name] = await refused(() => model.restore(wrong[name]));
said.same = Buffer.compare(model.save(), later) === 0;
const within = new Uint8Array(start.length + 10);
within.set(start, 5);
const right = {
  bytes: start, buffer: start.buffer, view: new DataView(start.buffer), "view of a part": new DataView(within.buffer, 5, start.length),
  Buffer: Buffer.from(start), words: start.length % 2 ? start : new Uint16Array(start.buffer),
};
said.taken = [];
for (const name in right) {
  await model.restore(new Uint8Array(later));
  await model.restore(right[name]);
  if (Buffer.compare(model.save(), start) === 0) said.taken.push(name);
}
said.right = Object.keys(right);
tell(said);
"""


def test_what_was_saved_is_told_from_what_was_not(folder, tmp_path):
    said = _told(tmp_path, _GIVEN, folder)
    give = "give what save() gave, a Uint8Array, or the ArrayBuffer of its bytes"
    assert said["null"] == f"what was saved is null: nothing was found there; {give}"
    assert said["undefined"] == f"what was saved is undefined: nothing was found there; {give}"
    assert said["a Blob"] == "what was saved is of the type Blob: give await saved.arrayBuffer()"
    assert said["a promise"] == "what was saved is of the type Promise: await it"
    assert said["text"] == f"what was saved is of the type string: {give}"
    assert said["an object"] == f"what was saved is of the type Object: {give}"
    assert said["empty"] == f"what was saved is empty: {give}"
    assert said["no head"].startswith("what was saved does not begin with the names of its values")
    assert said["no state"] == said["no head"]
    assert said["cut"] == said["long"] == "what was saved is cut off, or damaged"
    assert said["same"]
    assert said["taken"] == said["right"]


_RESTORES = """
const model = await Trainer.load(ort, source), same = [];
for (const path of rest.slice(1)) {
  await model.restore(readFileSync(path));
  same.push(Buffer.compare(model.save(), readFileSync(rest[0])) === 0);
}
tell(same);
"""


def _respelled(saved):
    """The same state: with blanks, in another order of keys, and of values."""
    head, _, data = saved.partition(b"\n")
    described = json.loads(head)
    parts, at = [], 0
    for entry in described:
        parts.append(({key: entry[key] for key in sorted(entry)}, data[at : at + entry["bytes"]]))
        at += entry["bytes"]
    yield json.dumps(described).encode() + b"\n" + data
    yield json.dumps([entry for entry, _ in parts], separators=(" , ", " : ")).encode() + b"\n" + data
    yield json.dumps([entry for entry, _ in parts[::-1]]).encode() + b"\n" + b"".join(part for _, part in parts[::-1])


def test_a_state_is_what_its_line_says_not_how_it_is_spelled(folder, tmp_path):
    trainer = exporter.Trainer.load(folder)
    trainer.step(dict(zip(("input", "target"), (torch.randn(8, 2), torch.randint(0, 3, (8,))), strict=True)))
    saved = trainer.save(tmp_path / "saved")
    paths = []
    for number, spelled in enumerate(_respelled(saved)):
        paths.append(tmp_path / f"{number}")
        paths[-1].write_bytes(spelled)
        fresh = exporter.Trainer.load(folder)
        fresh.restore(paths[-1])
        assert fresh.save() == saved
        exporter.trained(folder, spelled)
    assert _told(tmp_path, _RESTORES, folder, tmp_path / "saved", *paths) == [True] * 3


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)


def test_every_trainer_goes_on_from_what_the_pages_script_writes(tmp_path):
    """`train_numpy.py` of docs/training-elsewhere.md, as it stands there."""
    (script,) = [block.code for block in pages.blocks("docs/training-elsewhere.md") if block.code.startswith("# train_numpy.py")]
    torch.manual_seed(0)
    x, y = torch.randn(64, 2), torch.randint(0, 2, (64,))
    shared = {"targets": (y,), "dynamo": False}
    step = exporter.export_training_step(_Net(), (x,), loss=F.cross_entropy, **shared)
    exporter.write_artifacts(step, exporter.export_evaluation(_Net(), (x,), **shared), tmp_path / "artifacts")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trainer = exporter.Trainer.load(tmp_path / "artifacts")
    trainer.restore(tmp_path / "after.state")
    assert trainer.steps == 100
    assert trainer.save() == (tmp_path / "after.state").read_bytes()  # the compact form
    assert _told(tmp_path, _RESTORES, tmp_path / "artifacts", tmp_path / "after.state", tmp_path / "after.state") == [True]


_OTHERS = "const model = await Trainer.load(ort, source); tell(await Promise.all(rest.map((path) => refused(() => model.restore(readFileSync(path))))));"


def test_every_reader_names_what_differs_in_the_state_of_another_training(folder, tmp_path):
    torch.manual_seed(0)
    batch = (torch.randn(8, 2), torch.randint(0, 3, (8,)))
    models = {"less": nn.Linear(2, 3, bias=False), "sizes": nn.Linear(2, 4), "more": nn.Sequential(nn.Linear(2, 3))}
    for name, model in models.items():
        artifacts(tmp_path / name, model, batch, dynamo=False)
    artifacts(tmp_path / "types", nn.Linear(2, 3), batch, provider="webgpu", dynamo=False)
    whole = exporter.Trainer.load(folder)
    whole.step({"input": batch[0], "target": batch[1]})
    expected = {
        "less": "it lacks param.bias",
        "sizes": "param.weight is float32 [4, 2] in it, and float32 [3, 2] ",
        "types": "state.step is int32 [] in it, and int64 [] ",
        "more": "it lacks param.weight",
        "extra": "it has param.extra",
    }
    for name in expected:
        source = exporter.Trainer.load(folder if name == "extra" else tmp_path / name).save()
        if name == "extra":
            head, _, data = source.partition(b"\n")
            entry = {"name": "param.extra", "type": "float32", "dims": [1], "bytes": 4}
            source = json.dumps([*json.loads(head), entry]).encode() + b"\n" + data + bytes(4)
        (tmp_path / f"{name}.state").write_bytes(source)
    said = dict(zip(expected, _told(tmp_path, _OTHERS, folder, *(tmp_path / f"{name}.state" for name in expected)), strict=True))
    for name, what in expected.items():
        assert f"another model or optimizer: {what}".replace(", ", ",") in said[name].replace(", ", ",")
        assert said[name].endswith("Load the folder that it was trained with")
        before = whole.save()
        for take in (whole.restore, functools.partial(exporter.trained, folder)):
            with pytest.raises(exporter.ArgumentError, match="another model or optimizer") as caught:
                take(tmp_path / f"{name}.state")
            assert what in str(caught.value)
            assert str(caught.value).endswith("Give it to the folder or step that it was trained with")
        assert whole.save() == before


_DISPOSED = """
const counted = { made: 0, left: 0 };
const counting = { ...ort, InferenceSession: { create: async (...given) => {
  const session = await ort.InferenceSession.create(...given), release = session.release.bind(session);
  (counted.made += 1), (counted.left += 1);
  session.release = async () => { counted.left -= 1; return release(); };
  return session;
} } };
const model = await Trainer.load(counting, source), other = await Trainer.load(counting, source);
const open = { ...counted };
const start = model.save();
const running = model.step(batch), disposing = model.dispose(), late = refused(() => model.step(batch));
const answer = { open, loss: await running };
await disposing;
answer.left = counted.left;
answer.late = await late;
answer.said = [];
for (const work of [() => model.step(batch), () => model.evaluate(batch), () => model.restore(start), () => model.save()])
  answer.said.push(await refused(work));
await model.dispose();
answer.other = await other.step(batch);
await other.dispose();
await refused(() => Trainer.load(counting, rest[0]));
tell({ ...answer, end: counted.left, damaged: counted.made });
"""


def test_disposed_of_a_trainer_holds_no_session(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "initial.onnx").write_bytes(b"no model")
    found = _told(tmp_path, _DISPOSED, folder, tmp_path / "damaged")
    each = found["open"]["left"] // 2
    assert found["open"]["made"] == 2 * each + 2, "the session of the initial state is closed when it has run"
    assert found["left"] == each and found["end"] == 0
    assert found["damaged"] == found["open"]["made"] + 2, "what was opened before a file that cannot be is closed"
    assert {found["late"], *found["said"]} == {"this trainer was disposed of: load another one with Trainer.load"}
    assert found["loss"] == found["other"]


class _Pages(http.server.SimpleHTTPRequestHandler):
    """Answers with a page where there is no file, as servers of single-page applications do."""

    def send_error(self, code, *_):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"\n<!DOCTYPE html><title>The application</title>")

    def log_message(self, *_):
        pass


def test_errors_of_opening_name_the_file(folder, tmp_path):
    for name in ("missing", "damaged"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "missing" / "eval.onnx").unlink()
    (tmp_path / "damaged" / "eval.onnx").write_bytes(b"no model")
    script = "tell(await Promise.all([source, ...rest].map((folder) => refused(() => Trainer.load(ort, folder)))));"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Pages, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            said = _told(tmp_path, script, f"{url}/missing", f"{url}/damaged", f"{url}/nothing", tmp_path / "damaged", tmp_path / "missing")
        finally:
            server.shutdown()
    page = "is a page of HTML: the server has no such file, and answers with a page instead"
    assert said[0] == f"{url}/missing/eval.onnx {page}"
    assert said[1].startswith(f"{url}/damaged/eval.onnx cannot be opened: ")
    assert said[2] == f"{url}/nothing/manifest.json {page}"
    assert said[3].startswith(f"{tmp_path / 'damaged' / 'eval.onnx'} cannot be opened: ")
    assert said[4].startswith(f"{tmp_path / 'missing' / 'eval.onnx'} cannot be opened: ")
    (gone,) = _told(tmp_path, script, url)
    assert gone.startswith(f"{url}/manifest.json cannot be fetched: ")


_NAMES = """
const own = (object) => Object.getOwnPropertyNames(object).filter((name) => typeof object[name] === "function" && name !== "constructor");
tell({ exported: Object.keys(module), methods: own(Trainer.prototype), statics: own(Trainer) });
"""


def test_typescript_is_told_of_all_that_there_is(tmp_path):
    """Without TypeScript: the names in pythonop.d.mts are those of the module."""
    text = HELPER.with_name("pythonop.d.mts").read_text()
    found = _told(tmp_path, _NAMES)
    (body,) = re.findall(r"^export class Trainer.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    methods = re.findall(r"^  (?:(static) )?(\w+)(?:<.*>)?\(", body, re.MULTILINE)
    assert re.findall(r"^export (?:class|function|const|let) (\w+)", text, re.MULTILINE) == found["exported"]
    assert sorted(name for static, name in methods if static) == found["statics"]
    assert sorted(name for static, name in methods if not static and name != "constructor") == sorted(found["methods"])
