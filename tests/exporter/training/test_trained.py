"""What a training has learned, as one model: its outputs are eager's with the same state, and integers come of it without torch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.training.artifacts import export_evaluation, write_artifacts
from exporter.training.step import export_training_step
from symbolics.errors import ArgumentError, FormatError
from symbolics.node.metadata import read_state
from tests.exporter.quantization.quantizers import Act, Conv, Linear
from tests.processes import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

both = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


class _Network(nn.Module):
    """A convolution with batch norm; a frozen part, tied weights, a buffer that forward changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("seen", torch.zeros(6))
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(36, 6).requires_grad_(False)
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3), nn.Flatten())

    def forward(self, x):
        y = self.outer(torch.tanh(self.inner(self.frozen(self.features(x)))))
        if self.training:
            self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y + self.seen


def _batches(count, shape, classes):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, *shape, generator=generator), torch.randint(0, classes, (8,), generator=generator)) for _ in range(count)]


def _folder(path, model, batch, *, portable=False, dynamo=True, **options):
    shared = {"portable": portable, "dynamo": dynamo}
    step = export_training_step(
        model, batch[:1], loss=F.cross_entropy, targets=batch[1:], optimizer="adamw", hyperparameters={"lr": 0.01}, **shared, **options
    )
    write_artifacts(step, export_evaluation(model, batch[:1], **shared), path)
    return step


def _run(program, x):
    session = exporter.inference_session(program)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def _expected(model, state, x):
    model = copy.deepcopy(model)
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        return model.eval()(x).numpy()


