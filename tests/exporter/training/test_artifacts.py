"""A folder of artifacts: what the manifest says is what the files have, and the evaluation takes the state of the step."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.files.trained import UNREAD
from exporter.training.artifacts import export_evaluation, write_artifacts
from exporter.training.step import export_training_step
from symbolics.errors import ArgumentError, ExportError, FormatError, PythonopWarning
from tests.exporter.training.loop import Custom, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

NAMES = ["eval.onnx", "initial.onnx", "manifest.json", "training.onnx"]
both = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


class _Network(nn.Module):
    """A convolution with batch norm and dropout; a frozen part, tied weights, a keyword, a buffer that forward changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        self.frozen = nn.Linear(144, 6).requires_grad_(False)
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale):
        self.calls += 1
        return self.outer(torch.tanh(self.inner(self.frozen(self.features(x))))) * scale + self.calls


def _batches(count=5, size=8):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 1, 8, 8, generator=generator) for _ in range(count)]
    return [(x, torch.full((), 2.0), torch.randint(0, 6, (size,), generator=generator)) for x in inputs]


def _made(folder, model, args, kwargs=None, *, loss=F.cross_entropy, optimizer="adamw", external_data=None, **options):
    step = export_training_step(model, args, kwargs, loss=loss, optimizer=optimizer, **options)
    evaluation = export_evaluation(model, args, kwargs, **options)
    return step, write_artifacts(step, evaluation, folder, external_data=external_data)


def _evaluated(folder, state, **inputs):
    session = onnxruntime.InferenceSession(folder / "eval.onnx")
    feeds = {value.name: state[value.name] for value in session.get_inputs() if value.name not in inputs}
    return session.run(None, {**feeds, **inputs})


def _eager(model, state, layout, *args, **kwargs):
    """The output of the model in eval mode, with the state of a step."""
    values = {key: torch.from_numpy(np.array(state[name])) for key, name in {**layout.parameters, **layout.buffers}.items()}
    model.load_state_dict(values, strict=False)
    with torch.no_grad():
        return model.eval()(*args, **kwargs).numpy()


@both
def test_the_evaluation_takes_the_state_of_the_step(dynamo, tmp_path):
    model = _Network().train()
    model.frozen.eval()
    batches = _batches()
    x, scale, target = batches[0]
    shapes = {"x": {0: "batch"}, "scale": None, "target": {0: "batch"}}
    step, _ = _made(tmp_path, model, (x,), {"scale": scale}, targets=(target,), dynamic_shapes=shapes, dynamo=dynamo)
    assert [module.training for module in model.modules()] == [module is not model.frozen for module in model.modules()]
    assert float(model.calls) == 0
    _, later = run(step, batches)
    assert any(not np.array_equal(step.initial[name], later[name]) for name in step.layout.parameters.values())
    other = torch.randn(3, 1, 8, 8)
    for state in (step.initial, later):
        got = _evaluated(tmp_path, state, x=other.numpy(), scale=scale.numpy())
        assert len(got) == 1  # not what becomes of the buffer
        np.testing.assert_allclose(got[0], _eager(model, state, step.layout, other, scale=scale), rtol=1e-5, atol=1e-6)


def test_a_manifest_of_a_later_format_is_refused(tmp_path):
    """As pythonop.mjs does: what it says of the files may mean something else."""
    step, manifest = _made(tmp_path, nn.Linear(2, 2), (torch.randn(3, 2),), targets=(torch.randn(3, 2),))
    saved = exporter.Trainer(step).save()
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    for read in (exporter.Trainer.load, lambda folder: exporter.trained(folder, saved)):
        with pytest.raises(FormatError, match=r"manifest\.json has format 2, this release reads format 1: install a newer pythonop"):
            read(tmp_path)


