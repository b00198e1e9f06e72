"""Files that older releases wrote open, run and train as eager mode does today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from tests.exporter.files.releases.functions import Model, batch

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0].isdigit())
ALLOW = ["tests.exporter.files.releases.functions:*"]


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def folder(request):
    return request.param


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(np.asarray(ours)), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_there_are_files():
    assert [path.name for path in RELEASES][:1] == ["0.1.0"]


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
