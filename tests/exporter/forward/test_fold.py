"""What is folded and merged in a file and in a training step, and what is not."""

from __future__ import annotations

import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.forward.fold import fold


def parsed(text):
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))


def kinds(model):
    return [node.op_type for node in model.graph]


def test_unused_nodes_and_initializers_go():
    model = parsed("g (float[2] x) => (float[2] y) <float[1] unused = {1}> { a = Neg(x) b = Abs(a) y = Relu(x) }")
    fold(model)
    assert kinds(model) == ["Relu"]
    assert not model.graph.initializers


def test_an_unused_optional_output_goes():
    model = parsed("g (float[2] x) => (float[2] y) { y, mask = Dropout(x) }")
    node = next(iter(model.graph))
    node.attributes["seed"] = ir.AttrInt64("seed", 1)
    fold(model)
    assert "mask" not in [value.name for node in model.graph for value in node.outputs]


def test_an_output_without_a_name_gets_none():
    model = parsed("g (float[2] x) => (float[2] y, float[2] z) <float[2] k = {1, 2}> { y, unwanted = Dropout(x) z = Add(k, k) }")
    node = next(node for node in model.graph if node.op_type == "Dropout")
    node.domain, node.outputs[1].name = "own", ""  # as a PythonOpGrad has it where nobody wants a gradient
    fold(model)
    assert [value.name for value in node.outputs] == ["y", ""]


def test_outputs_stay_outputs():
    model = parsed("g (float[2] x) => (float[2] y, float[2] z) { y = Identity(x) z = Relu(x) }")
    fold(model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    onnx.checker.check_model(ir.to_proto(model))


def test_constants_that_bodies_share():
    model = parsed(
        "g (bool c, float[2] x) => (float[2] y) { "
        "y = If(c) <then_branch = t () => (float[2] a) { k = Constant <value = float[1] {2}> () a = Mul(x, k) }, "
        "else_branch = e () => (float[2] b) { n = Constant <value = float[1] {2}> () b = Mul(x, n) }> }"
    )
    fold(model)
    assert len(model.graph.initializers) == 1
    onnx.checker.check_model(ir.to_proto(model))


class Constants(nn.Module):
    """What may be folded (a constant table), what may not (a parameter's transpose, the batch), and a constant that is an output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        table = torch.tensor([1.0, 2.0, 3.0]).unsqueeze(0)
        return (x * table) @ self.weight.t().t() + x.shape[0], torch.arange(3).to(torch.float32).unsqueeze(1)


def test_constants_fold_and_parameters_and_sizes_do_not():
    model, x = Constants(), torch.randn(2, 3)
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught, exporter.hook() as hook:
        warnings.simplefilter("always")
        torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"], output_names=["y", "table"], dynamic_axes={"x": {0: "batch"}})
    assert not [w for w in caught if "constant folding" in str(w.message)]
    graph = hook.program.model.graph
    assert torch.equal(torch.from_numpy(graph.initializers["weight"].const_value.numpy()), model.weight)
    assert "Unsqueeze" not in [node.op_type for node in graph]
    assert [value.name for value in graph.inputs] == ["x"]
    assert [value.name for value in graph.outputs] == ["y", "table"]
    onnx.checker.check_model(onnx.load_from_string(file.getvalue()), full_check=True)
    other = torch.randn(5, 3)
    found = exporter.reference_evaluator(hook.program.model_proto).run(None, {"x": other.numpy()})
    for one, two in zip(found, model(other), strict=True):
        torch.testing.assert_close(torch.tensor(one), two)


def test_bare_exports_fold_as_before_while_a_hook_is_open_elsewhere():
    def bare():
        file = io.BytesIO()
        torch.onnx.export(nn.Sequential(nn.Linear(3, 4)).eval(), (torch.ones(2, 3),), file, dynamo=False)
        return [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]

    alone = bare()
    with exporter.hook(), ThreadPoolExecutor(1) as other:
        assert other.submit(bare).result() == alone


class SameNumbers(nn.Module):
    def forward(self, x):
        return torch.where(x > 0.5, x * 0.5, torch.full_like(x, 0.5)) + x[:, :1], x.new_ones(2)


def test_a_model_with_equal_constants_is_right():
    x = torch.randn(3, 4)
    model = exporter.export(SameNumbers(), (x,), dynamo=False)
    found = exporter.reference_evaluator(model).run(None, {"x": x.numpy()})
    for one, two in zip(found, SameNumbers()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), two)
    file = io.BytesIO()
    with exporter.hook():
        torch.onnx.export(SameNumbers(), (x,), file, dynamo=False)
    assert onnx.load_from_string(file.getvalue()) == model.model_proto


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(nn.functional.pad(x, (1, 1, 1, 1))).clamp(0, 3).clamp(min=0.1)
        return y.flatten(1).unsqueeze(0).squeeze(0).reshape(-1, 4, 5).reshape(-1, 20)[:, 1:].sum(-1, keepdim=True)


@pytest.mark.parametrize("opset", [9, 10, 11, 13, 17, 18])
def test_rewrite_rules_leave_older_opsets_alone(opset):
    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(2, 3, 5, 5)
    proto = exporter.export(model, (x,), dynamo=False, opset_version=opset).model_proto
    onnx.checker.check_model(proto, full_check=True)
    y = exporter.inference_session(proto.SerializeToString()).run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.tensor(y), model(x).detach())


def test_a_constant_that_is_an_output_is_no_warning(caplog):
    """onnx_ir would tell of it; a step with both options has one."""
    exporter.export_training_step(
        nn.Linear(4, 2), (torch.randn(6, 4),), loss=nn.functional.mse_loss, targets=(torch.randn(6, 2),), optimizer="adamw",
        clip_norm=0.3, accumulate=2, dynamic_shapes={"input": {0: "batch"}, "target": {0: "batch"}},
    )  # fmt: skip
    assert not [record for record in caplog.records if "deduplication" in record.getMessage()]