@both
@pytest.mark.parametrize("ema", [False, True], ids=["", "averages"])
def test_a_trained_model_is_eagers_with_the_same_state(dynamo, ema, tmp_path):
    model, batches = _Network(), _batches(6, (1, 8, 8), 6)
    fresh = copy.deepcopy(model)
    step = _folder(tmp_path / "art", model, batches[0], dynamo=dynamo, **({"ema": 0.5} if ema else {}))
    trainer = exporter.Trainer.load(tmp_path / "art")
    for batch in batches:
        trainer.step(dict(zip((*step.layout.inputs, *step.layout.targets), batch, strict=True)))
    trainer.save(tmp_path / "after.state")
    program = exporter.trained(tmp_path / "art", tmp_path / "after.state", ema=ema)
    program.save(tmp_path / "model.onnx")

    x = batches[0][0]
    state = trainer.state_dict(ema=ema)
    expected = _expected(fresh, state, x)
    np.testing.assert_allclose(_run(tmp_path / "model.onnx", x), expected, rtol=1e-4, atol=1e-5)
    start = _expected(fresh, {}, x)
    assert np.abs(expected - start).max() > 1e-2, "the training has changed what the model says"
    entries = read_state(program.model.metadata_props)
    assert entries.keys() >= {name for name, _ in fresh.named_parameters(remove_duplicate=False)}
    assert entries["inner.weight"].initializer == entries["outer.weight"].initializer
    assert entries["inner.weight"].trainable and not entries["frozen.weight"].trainable
    loaded = exporter.load(tmp_path / "model.onnx")
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[key] if key in state else fresh.state_dict()[key], msg=key, rtol=0, atol=0)
    torch.testing.assert_close(loaded(x).detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


class _Scores(_Network):
    """Two outputs with names."""

    def forward(self, x):
        y = super().forward(x)
        return {"scores": y, "more": (y.softmax(-1), y * 2)}


@both
@pytest.mark.parametrize("with_loss", [False, True], ids=["", "loss"])
def test_a_trained_model_returns_what_the_model_returns(dynamo, with_loss, tmp_path):
    """Also where the evaluation has its loss in front; counts that no evaluation reads are in its state."""
    model, (x, target) = _Scores(), _batches(1, (1, 8, 8), 6)[0]
    options = {"loss": lambda found, target: F.cross_entropy(found["scores"], target), "targets": (target,)}
    step = export_training_step(model, (x,), optimizer="sgd", dynamo=dynamo, **options)
    write_artifacts(step, export_evaluation(model, (x,), dynamo=dynamo, **(options if with_loss else {})), tmp_path / "art")
    trainer = exporter.Trainer.load(tmp_path / "art")
    trainer.step(dict(zip((*step.layout.inputs, *step.layout.targets), (x, target), strict=True)))
    program = exporter.trained(tmp_path / "art", trainer.save())
    loaded, plain = exporter.load(program), exporter.export(copy.deepcopy(model).eval(), (x,), dynamo=dynamo)
    found = loaded(x)
    assert found["scores"].shape == (8, 6) and len(found["more"]) == 2
    assert torch.equal(found["more"][1], found["scores"] * 2)
    assert sorted(loaded.state_dict()) == sorted(exporter.load(plain).state_dict())
    assert loaded.state_dict()["features.1.num_batches_tracked"] == trainer.state_dict()["features.1.num_batches_tracked"] == 1
    assert program.model.metadata_props["pythonop.stilled"] == plain.model.metadata_props["pythonop.stilled"]


class _Rounded(nn.Module):
    """A network in training with fake quantisers of eight bits: Functions of its own, with straight-through gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            Act("ste", signed=True), Conv(1, 8, 3, padding=1, kind="ste"), nn.BatchNorm2d(8), nn.ReLU(),
            Act("ste"), Conv(8, 8, 3, padding=1, kind="ste"), nn.ReLU(), nn.Flatten(), Act("ste"), Linear(512, 4, kind="ste"),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


# Trains a folder of artifacts on plain onnxruntime, as a program without torch does it, and writes its state as save() of a trainer does.
_LOOP = """
import json, sys
sys.modules["torch"] = None
import numpy as np, onnxruntime
folder, batches, out = sys.argv[1:]
about = json.load(open(f"{folder}/manifest.json"))
session = onnxruntime.InferenceSession(f"{folder}/training.onnx")
first = onnxruntime.InferenceSession(f"{folder}/initial.onnx")
state = dict(zip([o.name for o in first.get_outputs()], first.run(None, {})))
names, losses = [o.name for o in session.get_outputs()], []
for number in range(int(np.load(batches)["count"])):
    feeds = {each["name"]: np.load(batches)[f"{kind}{number}"] for kind in ("inputs", "targets") for each in about[kind]}
    got = dict(zip(names, session.run(None, {**state, **feeds})))
    state.update({each["name"]: got[each["next"]] for each in about["state"]})
    losses.append(float(got[about["loss"]]))
head = [{"name": n, "type": str(v.dtype), "dims": list(v.shape), "bytes": v.nbytes} for n, v in state.items()]
open(out, "wb").write(json.dumps(head).encode() + b"\\n" + b"".join(v.tobytes() for v in state.values()))
print(json.dumps(losses))
"""

_COMMAND = "import sys; sys.modules['torch'] = None; from exporter.cli import main; main()"


def _without_torch(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@both
def test_integers_from_a_step_file_without_torch(dynamo, tmp_path):
    """Train the portable step of a fake-quantised model, fill in what was learned, write integers: three programs, none of which has torch."""
    model, batches = _Rounded().train(), _batches(12, (1, 8, 8), 4)
    fresh = copy.deepcopy(model)
    _folder(tmp_path / "art", model, batches[0], portable=True, dynamo=dynamo)
    data = {
        f"{kind}{number}": each.numpy()
        for number, batch in enumerate(batches)
        for kind, each in zip(("inputs", "targets"), batch, strict=True)
    }
    np.savez(tmp_path / "batches.npz", count=len(batches), **data)
    losses = _without_torch(_LOOP, tmp_path / "art", tmp_path / "batches.npz", tmp_path / "after.state")
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    for (x, y), loss in zip(batches[:3], losses[:3], strict=True):  # a level more or less makes a curve of its own later on
        value = F.cross_entropy(fresh(x), y)
        assert loss == pytest.approx(float(value), rel=2e-3)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    _without_torch(_COMMAND, "trained", tmp_path / "art", tmp_path / "after.state", "-o", tmp_path / "model.onnx", "--json")
    report = _without_torch(_COMMAND, "quantize", tmp_path / "model.onnx", "-o", tmp_path / "integers.onnx", "--json")
    assert [bool(product["kernel"]) for product in report["products"]] == [True] * 3

    learned = exporter.load(tmp_path / "model.onnx").state_dict()
    inputs = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    expected = np.concatenate([_expected(fresh, learned, part) for part in inputs.split(8)])
    session = onnxruntime.InferenceSession(tmp_path / "integers.onnx")
    name = session.get_inputs()[0].name
    found = np.concatenate([session.run(None, {name: part.numpy()})[0] for part in inputs.split(8)])
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.98
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "art"
    _folder(folder, nn.Linear(3, 2), _batches(1, (3,), 2)[0])
    return folder, exporter.Trainer.load(folder).save()


def _head(change):
    def changed(saved):
        head, _, rest = saved.partition(b"\n")
        described = json.loads(head)
        return json.dumps(change(described)).encode() + b"\n" + rest

    return changed


def _with(**entries):
    return _head(lambda described: [{**described[0], **entries}, *described[1:]])


def _twice(saved):
    head, _, rest = saved.partition(b"\n")
    first = json.loads(head)[0]
    return json.dumps([first, *json.loads(head)]).encode() + b"\n" + bytes(first["bytes"]) + rest


DAMAGED = {
    "a value twice": (_twice, "twice"),
    "empty": (lambda saved: b"", "names of its values"),
    "no line": (lambda saved: saved.replace(b"\n", b" "), "names of its values"),
    "text": (lambda saved: b"hello\nworld", "names of its values"),
    "a number": (lambda saved: b"7\n", "names of its values"),
    "deep": (lambda saved: b"[" * 100_000 + b"\n", "names of its values"),
    "cut": (lambda saved: saved[:-1], "cut off"),
    "more": (lambda saved: saved + b"\0", "1 bytes behind its values"),
    "an unknown type": (_with(type="object"), "names of its values"),
    "no name": (_head(lambda described: [{}]), "names of its values"),
    "negative": (_with(dims=[-2, -3]), "damaged"),
    "huge": (_with(dims=[2**62, 2**62], bytes=24), "damaged"),
    "another name": (_with(name="param.other"), "another model"),
    "another shape": (_with(dims=[3, 2]), "another model"),
    "another type": (_with(type="int32"), "another model"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_state_is_refused(kind, small):
    folder, saved = small
    change, says = DAMAGED[kind]
    with pytest.raises((FormatError, ArgumentError), match=says) as caught:
        exporter.trained(folder, change(saved))
    assert len(str(caught.value).splitlines()) <= 6


def test_the_state_of_another_training_is_refused_where_it_has_all_names_too(tmp_path):
    """`trained` took what it needed of it, and a head that was trained beside one body stood on another."""
    batch = _batches(1, (3,), 2)[0]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    _folder(tmp_path / "all", model, batch, dynamo=False)
    model[0].requires_grad_(False)
    _folder(tmp_path / "head", model, batch, dynamo=False)
    saved = {name: exporter.Trainer.load(tmp_path / name).save() for name in ("all", "head")}
    with pytest.raises(
        ArgumentError, match=r"another model or optimizer: it has param.0.weight, which \S*head has not. Give it to the folder"
    ):
        exporter.trained(tmp_path / "head", saved["all"])
    with pytest.raises(ArgumentError, match=r"another model or optimizer: it lacks param.0.weight. Give it to the folder"):
        exporter.trained(tmp_path / "all", saved["head"])
    (tmp_path / "all.state").write_bytes(saved["all"])
    told = subprocess.run(
        [sys.executable, "-c", _COMMAND, "trained", tmp_path / "head", tmp_path / "all.state", "-o", tmp_path / "x.onnx"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert told.returncode != 0 and "it has param.0.weight" in told.stderr and not (tmp_path / "x.onnx").exists()


OWN = {
    "plain": {},
    "all": {"ema": 0.9, "accumulate": 2, "clip_norm": 1.0, "precision": "float16"},
    "radam": {"optimizer": "radam"},
    "webgpu": {"provider": "webgpu"},
}


@pytest.mark.parametrize("kind", OWN)
def test_a_folder_takes_the_state_of_each_of_its_trainings(kind, tmp_path):
    """With counts, seeds, averages and scales; what the step says of its state is what the manifest says, and what is saved."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)), _batches(1, (3,), 2)[0]
    options = {"optimizer": "adamw", **OWN[kind]}
    provider = options.pop("provider", None)
    step = export_training_step(model, (x,), loss=F.cross_entropy, targets=(y,), dynamo=False, **options)
    manifest = write_artifacts(step, export_evaluation(model, (x,), dynamo=False), tmp_path, provider=provider)
    trainer = exporter.Trainer.load(tmp_path)
    trainer.step({"input": x, "target": y.int() if provider else y})
    saved = trainer.save()
    described = {entry["name"]: (entry["type"], entry["dims"]) for entry in json.loads(saved.partition(b"\n")[0])}
    assert described == {each["name"]: (each["dtype"], each["shape"]) for each in (*manifest["state"], *manifest["hyperparameters"])}
    exporter.trained(tmp_path, saved)


def test_what_else_is_no_state(small, tmp_path):
    folder, saved = small
    with pytest.raises(FormatError, match="cannot be read"):
        exporter.trained(folder, tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="bytes that save"):
        exporter.trained(folder, 7)
    with pytest.raises(FormatError, match="cannot read"):
        exporter.trained(tmp_path, saved)
    with pytest.raises(ArgumentError, match="keeps no average"):
        exporter.trained(folder, saved, ema=True)


class _Counts(nn.Module):
    """Buffers that forward changes in eval mode, too, beside batch norm."""

    def __init__(self, reads):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.reads = nn.Linear(6, 6), nn.BatchNorm1d(6), reads
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, x):
        self.seen += x.shape[0]
        self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
        y = self.norm(self.layer(x))
        return y * self.largest.detach() if self.reads else y


