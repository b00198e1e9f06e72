"""Calls of export() that look wrong, and are not: torch's exporters take them, and the file is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from tests.exporter.test_wrong_calls import NET, Net, X, fakes


class Applies(Net):
    """Takes a module."""

    def forward(self, x, then):
        return then(self.inner(x))


class Gives(nn.Module):
    """Keeps its input where there was nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x):
        self.last = x
        return x


CALLS = {
    "keywords at the end": lambda dynamo: exporter.export(NET, ({"x": X},), dynamo=dynamo),
    "a module without parameters": lambda dynamo: exporter.export(Applies(), (X, nn.ReLU()), dynamo=dynamo),
    "dynamo as an int": lambda dynamo: exporter.export(NET, (X,), dynamo=int(dynamo)),
    "numbers of numpy": lambda dynamo: exporter.export(
        NET, (X,), dynamo=np.bool_(dynamo), opset_version=np.int64(20), dynamic_shapes={"x": {np.int64(0): "n"}}
    ),
    "None for what is not given": lambda dynamo: exporter.export(NET, (X,), dynamo=dynamo, dynamic_shapes={"x": {0: "n"}, "scale": None}),
    "None at the end": lambda dynamo: exporter.export(NET, (X,), dynamo=dynamo, dynamic_shapes=({0: "n"}, None)),
    "a fake tensor": lambda dynamo: exporter.export(NET, (fakes() if dynamo else X,), dynamo=dynamo),
    "a DataParallel": lambda dynamo: exporter.export(nn.DataParallel(NET) if dynamo else NET, (X,), dynamo=dynamo),
    "a buffer that was None": lambda dynamo: exporter.export(Gives() if dynamo else NET, (X,), dynamo=dynamo),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_taken(call, dynamo):
    program = call(dynamo)
    session = exporter.inference_session(program.model_proto)
    (found, *_) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    right = X if call is CALLS["a buffer that was None"] and dynamo else NET(X)
    assert tuple(found.shape) == tuple(right.shape)
    if call is not CALLS["a module without parameters"]:
        torch.testing.assert_close(torch.from_numpy(found), right.detach())


def test_models_without_values_have_graphs(dynamo, monkeypatch):
    monkeypatch.setattr("tests.usable.Found.look", lambda *_: None)  # nobody can run them
    assert len(exporter.export(Net().to("meta"), (X.to("meta"),), dynamo=dynamo).model.graph) == 1
    if dynamo:
        model = Net()
        model.register_buffer("unused", torch.empty(3, device="meta"))
        assert len(exporter.export(model, (X,)).model.graph) == 1
