"""The optimizer of the TorchScript path: what it leaves out finds nothing there, and what it merges is equal."""

from __future__ import annotations

import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
import pytest
import torch
from torch import nn

import exporter
from exporter.forward.draft import constants_to_initializers, read_draft
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


def constants(text):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}').graph


def test_equal_constants_merge_before_they_are_nodes():
    text = (
        "g (float[2] x) => (float[2] y) { a = Constant <value = float[1] {2}> () b = Constant <value = float[1] {2}> () "
        "c = Constant <value = double[1] {2}> () d = Cast <to = 1> (c) e = Mul(x, a) f = Mul(e, b) y = Mul(f, d) }"
    )
    for merge, count in ((True, 2), (False, 3)):
        graph = constants(text)
        constants_to_initializers(graph, merge)
        assert len(graph.initializer) == count
        assert [node.op_type for node in graph.node] == ["Cast", "Mul", "Mul", "Mul"]
        assert {name for node in graph.node for name in node.input} <= {t.name for t in graph.initializer} | {"x", "d", "e", "f"}


def test_constants_that_are_outputs_or_read_in_bodies_keep_their_names():
    graph = constants(
        "g (float[1] x) => (float[1] a, float[1] b) { a = Constant <value = float[1] {2}> () b = Constant <value = float[1] {2}> () }"
    )
    constants_to_initializers(graph, True)
    assert {tensor.name for tensor in graph.initializer} == {"a", "b"}


def test_equal_nodes_merge_before_they_are_nodes():
    graph = constants(
        "g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) b = Neg(x) c = Exp(a) d = Exp(b) e = Add(c, d) y = Abs(e) z = Abs(e) }"
    )
    constants_to_initializers(graph, True)
    assert [node.op_type for node in graph.node] == ["Neg", "Exp", "Add", "Abs", "Abs"]
    assert list(graph.node[2].input) == ["c", "c"]
    assert [graph.node[3].output[0], graph.node[4].output[0]] == ["y", "z"]


@pytest.mark.parametrize(
    "pair",
    ["a = RandomNormalLike(x) b = RandomNormalLike(x)", "a = other.Op(x) b = other.Op(x)", "a = Elu<alpha=0.5>(x) b = Elu<alpha=0.25>(x)"],
)
def test_nodes_that_may_differ_do_not_merge(pair):
    graph = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "other": 1]> g (float[2] x) => (float[2] y) {{ {pair} y = Add(a, b) }}'
    ).graph
    constants_to_initializers(graph, True)
    assert len(graph.node) == 3


def test_casts_to_the_same_type_go():
    model = parsed("g (float[2] x) => (float[2] y, float[2] z) { a = Cast<to = 1>(x) y = Relu(a) z = Cast<to = 1>(x) }")
    fold(model)
    relu = next(node for node in model.graph if node.op_type == "Relu")
    assert relu.inputs[0].name == "x"
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("g (float[2, 3] x) => (int64[2] y) { s = Shape(x) y = Neg(s) }", []),
        ("g (float[2, n] x) => (int64 y) { s = Shape(x) y = Gather(s, one) }", ["Shape", "Gather"]),
        ("g (float[2, n] x) => (float[2, n] y) { a = Neg(x) s = Shape(x) y = Reshape(a, s) }", None),
        ("g (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) y = Reshape(a, both) }", None),
        ("g (float[2, n] x) => (float y) { s = Size(x) f = Cast<to = 1>(s) m = ReduceSum<keepdims = 0>(x) y = Div(m, f) }", None),
        ("g (float[2, n] x) => (float[2, n] y) { y = Concat<axis = 0>(x) }", None),
        ("g (float[2] x) => (float[2] y) { a = Add(both, both) f = Cast<to = 1>(a) y = Add(x, f) }", None),
    ],
)
def test_what_is_left_to_fold_is_seen(text, left):
    """With the short way, or with onnxscript's whole pass: the same nodes are left."""
    head, body = text.split("{", 1)
    text = f"{head} <int64 one = {{1}}, int64[2] both = {{2, 3}}> {{{body}"
    model, whole = parsed(text), parsed(text)
    onnxscript.optimizer.fold_constants(whole, onnx_shape_inference=False)
    passes.RemoveUnusedNodesPass()(whole)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(whole)
    fold(model)
    assert sorted(set(kinds(model)) - {"Identity"}) == sorted(set(kinds(whole)) - {"Identity"})
    if left is not None:
        assert kinds(model) == left


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


def test_a_draft_is_read_as_onnx_ir_reads_it():
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x, bool c) => (float[k, 2] y) {
        a = Neg(x) b = Abs(x) s = SequenceConstruct(a, b) t = SequenceConstruct(b) w = ConcatFromSequence<axis = 0>(s) size = Shape(w) p = SequenceAt(t, size)
        q = If(c) <then_branch = then () => (float[n, 2] u) { u = Neg(b) }, else_branch = other () => (float[n, 2] v) { v0 = Abs(b) v = Neg(v0) }>
        y = Add(w, q)
    }""")
    proto = onnx.shape_inference.infer_shapes(proto)
    assert {"a", "s", "size"} <= {info.name for info in proto.graph.value_info}
    expected = ir.to_proto(ir.from_proto(proto))
    model = read_draft(proto)
    assert ir.to_proto(model) == expected
    first, second = (node.outputs[0] for node in list(model.graph)[:2])
    first.shape[1] = 5
    first.dtype = ir.DataType.DOUBLE
    assert (second.shape[1], second.dtype) == (2, ir.DataType.FLOAT)
