"""Models of packages: their files in a fresh process beside eager, and three steps of an optimizer on the loaded module."""

from __future__ import annotations

import importlib.util
import random
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch.utils import _pytree as pytree

import exporter
import tests.end_to_end.wild.more_models  # noqa: F401 - its models, too
from symbolics.errors import PythonopError
from tests.end_to_end.wild.models import MODELS, Wild
from tests.processes import ROOT
from tests.support import missing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _made(wild: Wild) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    numpy.random.seed(0)  # some packages choose a permutation by numpy
    random.seed(0)
    model, args = wild.make()
    torch.manual_seed(1)
    return model, args


def _trained(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three steps of SGD, and the parameters and buffers behind them."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        leaves = [leaf for leaf in pytree.tree_leaves(module(*args)) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        loss = sum((leaf.square() * torch.linspace(0.5, 1, leaf.numel()).reshape(leaf.shape)).mean() for leaf in leaves)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def _check(wild: Wild, dynamo: bool) -> None:
    model, args = _made(wild)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(*_made(wild), dynamo=dynamo)  # a model of its own: some cannot be copied
    allow = [f"{wild.module}.*"]
    wanted, state = _trained(model, args)
    found, loaded = _trained(exporter.load(program, allow=allow).train(model.training), args)
    torch.testing.assert_close(found, wanted, rtol=wild.loose, atol=wild.loose)
    for name in state.keys() & loaded.keys():
        torch.testing.assert_close(
            loaded[name], state[name], rtol=wild.loose, atol=wild.loose, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert {name for name, _ in model.named_parameters() if _.requires_grad} <= loaded.keys()
    model, args = _made(wild)
    report = exporter.verify(model, args, dynamo=dynamo, setup=wild.setup, allow=allow, steps=1)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_eager(name: str, dynamo: bool) -> None:
    wild = MODELS[name]
    if importlib.util.find_spec(wild.module) is None or importlib.util.find_spec("vector_quantize_pytorch") is None:
        missing("packages", f"{wild.module} or others are not installed: make test-wild")
    if (wild.dynamo if dynamo else wild.torchscript) == "works":
        _check(wild, dynamo)
        return
    model, args = _made(wild)
    with pytest.raises(Exception, match=wild.says or "") as caught:
        exporter.export(model, args, dynamo=dynamo)
    assert isinstance(caught.value, torch.onnx.OnnxExporterError) or not isinstance(caught.value, PythonopError), caught.value


def test_the_document_has_them() -> None:
    lines = [f"| {wild.module} | {wild.title} | {wild.dynamo} | {wild.torchscript} |" for wild in MODELS.values()]
    text = (ROOT / "docs" / "wild.md").read_text().partition("## Models")[2]
    assert [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| package")] == lines
    assert all(re.compile(wild.says) for wild in MODELS.values())
