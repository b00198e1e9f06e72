"""Files that older releases wrote open, run and train as eager mode does today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import exporter
from tests.exporter.files.releases.functions import Model, Quantised, Sorted, batch

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0].isdigit())
ALLOW = ["tests.exporter.files.releases.functions:*"]


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def folder(request):
    return request.param


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(np.asarray(ours)), theirs.detach(), rtol=1e-5, atol=1e-6)


def having(name):
    """The releases with a file; every one since the first that wrote it."""
    found = [path for path in RELEASES if (path / name).exists()]
    assert found == RELEASES[RELEASES.index(found[0]) :], f"a release after {found[0].name} has no {name}"
    return pytest.mark.parametrize("path", [folder / name for folder in found], ids=[folder.name for folder in found])


def test_there_are_files_of_every_release():
    """Those of this version, too: `python -m tests.exporter.files.releases.make` makes them once, when the version is set."""
    assert [path.name for path in RELEASES] == ["0.1.0", "0.2.0"]
    assert RELEASES[-1].name == exporter.__version__


@pytest.mark.parametrize("name", ["forward-dynamo", "forward-torchscript"])
def test_a_forward_file_runs_and_trains(folder, name):
    (x, target), model = batch(), Model()
    path = folder / f"{name}.onnx"
    (ours,) = exporter.inference_session(path, ALLOW).run(None, {"x": x.numpy()})
    close(ours, model(x))
    loaded = exporter.load(path, allow=ALLOW)
    for each in (loaded, model):
        torch.nn.functional.mse_loss(each(x[:3]), target[:3]).backward()
    theirs = dict(model.named_parameters())
    assert {key for key, _ in loaded.named_parameters()} == set(theirs)
    for key, parameter in loaded.named_parameters():
        close(parameter.grad, theirs[key].grad)


def test_a_gradient_of_first_and_of_second_order(folder):
    x, g = batch()
    x = x.requires_grad_()
    y = Model()(x)
    (first,) = torch.autograd.grad(y, x, g, create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
    session = exporter.inference_session(folder / "gradient.onnx", ALLOW)
    feeds = {"x": x.detach().numpy(), session.get_inputs()[1].name: g.numpy()}
    ours = session.run(None, feeds)
    close(ours[0], y)
    close(ours[1], first)
    session = exporter.inference_session(folder / "second.onnx", ALLOW)
    ours = session.run(None, {**feeds, session.get_inputs()[2].name: np.ones_like(ours[1])})
    close(ours[1], first)
    close(ours[2], second)


def test_a_portable_file_runs_without_python(folder):
    x, _ = batch()
    session = onnxruntime.InferenceSession(folder / "portable.onnx", providers=["CPUExecutionProvider"])
    close(session.run(None, {"x": x.numpy()})[0], Model()(x))


def test_a_training_step(folder):
    (x, target), model = batch(), Model()
    trainer = exporter.Trainer.load(folder / "step.onnx", allow=ALLOW)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x, "target": target}) == pytest.approx(loss.item(), rel=1e-5)


@having("portable-step.onnx")
def test_a_portable_step_trains_without_python(path):
    """On plain onnxruntime, in a loop of one's own."""
    (x, target), model = batch(), Model()
    initial = onnxruntime.InferenceSession(path.with_suffix(".init.onnx"), providers=["CPUExecutionProvider"])
    state = dict(zip([output.name for output in initial.get_outputs()], initial.run(None, {}), strict=True))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        told = dict(zip(names, session.run(names, {**state, "x": x.numpy(), "target": target.numpy()}), strict=True))
        assert told["loss"] == pytest.approx(loss.item(), rel=1e-5)
        state.update({name.removesuffix(".next"): value for name, value in told.items() if name.endswith(".next")})


@having("opaque.onnx")
def test_an_opaque_module_runs_and_trains(path):
    (x, target), model = batch(), Sorted()
    (ours,) = exporter.inference_session(path, ALLOW).run(None, {"x": x.numpy()})
    close(ours, model(x))
    loaded = exporter.load(path, allow=ALLOW)
    for each in (loaded, model):
        torch.nn.functional.mse_loss(each(x), target).backward()
    theirs = dict(model.named_parameters())
    assert {key for key, _ in loaded.named_parameters()} == set(theirs)
    for key, parameter in loaded.named_parameters():
        close(parameter.grad, theirs[key].grad)


@having("quantised.onnx")
def test_a_file_in_integers_gives_the_levels_of_the_fake_quantised_model(path):
    """But for a level at a tie, which floats decide otherwise."""
    x, _ = batch()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ours = session.run(None, {"x": x.numpy()})[0]
    levels = np.rint((ours - Quantised()(x).detach().numpy()) / 0.02)
    assert np.abs(levels).max() <= 1
    assert np.count_nonzero(levels) <= 1
    weights = [value for value in onnx.load(path).graph.initializer if len(value.dims) == 2]
    assert [value.data_type for value in weights] == [onnx.TensorProto.INT8] * 2
