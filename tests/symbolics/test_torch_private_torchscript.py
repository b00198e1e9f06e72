"""The private names of torch.onnx.export(dynamo=False): a test each, as in test_torch_private.py."""

from __future__ import annotations

import contextlib
import io

import onnx
import pytest
import torch

from symbolics import torch_private as private
from tests.zoo.functions import Double


def test_opsets_of_torchscript(tmp_path):
    opsets = private.opsets_of_torchscript()
    for opset, fits in ((3, False), (opsets[0], True), (opsets[-1], True), (opsets[-1] + 1, False)):
        with contextlib.nullcontext() if fits else pytest.raises(RuntimeError, match="Unsupported"):
            torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), str(tmp_path / "m.onnx"), dynamo=False, opset_version=opset)


def test_torchscript_symbolic(tmp_path):
    opset, own = private.torchscript_symbolic("aten::hardtanh")
    assert callable(own)
    assert private.torchscript_symbolic("aten::no_such_operator") is None
    torch.onnx.register_custom_op_symbolic("aten::hardtanh", lambda g, x, low, high: g.op("Relu", x), opset)
    try:
        assert private.torchscript_symbolic("aten::hardtanh") is None, "a user's own goes first"
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::hardtanh", opset)
    assert private.torchscript_symbolic("aten::hardtanh") == (opset, own)


def test_compiled_call():
    class Loop(torch.nn.Module):
        def forward(self, x):
            for _ in range(2):
                x = x.detach() + 1
            return x

    class Calls(torch.nn.Module):
        def forward(self, x):
            return Double.apply(x)

    assert private.compiled_call(torch.jit.script(Loop()), "aten::detach") == "aten::detach"
    assert private.compiled_call(torch.jit.script(Loop()), "prim::PythonOp") == ""
    assert private.compiled_call(torch.jit.trace(Calls(), torch.ones(2)), "prim::PythonOp") == "Double"


def test_torchscript_has():
    assert private.torchscript_has("aten::hardtanh", 17)
    assert not private.torchscript_has("aten::atanh", 17), (
        "torch has one now: symbolics/quirks/pytorch/torchscript_gaps.py may lose its own"
    )
    torch.onnx.register_custom_op_symbolic("aten::atanh", lambda g, x: g.op("Atanh", x), 9)
    try:
        assert private.torchscript_has("aten::atanh", 17)
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::atanh", 9)


def test_torchscript_reshape(tmp_path, monkeypatch):
    helpers, name = private.torchscript_reshape()
    original, shapes = getattr(helpers, name), []

    def reshape(g, x, shape, allowzero=0):
        shapes.append(private.torchscript_shape(shape))
        return original(g, x, shape, allowzero)

    monkeypatch.setattr(helpers, name, reshape)
    model = torch.nn.GroupNorm(2, 4)
    torch.onnx.export(model, (torch.zeros(2, 4, 3),), tmp_path / "model.onnx", dynamo=False)
    assert shapes == [[0, 2, -1], None], "the second is computed"


def test_torchscript_shape(tmp_path):
    assert private.torchscript_shape([2, -1]) == [2, -1]
    assert private.torchscript_shape(torch.tensor([2, -1])) == [2, -1]


def test_torchscript_constant(tmp_path):
    seen = []

    def symbolic(g, x, low, high):
        seen.extend(private.torchscript_constant(value) for value in (low, high, x))
        return g.op("Relu", x)

    torch.onnx.register_custom_op_symbolic("aten::hardtanh", symbolic, 18)
    try:
        model = torch.nn.Hardtanh(-2.0, 0.5)
        torch.onnx.export(model, (torch.ones(2, dtype=torch.float64),), str(tmp_path / "m.onnx"), dynamo=False, opset_version=18)
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::hardtanh", 18)
    assert seen == [-2.0, 0.5, None]


def test_torchscript_passes(tmp_path, monkeypatch):
    passes, seen = private.torchscript_passes(), []

    def nothing(node, *args):
        if node.kind() == "onnx::Reshape":
            seen.append(node.inputsAt(0).type().sizes())

    monkeypatch.setattr(passes, "_jit_pass_onnx_node_shape_type_inference", nothing)
    torch.onnx.export(Reshapes(), (torch.ones(3, 2),), str(tmp_path / "m.onnx"), dynamo=False)
    assert [3, 2] in seen


class Reshapes(torch.nn.Module):
    def forward(self, x):
        return x.reshape(3, 2, 1) * 2