@both
@pytest.mark.parametrize("reads", [False, True], ids=["", "read"])
@pytest.mark.parametrize("ema", [False, True], ids=["", "averages"])
def test_buffers_that_forward_changes_in_eval_mode_too(dynamo, reads, ema, tmp_path):
    """A trained model was refused: the evaluation named next values that it does not give out."""
    model, batches = _Counts(reads), _batches(3, (6,), 6)
    _folder(tmp_path / "art", copy.deepcopy(model), batches[0], dynamo=dynamo, **({"ema": 0.5} if ema else {}))
    trainer = exporter.Trainer.load(tmp_path / "art")
    for batch in batches:
        trainer.step(dict(zip((*trainer.layout.inputs, *trainer.layout.targets), batch, strict=True)))
    program = exporter.trained(tmp_path / "art", trainer.save(), ema=ema)
    loaded, state, x = exporter.load(program), trainer.state_dict(ema=ema), batches[0][0]
    assert state["seen"] == 24 and state["largest"].any()
    np.testing.assert_allclose(loaded(x).detach(), _expected(model, state, x), rtol=1e-4, atol=1e-5)
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[key], msg=key, rtol=0, atol=0)
    exporter.load(tmp_path / "art" / "eval.onnx")


class _Eighths(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class _Ids(nn.Module):
    """Integers in, a portable Function, a count in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(10, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        if self.training:
            self.count += 1
        return self.last(_Eighths.apply(self.table(ids).mean(1))) + self.count


@both
def test_a_step_for_webgpu_ends_in_a_model_for_every_runtime(dynamo, tmp_path):
    """Functions become their nodes there, and int64 becomes int32: what is trained has both again, so that it can be trained on."""
    ids, labels = torch.randint(0, 10, (8, 5)), torch.randint(0, 3, (8,))
    model, folder = _Ids(), tmp_path / "art"
    how = {"portable": True, "dynamo": dynamo}
    step = export_training_step(model, (ids,), loss=F.cross_entropy, targets=(labels,), optimizer="adamw", **how)
    write_artifacts(step, export_evaluation(model, (ids,), **how), folder, provider="webgpu")
    trainer = exporter.Trainer.load(folder)
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    for _ in range(3):
        trainer.step(dict(zip(names, (ids.int(), labels.int()), strict=True)))
    loaded = exporter.load(exporter.trained(folder, trainer.save()))
    model.load_state_dict(trainer.state_dict(), strict=False)
    expected = model.eval()(ids)
    torch.testing.assert_close(loaded(ids), expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    found = torch.autograd.grad(loaded(ids).square().sum(), [loaded.get_parameter(name) for name, _ in model.named_parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(FormatError, match="is no manifest of a training"):
        exporter.trained(folder, trainer.save())