@both
def test_the_manifest_says_what_the_files_have(dynamo, tmp_path):
    x, scale, target = _batches()[0]
    made = _made(tmp_path / "new", _Network().train(), (x,), {"scale": scale}, targets=(target,), dynamo=dynamo, opset_version=20)
    step, manifest = made
    assert sorted(os.listdir(tmp_path / "new")) == sorted([*NAMES, UNREAD])  # the counts of batches
    assert json.loads((tmp_path / "new" / "manifest.json").read_text()) == manifest
    assert (manifest["format"], manifest["optimizer"], manifest["loss"], manifest["python"]) == (1, "adamw", "loss", [])
    models = {kind: onnx.load(tmp_path / "new" / name) for kind, name in manifest["files"].items()}
    for model in models.values():
        onnx.checker.check_model(model, full_check=True)
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == 20
    training, evaluation, initial = (models[kind].graph for kind in ("training", "eval", "initial"))
    state = {entry["name"]: entry for entry in manifest["state"]}
    rates = {entry["name"]: entry for entry in manifest["hyperparameters"]}
    defaults = {"learning_rate": pytest.approx(1e-3), "weight_decay": pytest.approx(1e-2)}
    assert rates == {name: {"name": name, "dtype": "float32", "shape": [], "default": default} for name, default in defaults.items()}
    arguments = [entry["name"] for entry in manifest["inputs"] + manifest["targets"]]
    assert arguments == ["x", "scale", "target"]
    assert {value.name for value in training.input} == {*arguments, *state, *rates}
    assert {value.name for value in initial.output} == {*state, *rates}
    assert {value.name for value in training.output} == {"loss", *(entry["next"] for entry in state.values())}
    assert [value.name for value in evaluation.input] == [*(v["name"] for v in manifest["eval"]["inputs"]), *manifest["eval"]["state"]]
    assert [value.name for value in evaluation.output] == [value["name"] for value in manifest["eval"]["outputs"]]
    described = [*manifest["inputs"], *manifest["targets"], *manifest["state"], *manifest["hyperparameters"]]
    described += [*manifest["eval"]["inputs"], *manifest["eval"]["outputs"], *({**e, "name": e["next"]} for e in manifest["state"])]
    for value in (*training.input, *training.output, *evaluation.input, *evaluation.output):
        found = [entry for entry in described if entry["name"] == value.name]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        assert value.name == "loss" or found, value.name
        assert all((entry["dtype"], entry["shape"]) == (kind, _sizes(value)) for entry in found), value.name
    kinds = {name: entry["kind"] for name, entry in state.items()}
    assert {name for name, kind in kinds.items() if kind == "parameter"} == set(step.layout.parameters.values())
    assert {name for name, kind in kinds.items() if kind == "buffer"} == set(step.layout.buffers.values())
    assert {name for name, kind in kinds.items() if kind == "optimizer"} == {name for name in state if name.startswith("state.")}
    assert kinds["seed"] == "seed"
    assert "buffer.features.1.running_mean" in manifest["eval"]["state"]
    assert "buffer.features.1.num_batches_tracked" not in manifest["eval"]["state"]


def _sizes(value):
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in value.type.tensor_type.shape.dim]


def test_a_loss_with_parameters_and_mixed_precision(tmp_path):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return F.cross_entropy(output.float() * self.scale, target)

    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,))
    step, manifest = _made(tmp_path, model, (x,), loss=Loss(), targets=(target,), precision="float16", dynamo=False)
    assert "param.loss.scale" in step.initial
    assert manifest["eval"]["state"] == ["param.weight", "param.bias"]
    assert manifest["eval"]["outputs"][0]["dtype"] == "float16"
    assert {entry["kind"] for entry in manifest["state"] if entry["name"] == "state.loss_scale"} == {"optimizer"}
    with torch.autocast("cpu", torch.float16):
        expected = model(x).detach().numpy()
    np.testing.assert_allclose(_evaluated(tmp_path, step.initial, input=x.numpy())[0], expected, rtol=1e-2, atol=1e-3)