def test_shape_inference_of_graphs(tmp_path, monkeypatch):
    passes, files = private.torchscript_passes(), {}
    original = passes._jit_pass_onnx_graph_shape_type_inference
    for infers in (True, False):
        seen = []
        monkeypatch.setattr(
            passes,
            "_jit_pass_onnx_graph_shape_type_inference",
            lambda *args, i=infers, s=seen: s.append(1) or (original(*args) if i else None),
        )
        path = tmp_path / "m.onnx"
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Unflatten(1, (2, 2)), torch.nn.Flatten(0))
        torch.manual_seed(0)
        torch.onnx.export(model, (torch.ones(2, 3),), str(path), dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}})
        files[infers] = onnx.load(path).graph.output
        assert seen == [1, 1], "torch no longer infers the shapes of the graph twice"
    assert files[True] == files[False], "shapes of outputs are no longer known from the nodes alone"


def test_has_bodies(monkeypatch):
    passes, seen = private.torchscript_passes(), []
    original = passes._jit_pass_onnx_graph_shape_type_inference
    monkeypatch.setattr(
        passes,
        "_jit_pass_onnx_graph_shape_type_inference",
        lambda graph, *args: seen.append(private.has_bodies(graph)) or original(graph, *args),
    )

    @torch.jit.script
    def looped(x, n: int):
        for _ in range(n):
            if bool(x.sum() > 0):
                x = x - 1
        return x

    class Loops(torch.nn.Module):
        def forward(self, x):
            return looped(x, x.shape[0])

    for model in (Loops(), torch.nn.ReLU()):
        torch.onnx.export(model, (torch.ones(2),), io.BytesIO(), dynamo=False, input_names=["x"], dynamic_axes={"x": [0]})
    assert seen == [True, True, False, False]


def test_is_tracing():
    seen = []
    torch.jit.trace(lambda x: seen.append(private.is_tracing()) or x + 1, (torch.ones(1),), check_trace=False)
    assert seen[0] is True
    assert private.is_tracing() is False


def test_traced_producer():
    kinds = []

    def model(x):
        kinds.append(private.traced_producer(torch.sin(x)).kind())
        return x + x.shape[0]

    torch.jit.trace(model, (torch.ones(1),), check_trace=False)
    assert kinds[0] == "aten::sin"


def test_sizes_behind():
    found = []

    def model(x):
        found.append(
            [private.sizes_behind(value) for value in (x.shape[1] * 2 > 5, x.shape[0] + x.shape[1], x.sum(), x.sum() > x.shape[0])]
        )
        return x + 1

    torch.jit.trace(model, (torch.ones(2, 3),), check_trace=False)
    assert found == [[{3}, {2, 3}, set(), set()]]
    assert private.sizes_behind(torch.tensor(1)) == set()


def test_comes_of_sizes():
    found = []

    def forward(x):
        size = x.shape[0]
        found.append([private.comes_of_sizes(each) for each in (size == 2, torch.as_tensor(size * 3), x.sum() > 0, x.shape[0] + x.sum())])
        return x + 1

    torch.jit.trace(forward, (torch.ones(2, 3),), check_trace=False)
    assert found == [[True, True, False, False]]
    assert not private.comes_of_sizes(torch.tensor(1))


def test_sized_by_values():
    found = []

    def model(x):
        found_again = x[torch.arange(2)]  # the table that it takes from is reached by another way first
        rows = (torch.nonzero(x), x[x > 1], x[:, [0]], x, torch.nonzero(x).float().exp()[:, 0], torch.unique(x), x * found_again)
        found.append([private.sized_by_values(value.shape[0] * 2) for value in rows])
        return x + 1

    torch.jit.trace(model, (torch.ones(2, 3),), check_trace=False)
    assert found == [[True, True, False, False, True, True, False]]


def test_replace_traced():
    def model(x):
        sine, cosine = torch.sin(x), torch.cos(x)
        private.replace_traced(cosine, sine)
        return cosine + 0

    graph = torch.jit.trace(model, (torch.ones(1),), check_trace=False).graph
    added = next(graph.findNode("aten::add").inputs()).node().kind()
    assert added == "aten::sin"


def test_overwrite_traced():
    seen = []

    def model(x):
        kept = torch.zeros(2, 3)
        seen.append(private.overwrite_traced(kept, torch.sin(x)))
        return kept + 1

    graph = torch.jit.trace(model, (torch.ones(3),), check_trace=False).graph
    assert "aten::sin" in str(graph)
    assert "copy_" not in str(graph)
    torch.testing.assert_close(seen[0], torch.ones(2, 3).sin())


def test_tensor_type():
    def model(x):
        y = torch.sin(x)
        private.traced_producer(y).output().setType(private.tensor_type(torch.int64, [None, None]))
        return y

    graph = torch.jit.trace(model, (torch.ones(1),), check_trace=False).graph
    assert "sin" in str(graph)
    assert private.tensor_type(torch.float16, [None, 3]).dtype() == torch.float16
    assert private.tensor_type(torch.float16, [None, 3]).dim() == 2
    assert private.tensor_type(torch.float16, [2, 3]).sizes() == [2, 3]
