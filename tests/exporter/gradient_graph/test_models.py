"""Gradients of real models, exported, against eager PyTorch: outputs and every parameter, within 1e-4 relative."""

from __future__ import annotations

import collections
import copy

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.node.metadata import read_pairing, read_state
from symbolics.node.names import ORT_DOMAIN
from tests.zoo.architectures import ids
from tests.zoo.exported import DYNAMIC, exported, models
from tests.zoo.public import PUBLIC

TOLERANCE = 1e-4


class _Steps(nn.Module):
    """A GRU cell in a Python loop over the steps: scripted, it is a Loop."""

    def __init__(self):
        super().__init__()
        self.x, self.h = nn.Linear(8, 36), nn.Linear(12, 36)

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.shape[0], 12)
        for t in range(x.shape[1]):
            r, z, n = self.x(x[:, t]).chunk(3, 1)
            u, v, w = self.h(h).chunk(3, 1)
            z = torch.sigmoid(z + v)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + u) * w) + z * h
        return h


class _LoopedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.steps, self.head = nn.Embedding(23, 8), _Steps(), nn.Linear(12, 23)

    def forward(self, ids):
        return self.head(self.steps(self.embed(ids)))


class _ScannedGRU(nn.Module):
    """A GRU cell under torch's scan: exported, it is a Scan whose body captures the weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(23, 8), nn.GRUCell(8, 12), nn.Linear(12, 23)

    def forward(self, ids):
        from torch._higher_order_ops.scan import scan

        def step(h, x):
            h = self.cell(x, h)
            return h, h.clone()

        return self.head(scan(step, torch.zeros(ids.shape[0], 12), self.embed(ids).transpose(0, 1))[1].transpose(0, 1))


def relative_error(got: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest expected value."""
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max(initial=0) / (np.abs(expected).max(initial=0) + 1e-12))


def run_training(training: ir.Model, args, cotangents, session=None) -> dict[str, np.ndarray]:
    """All outputs of a training graph, by stock onnxruntime or the session given."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = session or onnxruntime.InferenceSession(
        ir.to_proto(training).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [v.name for v in training.graph.inputs]
    feeds = dict(zip(names, [v.detach().numpy() for v in (*args, *cotangents)], strict=True))
    outputs = [v.name for v in training.graph.outputs]
    return dict(zip(outputs, session.run(outputs, feeds)))


def check_against_eager(model: nn.Module, args, training: ir.Model, noise: float = 1e-6, session=None) -> None:
    """Outputs and parameter gradients of one batch."""
    twin = copy.deepcopy(model)  # some models change in their forward
    twin.zero_grad()
    expected = [leaf for leaf in pytree.tree_leaves(twin(*args)) if isinstance(leaf, torch.Tensor)]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator) for y in expected]
    torch.autograd.backward(expected, cotangents)
    got = run_training(training, args, cotangents, session)
    pairing, state = read_pairing(training.metadata_props), read_state(training.metadata_props)
    for y, value in zip(expected, got.values(), strict=False):
        assert relative_error(value, y) < TOLERANCE
    largest = max(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None)
    for name, parameter in twin.named_parameters():
        initializer = name if state is None else state[name].initializer
        if not parameter.requires_grad:
            assert initializer not in pairing.outputs
        elif parameter.grad is None:
            assert initializer in pairing.unreached, name
        else:  # a gradient that is 0 but for rounding (a bias before a norm) is compared with the others
            g = got[pairing.outputs[initializer]]
            assert np.abs(g - parameter.grad.numpy()).max() < TOLERANCE * float(parameter.grad.abs().max()) + noise * largest, name


@models()
def test_gradients_equal_eagers(name, dynamo):
    """Architectures on stock onnxruntime, models with PythonOps on onnx.reference."""
    found = exported(name, dynamo)
    training = build_gradient_graph(found.program)
    counts = collections.Counter(node.op_type for node in training.graph if node.domain == ORT_DOMAIN)
    session = None
    if name in PUBLIC:
        assert counts["PythonOp"] >= counts["PythonOpGrad"]
        assert (counts["PythonOpGrad"] > 0) == (name != "checkpointed")  # which is inlined
        session = exporter.reference_evaluator(ir.to_proto(training), found.entry.allow)
    check_against_eager(found.entry.model, found.entry.args, training, session=session)


# ----------------------------------------------------------------------------------------------------------- loops, scans
def test_a_gru_in_a_loop(tmp_path):
    """A scripted model of torch's own exporter: it has no metadata of ours, so names alone say what is what."""
    torch.manual_seed(0)
    model, args = _LoopedGRU(), (ids(2, 6) % 23,)
    path = tmp_path / "loop.onnx"
    torch.onnx.export(torch.jit.script(model), args, path, dynamo=False, opset_version=18, keep_initializers_as_inputs=False)
    training = build_gradient_graph(path)
    assert [n.op_type for n in training.graph].count("Loop") == 2
    check_against_eager(model, args, training)


@pytest.mark.slow
def test_a_gru_in_a_scan():
    torch.manual_seed(0)
    model, args = _ScannedGRU(), (ids(2, 6) % 23,)
    training = build_gradient_graph(exporter.export(model, args, dynamo=True))
    assert "Scan" in {n.op_type for n in training.graph}
    check_against_eager(model, args, training)


# -------------------------------------------------------------------------------------------------------------- dynamic
@models(DYNAMIC)
def test_three_sizes_from_one_file(name, dynamo):
    found = exported(name, dynamo, dynamic=True)
    training, session = build_gradient_graph(found.program), None
    if name in PUBLIC:
        assert any(n.op_type == "PythonOpGrad" for n in training.graph)
        session = exporter.reference_evaluator(ir.to_proto(training), found.entry.allow)
    for batch, length in ((2, 7), (1, 4), (5, 3)):
        check_against_eager(found.entry.model, found.entry.sized(batch, length), training, session=session)