@both
def test_a_model_that_returns_its_loss_has_all_its_outputs(dynamo, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, *features, labels):
            logits = self.linear(features[0] + features[1])
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model, features, labels = Model(), (torch.randn(5, 4), torch.randn(5, 4)), torch.randint(0, 3, (5,))
    step, manifest = _made(tmp_path, model, features, {"labels": labels}, loss=None, dynamo=dynamo)
    names = [entry["name"] for entry in manifest["inputs"]]
    assert names == [entry["name"] for entry in manifest["eval"]["inputs"]]
    feeds = {name: value.numpy() for name, value in zip(names, (*features, labels), strict=True)}
    loss, logits = _evaluated(tmp_path, step.initial, **feeds)
    expected = model(*features, labels=labels)
    np.testing.assert_allclose(loss, expected["loss"].item(), rtol=1e-5)
    np.testing.assert_allclose(logits, expected["logits"].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_parameters_that_branches_read(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x):
            y = self.linear(x)
            return torch.cond(x.sum() > 0, lambda y: y * self.scale, lambda y: y - self.scale, (y,))

    torch.manual_seed(0)
    model, batches = Model(), [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)]
    step, manifest = _made(tmp_path, model, batches[0][:1], targets=batches[0][1:])
    assert "param.scale" in manifest["eval"]["state"]
    _, later = run(step, batches)
    for x in (torch.ones(5, 4), -torch.ones(5, 4)):
        expected = _eager(model, later, step.layout, x)
        np.testing.assert_allclose(_evaluated(tmp_path, later, x=x.numpy())[0], expected, rtol=1e-5, atol=1e-6)


def test_others_files_stay_and_ours_are_replaced(tmp_path):
    model, x, target = nn.Linear(64, 64), torch.randn(5, 64), torch.randint(0, 3, (5,))
    for name in ("training.onnx", "notes.txt"):
        (tmp_path / name).write_text("mine")
    step, _ = _made(tmp_path, model, (x,), targets=(target,), dynamo=False, external_data=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    onnx.checker.check_model(tmp_path / "training.onnx")
    assert {".".join(name.split(".")[:2]) for name in os.listdir(tmp_path) if name.endswith(".data")} == {"initial.onnx"}
    np.testing.assert_allclose(_evaluated(tmp_path, step.initial, input=x.numpy())[0], model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("there", [True, False], ids=["a folder", "no folder"])
def test_all_or_nothing(there, tmp_path):
    model, x, target = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,))
    step = export_training_step(model, (x,), loss=F.cross_entropy, targets=(target,), dynamo=False)
    evaluation = export_evaluation(model, (x,), dynamo=False)
    gone = ir.Value(name="gone", const_value=ir.ExternalTensor("gone.data", 0, 12, ir.DataType.FLOAT, shape=ir.Shape([3]), name="gone"))
    evaluation.model.graph.initializers["gone"] = gone
    evaluation.model.graph.append(ir.Node("", "Add", [evaluation.model.graph.outputs[0], gone], name="more"))
    added = evaluation.model.graph[-1].outputs[0]
    added.name, added.type, added.shape = "added", ir.TensorType(ir.DataType.FLOAT), ir.Shape([5, 3])
    evaluation.model.graph.outputs[0] = added
    folder = tmp_path / "artifacts"
    if there:
        folder.mkdir()
        (folder / "training.onnx").write_text("mine")
    with pytest.raises(ExportError, match="nothing was written"):
        write_artifacts(step, evaluation, folder)
    assert [path.name for path in tmp_path.rglob("*")] == (["artifacts", "training.onnx"] if there else [])


