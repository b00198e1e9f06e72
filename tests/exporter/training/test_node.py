"""A training step without PythonOps needs no Python: npm's onnxruntime-node runs the same file to the same losses."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exporter.training.artifacts import export_evaluation, write_artifacts
from exporter.training.step import export_training_step
from tests.exporter.training.loop import run
from tests.processes import ROOT
from tests.support import missing
from tests.zoo.portable import Surrogate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# `make node` puts the package there.
FOLDER = Path(os.environ.get("PYTHONOP_NODE_DIR", Path(sys.prefix, "node")))


def _network():
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(36, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).train()


class _Spiking(nn.Module):
    """Three steps of two layers of leaky neurons; the step function has a surrogate's derivative."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(24, 3)

    def forward(self, x):
        potential, total = torch.zeros(x.shape[0], 24), torch.zeros(x.shape[0], 3)
        for _ in range(3):
            potential = 0.9 * potential + self.inner(x)
            spikes = Surrogate.apply(potential - 0.3, 2.0)
            potential = potential - 0.3 * spikes
            total = total + self.outer(spikes)
        return total


def _described(value):
    return {"type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "data": value.flatten().tolist()}


def _node(tmp_path, step, batches):
    """The losses of a training loop in Node."""
    step.save(tmp_path / "step.onnx")
    _write_batches(tmp_path, step, batches)
    done = _run_node(ROOT / "examples" / "train.mjs", tmp_path / "step.onnx", tmp_path / "batches.json")
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def _write_batches(folder, step, batches):
    names = (*step.layout.inputs, *step.layout.targets)
    (folder / "batches.json").write_text(json.dumps([dict(zip(names, map(_described, batch), strict=True)) for batch in batches]))


def _run_node(*arguments):
    """What a new Node says to these arguments."""
    if shutil.which("node") is None or not (FOLDER / "node_modules" / "onnxruntime-node").is_dir():
        missing("node", "npm's onnxruntime-node is not installed: `make node` does it where npm is")
    return subprocess.run(["node", *map(str, arguments)], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)


def test_node_trains_as_python_does(tmp_path):
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = export_training_step(
        _network(), batches[0][:1], loss=F.cross_entropy, targets=batches[0][1:], optimizer="adamw", hyperparameters={"lr": 0.01}
    )
    losses = _node(tmp_path, step, batches)
    assert {node.domain for node in onnx.load(tmp_path / "step.onnx").graph.node} == {""}
    expected, _ = run(step, batches)
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def test_node_trains_a_function_with_a_backward_of_its_own(dynamo, tmp_path):
    """200 steps of AdamW on the same file: Node beside Python's onnxruntime, and beside eager from a start that is off by rounding."""
    torch.manual_seed(0)
    model, task = _Spiking().train(), torch.randn(8, 3)
    inputs = [torch.randn(32, 8) for _ in range(200)]
    batches = [(x, (x @ task).argmax(-1)) for x in inputs]
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
    curves = np.array([_eager(model, batches, shift) for shift in (0, 1e-6, -1e-6, 2e-6, -2e-6)])
    smooth = np.ones(20) / 20
    curve, envelope = np.convolve(losses, smooth, "valid"), np.array([np.convolve(c, smooth, "valid") for c in curves])
    width = 3 * (envelope.max(0) - envelope.min(0)).max() + 1e-3  # a spike more or less makes a curve of its own
    assert (curve > envelope.min(0) - width).all()
    assert (curve < envelope.max(0) + width).all()
    assert curve[-1] < 0.6 * curve[0]


# Node's part of the tests of artifacts: [folder or URL, batches.json, first batch, end, saved state to go on from or "", where to save].
_DRIVER = """
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
const { Trainer } = await import(process.argv[2]);
const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const [source, data, first, end, from, to] = process.argv.slice(3);
const kinds = { float32: Float32Array, int64: BigInt64Array };
const tensor = ({ type, dims, data }) => new ort.Tensor(type, kinds[type].from(data, type === "int64" ? BigInt : Number), dims);
const batches = JSON.parse(readFileSync(data)).map((batch) => Object.fromEntries(Object.entries(batch).map(([k, v]) => [k, tensor(v)])));
const model = await Trainer.load(ort, source, { intraOpNumThreads: 1 });
if (from) model.restore(readFileSync(from));
const losses = [];
for (const batch of batches.slice(Number(first), Number(end))) losses.push(await model.step(batch));
const [output] = Object.values(await model.evaluate(batches[0]));
writeFileSync(to, model.save());
console.log(JSON.stringify({ losses, output: [...output.data], dims: output.dims }));
"""


def _driven(folder, source, first, end, origin="", to="saved"):
    (folder / "driver.mjs").write_text(_DRIVER)
    module = (ROOT / "examples" / "pythonop.mjs").as_uri()
    start = folder / origin if origin else ""
    done = _run_node(folder / "driver.mjs", module, source, folder / "batches.json", first, end, start, folder / to)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _restored(path):
    """The state in a file of the helper's save()."""
    head, _, data = path.read_bytes().partition(b"\n")
    state, at = {}, 0
    for entry in json.loads(head):
        state[entry["name"]] = np.frombuffer(data[at : at + entry["bytes"]], entry["type"]).reshape(entry["dims"])
        at += entry["bytes"]
    assert at == len(data)
    return state


def _artifacts(folder, model, batch, *, external_data=None, **options):
    """A step; its artifacts are in the folder."""
    options.update(targets=batch[1:])
    step = export_training_step(model, batch[:1], loss=F.cross_entropy, optimizer="adamw", hyperparameters={"lr": 0.01}, **options)
    write_artifacts(step, export_evaluation(model, batch[:1], **options), folder, external_data=external_data)
    return step


@pytest.mark.parametrize("kind", ["dropout and batch norm", "a portable Function"])
def test_node_trains_saves_and_resumes_to_the_same_bits(kind, tmp_path):
    torch.manual_seed(0)
    portable = kind == "a portable Function"
    model, size = (_Spiking().train(), (8,)) if portable else (_network(), (1, 8, 8))
    batches = [(torch.randn(8, *size), torch.randint(0, 3, (8,))) for _ in range(30)]
    step = _artifacts(tmp_path / "artifacts", model, batches[0], portable=portable, external_data=portable)
    assert any(path.suffix == ".data" for path in (tmp_path / "artifacts").iterdir()) == portable
    _write_batches(tmp_path, step, batches)
    source = tmp_path / "artifacts"
    whole = _driven(tmp_path, source, 0, 30)
    first = _driven(tmp_path, source, 0, 13, to="half")
    second = _driven(tmp_path, source, 13, 30, "half", "end")
    assert [*first["losses"], *second["losses"]] == whole["losses"]
    assert (tmp_path / "end").read_bytes() == (tmp_path / "saved").read_bytes()
    assert second["output"] == whole["output"]
    assert first["output"] != whole["output"]
    np.testing.assert_allclose(whole["losses"], run(step, batches)[0], rtol=1e-4)

    state, layout = _restored(tmp_path / "end"), step.layout
    assert set(state) == set(step.initial)
    session = onnxruntime.InferenceSession(source / "eval.onnx")
    names = [value.name for value in session.get_inputs()]
    (expected,) = session.run(None, {**{name: state[name] for name in names if name in state}, layout.inputs[0]: batches[0][0].numpy()})
    assert tuple(whole["dims"]) == expected.shape
    np.testing.assert_allclose(np.array(whole["output"]).reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    learned = {key: torch.from_numpy(state[name].copy()) for key, name in {**layout.parameters, **layout.buffers}.items()}
    model.load_state_dict(learned, strict=False)
    eager = model.eval()(batches[0][0]).detach().numpy()
    np.testing.assert_allclose(expected, eager, rtol=1e-4, atol=1e-5)


def test_node_reads_artifacts_from_a_url(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(3)]
    step = _artifacts(tmp_path, nn.Linear(8, 3), batches[0])
    _write_batches(tmp_path, step, batches)
    handler = functools.partial(_Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert _driven(tmp_path, f"{url}/", 0, 3) == _driven(tmp_path, tmp_path, 0, 3)
            with pytest.raises(AssertionError, match=f"{url}/no/manifest.json: 404"):
                _driven(tmp_path, f"{url}/no", 0, 3)
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_node_says_what_it_cannot_use(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]
    folders = {name: tmp_path / name for name in ("linear", "other", "python")}
    step = _artifacts(folders["linear"], nn.Linear(8, 3), batches[0])
    _artifacts(folders["other"], nn.Linear(8, 3, bias=False), batches[0])
    _artifacts(folders["python"], _Spiking(), batches[0])
    _write_batches(tmp_path, step, batches)
    _driven(tmp_path, folders["linear"], 0, 1)
    with pytest.raises(AssertionError, match="the state of another model"):
        _driven(tmp_path, folders["other"], 0, 1, "saved")
    with pytest.raises(AssertionError, match="needs Python for tests.zoo.portable:Surrogate: export with --portable"):
        _driven(tmp_path, folders["python"], 0, 1)
    manifest = json.loads((folders["linear"] / "manifest.json").read_text())
    (folders["linear"] / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(AssertionError, match="has format 2, this module reads format 1"):
        _driven(tmp_path, folders["linear"], 0, 1)


def _eager(model, batches, shift):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + shift)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
