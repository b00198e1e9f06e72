"""The zeros of BatchNormalizations that train, by one node each: the same bits, whatever the buffers hold, and nothing else is taken out."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import exporter
from exporter.cpu.elementwise import ELEMENTWISE
from exporter.cpu.statistics import zeros_at_once
from exporter.train_mode.batch_norm import batch_statistics
from exporter.training.trainer import Trainer
from tests.exporter.cpu.support import inference_session, rewrite_convolutions

KINDS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
SHAPE = (5, 3, 4)


def twice(kind=np.float32, more=(), outputs=("y",)):
    """Two BatchNormalizations over the same buffers, which a caller may give."""
    element, kind_of = KINDS[kind], {"kept": TensorProto.BOOL}
    norms = [
        helper.make_node("BatchNormalization", [x, "w", "b", "mean", "var"], [y, f"{y}/mean", f"{y}/var"], training_mode=1)
        for x, y in (("x", "h"), ("h", "y"))
    ]
    given = [helper.make_tensor_value_info(name, element, [3]) for name in ("w", "b", "mean", "var")]
    made = [helper.make_tensor_value_info(name, kind_of.get(name, element), None) for name in (*outputs, "h/mean", "y/mean", "y/var")]
    graph = helper.make_graph([*norms, *more], "g", [helper.make_tensor_value_info("x", element, SHAPE), *given], made)
    graph.initializer.extend(numpy_helper.from_array(np.ones(3, kind), name) for name in ("mean", "var"))
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def kinds(model):
    return [node.op_type for node in model.graph]


def feeds_of(kind=np.float32, buffers=0.5):
    generator = np.random.default_rng(0)
    return {"x": generator.standard_normal(SHAPE).astype(kind), "w": np.ones(3, kind), "b": np.zeros(3, kind)} | {
        name: np.full(3, buffers, kind) for name in ("mean", "var")
    }


@pytest.mark.parametrize("buffers", [0.5, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=["float32", "float64"])
def test_zeros_of_one_node_are_the_same(kind, buffers):
    model, feeds = twice(kind), feeds_of(kind, buffers)
    batch_statistics(model)
    expected = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feeds)
    assert zeros_at_once(model) == 2
    assert sorted(kinds(model)) == ["BatchNormalization"] * 2 + [ELEMENTWISE] * 2 + ["Shape"] * 2
    found = inference_session(ir.to_proto(model)).run(None, feeds)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    x = feeds["x"].astype(np.float64)
    np.testing.assert_allclose(found[1], x.mean((0, 2)), rtol=1e-5, atol=1e-6)


def test_nodes_of_other_buffers_stay():
    model = twice()
    assert zeros_at_once(model) == 0  # it reads its buffers, whose momentum is theirs
    batch_statistics(model)
    for node in model.graph:
        if node.op_type == "BatchNormalization":
            node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.5)
    assert zeros_at_once(model) == 0
    model = twice()
    batch_statistics(model)
    for node in model.graph:
        if node.op_type == "Less":  # may be other numbers than zeros
            node.replace_input_with(1, model.graph.inputs[1])
    assert zeros_at_once(model) == 0


def test_what_nobody_reads_is_taken_out_of_zeros_alone():
    """A node that nobody reads, as a PythonOp that says something, stays."""
    more = [helper.make_node("Relu", ["x"], ["unread"]), helper.make_node("Less", ["x", "x"], ["kept"])]
    model = twice(more=more, outputs=("y", "kept"))
    batch_statistics(model)
    assert zeros_at_once(model) == 2
    assert kinds(model).count("Relu") == kinds(model).count("Less") == 1


def test_only_with_the_native_library():
    model = twice()
    batch_statistics(model)
    rewrite_convolutions(model, native=False)
    assert ELEMENTWISE not in kinds(model)
    rewrite_convolutions(model, native=True)
    assert kinds(model).count(ELEMENTWISE) == 2


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.norm(self.norm(x).sin()))


@pytest.mark.parametrize("bad", [False, True], ids=["", "buffers that are no numbers"])
@pytest.mark.parametrize("loaded", [False, True], ids=["step", "loaded"])
def test_training_is_eagers(loaded, bad):
    torch.manual_seed(0)
    eager, x = Shared(), 2 + torch.randn(6, 4)
    if bad:
        eager.norm.running_mean.fill_(torch.nan)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    if loaded:
        module = exporter.load(exporter.export(eager, (x,))).train()
        module(x).sum().backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        buffers = dict(module.named_buffers())
    else:
        trainer = Trainer(exporter.export_training_step(eager, (x,), loss=torch.sum, optimizer="sgd", hyperparameters={"lr": 1.0}))
        trainer.step({"x": x})
        buffers = trainer.state_dict()
        found = {name: before[name] - buffers[name] for name in before}
    eager(x).sum().backward()
    for name, p in eager.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(buffers[name], eager.get_buffer(name), rtol=1e-5, atol=1e-6, equal_nan=True)