def test_what_cannot_be_written(tmp_path):
    model, x, target = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,))
    step = export_training_step(model, (x,), loss=F.cross_entropy, targets=(target,), dynamo=False)
    evaluation = export_evaluation(model, (x,), dynamo=False)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    with pytest.raises(ExportError, match="it is not a folder"):
        write_artifacts(step, evaluation, tmp_path / "file")
    with pytest.raises(ExportError, match="it is a folder"):
        write_artifacts(step, evaluation, tmp_path / "folder")
    with pytest.raises(ExportError, match="there is no folder"):
        write_artifacts(step, evaluation, tmp_path / "no" / "folder")
    with pytest.raises(ExportError, match="the evaluation has no 'weight', which the step trains"):
        write_artifacts(step, export_evaluation(nn.Sequential(nn.Linear(4, 3)), (x,), dynamo=False), tmp_path / "other")
    with pytest.raises(ArgumentError, match="precision is 'int8'"):
        export_evaluation(model, (x,), precision="int8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "manifest.json"]


@both
def test_a_function_needs_python_or_is_portable(dynamo, tmp_path):
    torch.manual_seed(0)
    model, batches = Custom().train(), [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(3)]
    (x, target), name = batches[0], "tests.exporter.training.loop:Square"
    with pytest.warns(PythonopWarning, match=f"the calls of {name} stay PythonOps.*portable=True"):
        _, manifest = _made(tmp_path, model, (x,), targets=(target,), dynamo=dynamo)
    assert manifest["python"] == [name]
    session = exporter.inference_session(tmp_path / "eval.onnx", allow=[name])
    assert session.get_inputs()[0].name == "x"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        step, manifest = _made(tmp_path, model, (x,), targets=(target,), dynamo=dynamo, portable=True)
    assert manifest["python"] == []
    _, later = run(step, batches)
    expected = _eager(model, later, step.layout, x)
    np.testing.assert_allclose(_evaluated(tmp_path, later, x=x.numpy())[0], expected, rtol=1e-5, atol=1e-6)


@both
def test_files_for_webgpu_train_and_evaluate_alike(dynamo, tmp_path):
    """Beside the plain files: three steps, a resumed state, both evaluations; what was int64 is int32 in all of them."""
    batches, options = _batches(3), {"loss": F.cross_entropy, "dynamo": dynamo}
    (x, scale, target), model = batches[0], _Network().train()
    options |= {"targets": (target,)}
    numbers = {
        "lr": 0.01,
        "momentum": 0.9,
        "dampening": 0.1,
    }  # AdamW makes whole steps of the rounding that a bias before batch norm has for a gradient
    step = export_training_step(model, (x,), {"scale": scale}, optimizer="sgd", hyperparameters=numbers, **options)
    evaluation = export_evaluation(model, (x,), {"scale": scale}, **options)
    manifest = write_artifacts(step, evaluation, tmp_path / "webgpu", provider="webgpu")
    write_artifacts(step, evaluation, tmp_path / "plain")
    described = [*manifest["inputs"], *manifest["targets"], *manifest["state"], *manifest["eval"]["inputs"]]
    assert {entry["dtype"] for entry in described} == {"float32", "int32"}
    assert {entry["name"] for entry in described if entry["dtype"] == "int32"} == {
        "target", "state.step", "seed", "buffer.features.1.num_batches_tracked"
    }  # fmt: skip
    found = []
    for kind in ("webgpu", "plain"):
        trainer, numbers = exporter.Trainer.load(tmp_path / kind), []
        for x, scale, target in batches:
            target = target.int() if kind == "webgpu" else target
            numbers.append(trainer.step({step.layout.inputs[0]: x, "scale": scale, "target": target}))
            trainer.save(tmp_path / "saved")
            trainer.restore(tmp_path / "saved")
        batch = {step.layout.inputs[0]: x, "scale": scale}
        found.append((numbers, trainer.evaluate(batch), trainer.evaluate({**batch, "target": target})["loss"]))
    (losses, outputs, loss), (plain_losses, plain_outputs, plain_loss) = found
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for name, value in plain_outputs.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5)


def test_artifacts_for_a_provider_without_forms(tmp_path):
    step = export_training_step(nn.Linear(3, 2), (torch.ones(4, 3),), loss=F.mse_loss, targets=(torch.ones(4, 2),), dynamo=False)
    evaluation = export_evaluation(nn.Linear(3, 2), (torch.ones(4, 3),), dynamo=False)
    with pytest.raises(ArgumentError, match="no forms for the provider cuda: openvino and webgpu have some"):
        write_artifacts(step, evaluation, tmp_path / "made", provider="cuda")
    assert list(tmp_path.iterdir()) == []
    before = {name: array.dtype for name, array in step.initial.items()}
    step.written_for("webgpu")
    assert {name: array.dtype for name, array in step.initial.items()} == before, "a step is not changed"
    assert step.model.graph.inputs[-1].dtype != ir.DataType.INT32
