"""Models whose Functions are in the file, forward and own backward: equal to eager where there is neither torch nor any class."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import exporter
from tests.processes import python
from tests.support import nodes
from tests.zoo import hiding
from tests.zoo.entry import Entry
from tests.zoo.exported import entry_of


def _hiding(model: torch.nn.Module, width: int) -> Entry:
    return Entry(model, (torch.randn(5, width),))


MODELS = {
    "snn": lambda: entry_of("snn"),
    "entmax15": lambda: entry_of("entmax15"),
    "timm_activations": lambda: entry_of("timm_activations"),
    "bloom": lambda: entry_of("bloom"),
    "ibert": lambda: entry_of("ibert"),
    "reversible": lambda: _hiding(hiding.ReversibleNet(), 8),
    "adjoint": lambda: _hiding(hiding.AdjointNet(), 3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_python(name, dynamo, tmp_path):
    torch.manual_seed(0)
    entry = MODELS[name]()
    program = exporter.export(copy.deepcopy(entry.model), entry.args, dynamo=dynamo, portable=True)
    assert program.portable
    assert {call.kind for call in program.portable} == {"function"}, program.portable
    assert not nodes(program.model, "PythonOp")
    program.save(tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **_eager(entry))
    code = "import sys; sys.modules['torch'] = None; from tests.end_to_end.portable.run import main; main(*sys.argv[1:])"
    done = python("-c", code, str(tmp_path / "model.onnx"), str(tmp_path / "data.npz"))
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert not differences.pop("missing")
    assert all(value < 2e-5 for value in differences.values()), differences


def _eager(entry: Entry) -> dict[str, np.ndarray]:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t for t in entry.args]
    made = [t for t in pytree.tree_leaves(entry.model(*leaves)) if isinstance(t, torch.Tensor)]
    cotangents = [torch.randn_like(t) for t in made]
    torch.autograd.backward(made, cotangents)
    held = {f"input{i}": t.detach() for i, t in enumerate(leaves)}
    held |= {f"output{i}": t.detach() for i, t in enumerate(made)} | {f"cotangent{i}": t for i, t in enumerate(cotangents)}
    held |= {f"gradient.{name}": p.grad for name, p in entry.model.named_parameters() if p.grad is not None}
    held |= {f"gradient{i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    return {key: value.numpy() for key, value in held.items()}
