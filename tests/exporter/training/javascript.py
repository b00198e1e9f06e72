"""What the tests of training in JavaScript share: networks, their artifacts, batches as JSON, and eager's envelope.

`drive.mjs` beside this module is what Node and a browser are asked to do with them.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn

from examples.web import build
from exporter.training.artifacts import export_evaluation, write_artifacts
from exporter.training.step import export_training_step
from tests.processes import ROOT
from tests.support import missing
from tests.zoo.portable import Surrogate

__all__ = [
    "DRIVER", "FOLDER", "HELPER", "Spiking", "artifacts", "assert_in_envelope", "evaluated", "in_node", "network", "package", "restored",
    "run_node", "spiking_task", "write_batches",
]  # fmt: skip

FOLDER = build.packages()
HELPER = ROOT / "examples" / "pythonop.mjs"
DRIVER = Path(__file__).with_name("drive.mjs")


def network():
    """Convolution, batch norm, dropout, layer norm."""
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(36, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).train()


class Spiking(nn.Module):
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


def spiking_task(count=200):
    """A spiking network, and batches of 32 for it to learn from."""
    torch.manual_seed(0)
    model, task = Spiking().train(), torch.randn(8, 3)
    inputs = [torch.randn(32, 8) for _ in range(count)]
    return model, [(x, (x @ task).argmax(-1)) for x in inputs]


def _described(value):
    return {"type": str(value.dtype).removeprefix("torch."), "dims": list(value.shape), "data": value.flatten().tolist()}


def write_batches(folder, step, batches):
    """Into batches.json, by the names that the step gives them."""
    names = (*step.layout.inputs, *step.layout.targets)
    (folder / "batches.json").write_text(json.dumps([dict(zip(names, map(_described, batch), strict=True)) for batch in batches]))


def artifacts(folder, model, batch, *, external_data=None, provider=None, **options):
    """A step; its artifacts are in the folder."""
    options.update(targets=batch[1:])
    step = export_training_step(model, batch[:1], loss=F.cross_entropy, optimizer="adamw", hyperparameters={"lr": 0.01}, **options)
    write_artifacts(step, export_evaluation(model, batch[:1], **options), folder, external_data=external_data, provider=provider)
    return step


def assert_in_envelope(losses, model, batches):
    """A curve of AdamW stays between those of eager from five starts that are off by rounding, and the loss goes down."""
    curves = np.array([_eager(model, batches, shift) for shift in (0, 1e-6, -1e-6, 2e-6, -2e-6)])
    smooth = np.ones(20) / 20
    curve, envelope = np.convolve(losses, smooth, "valid"), np.array([np.convolve(c, smooth, "valid") for c in curves])
    width = 3 * (envelope.max(0) - envelope.min(0)).max() + 1e-3  # a spike more or less makes a curve of its own
    assert (curve > envelope.min(0) - width).all()
    assert (curve < envelope.max(0) + width).all()
    assert curve[-1] < 0.6 * curve[0]


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


def restored(saved):
    """The state in what the helper's save() gave, as arrays by name."""
    head, _, data = saved.partition(b"\n")
    state, at = {}, 0
    for entry in json.loads(head):
        state[entry["name"]] = np.frombuffer(data[at : at + entry["bytes"]], entry["type"]).reshape(entry["dims"])
        at += entry["bytes"]
    assert at == len(data)
    return state


def evaluated(source, state, inputs):
    """The one output of eval.onnx in Python's onnxruntime, with a state that was learned."""
    session = onnxruntime.InferenceSession(source / "eval.onnx")
    names = [value.name for value in session.get_inputs()]
    (output,) = session.run(None, {**{name: state[name] for name in names if name in state}, **inputs})
    return output


def package(name):
    """The folder of a package of npm; without it the test is left."""
    folder = FOLDER / "node_modules" / name
    if not (folder / "package.json").is_file():
        missing("node", f"npm's {name} is not installed: `make node` does it where npm is")
    return folder


def run_node(*arguments):
    """What a new Node says to these arguments."""
    package("onnxruntime-node")
    if shutil.which("node") is None:
        missing("node", "there is no Node.js on this machine")
    return subprocess.run(["node", *map(str, arguments)], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)


# [drive.mjs, pythonop.mjs, folder or URL, batches.json, first batch, end, saved state to go on from or "", where to save]
_NODE = """
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
const [driver, helper, source, batches, first, end, from, to] = process.argv.slice(2);
const [{ drive }, { Trainer }] = [await import(driver), await import(helper)];
const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const job = { batches: JSON.parse(readFileSync(batches)), first: Number(first), end: Number(end), from: from && readFileSync(from) };
const { saved, ...answer } = await drive(ort, Trainer, source, job);
writeFileSync(to, saved);
console.log(JSON.stringify(answer));
"""


def in_node(folder, source, first, end, origin="", to="saved"):
    """`drive.mjs` in a new Node: the losses of these batches of batches.json, the output of the first batch; its state is in a file."""
    (folder / "node.mjs").write_text(_NODE)
    start = folder / origin if origin else ""
    done = run_node(folder / "node.mjs", DRIVER.as_uri(), HELPER.as_uri(), source, folder / "batches.json", first, end, start, folder / to)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
