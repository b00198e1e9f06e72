"""The private names of torch's tracing and of its exporters: a test each, as in test_torch_private.py."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import threading
import warnings

import onnx
import onnx_ir
import pytest
import torch
from torch.torch_version import TorchVersion

from symbolics import torch_private as private
from tests.zoo.functions import Double


def test_tracing_questions():
    answers = {}

    class Asks(torch.nn.Module):
        def forward(self, x):
            answers.update({f.__name__: f() for f in private.tracing_questions()})
            return x + 1

    assert not any(f() for f in private.tracing_questions())
    torch.export.export(Asks(), (torch.ones(1),), strict=False)
    assert answers["is_exporting"] and answers["is_compiling"]
    torch.onnx.export(Asks(), (torch.ones(1),), io.BytesIO(), dynamo=False)
    assert answers["is_tracing"] and answers["is_in_onnx_export"]


def test_tracing_questions_of_c():
    module, names = private.tracing_questions_of_c()
    seen = []
    assert {name: getattr(module, name)() for name in names} == names
    torch.jit.trace(lambda x: seen.append([getattr(module, name)() for name in names]) or x + 1, torch.ones(1), check_trace=False)
    assert all(seen[0])


def test_paused_capture():
    counts = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            counts.append(func)
            return func(*args, **(kwargs or {}))

    def traced(x):
        with private.paused_capture():
            assert not private.is_tracing()
            torch.sin(x.detach())
        assert private.is_tracing()
        return x + 1

    with private.paused_capture():
        assert torch.ones(1).sum() == 1
    graph = torch.jit.trace(traced, (torch.ones(1),), check_trace=False).graph
    assert "aten::sin" not in str(graph)
    assert "aten::add" in str(graph)

    class Sine(torch.nn.Module):
        def forward(self, x):
            with private.paused_capture():
                torch.sin(torch.zeros(1))
            return x + 1

    exported = torch.export.export(Sine(), (torch.ones(1),), strict=False)
    assert "sin" not in str(exported.graph)


def _inside_export(function):
    """Run in the middle of torch.export, with the fake input."""
    seen = {}

    class Probe(torch.nn.Module):
        def forward(self, x):
            seen["result"] = function(x)
            return x + 1

    batch = torch.export.Dim("batch")
    torch.export.export(Probe(), (torch.ones(3, 2),), dynamic_shapes=({0: batch},), strict=False)
    return seen["result"]


def test_detect_fake_mode():
    assert private.detect_fake_mode([torch.ones(1)]) is None
    mode = _inside_export(lambda x: private.detect_fake_mode([x]))
    assert hasattr(mode, "shape_env")
    assert callable(mode.shape_env.create_symintnode)


def test_captures_here():
    def probe(_):
        elsewhere = []
        with private.paused_capture(), private.real_tensors():
            thread = threading.Thread(target=lambda: elsewhere.append((torch.compiler.is_exporting(), private.captures_here())))
            thread.start()
            thread.join()
        return private.captures_here(), *elsewhere

    assert not private.captures_here()
    assert _inside_export(probe) == (True, (True, False))


def test_real_tensors():
    def probe(x):
        with private.paused_capture(), private.real_tensors():
            return type(torch.ones(2)), torch.ones(2).sum().item()

    assert _inside_export(probe) == (torch.Tensor, 2.0)


def test_sizes_watched():
    with private.sizes_watched(None) as asked:
        assert asked == []

    def probe(x):
        with private.sizes_watched(private.detect_fake_mode([x]).shape_env) as asked:
            int(x.shape[0])
        return [str(expression) for expression in asked]

    assert len(_inside_export(probe)) == 1, "int() of a size no longer goes through ShapeEnv.evaluate_expr"


def test_allow_in_dynamo():
    from torch._dynamo import trace_rules

    with private.allow_in_dynamo([Double]):
        assert id(Double) in trace_rules._allowed_callable_ids
        assert trace_rules.is_callable_allowed(Double)
    assert id(Double) not in trace_rules._allowed_callable_ids


def test_add_traced_node():
    op = torch.library.Library("pythonop_test", "FRAGMENT")
    op.define("noted(Tensor x) -> Tensor")
    op.impl("noted", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("pythonop_test::noted", lambda x: torch.empty_like(x), lib=op)

    def translate(x):
        (y,) = private.add_traced_node("", "Neg", [x])
        return y + x  # as torchlib's translations do

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.ops.pythonop_test.noted(x)

    program = torch.onnx.export(
        Model(),
        (torch.ones(2),),
        dynamo=True,
        verbose=False,
        optimize=False,
        custom_translation_table={torch.ops.pythonop_test.noted.default: translate},
    )
    assert [node.op_type for node in program.model.graph] == ["Neg", "Add"]


def _is_called(module, name, export):
    """Whether torch.onnx.export looks a function up in its module at each call."""
    original, seen = getattr(module, name), []

    @functools.wraps(original)
    def noted(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    setattr(module, name, noted)
    try:
        export()
    finally:
        setattr(module, name, original)
    return seen


def test_dynamo_exporter():
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(private.dynamo_exporter(), "export_compat", lambda: torch.onnx.export(model, args, dynamo=True, verbose=False))
    assert seen[0][0][:2] == (model, args)
    parameters = inspect.signature(private.dynamo_exporter().export_compat).parameters
    assert {"f", "optimize", "verify", "custom_translation_table", "external_data", "kwargs"} <= set(parameters)
    assert list(parameters)[:3] == ["model", "args", "f"]


def test_captured_by_dynamo():
    program = torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), dynamo=True, verbose=False)
    assert isinstance(program._capture_strategy, str)
    assert "NonStrict" in program._capture_strategy
    assert private.captured_by_dynamo(program) is False


def test_opsets_of_torchscript(tmp_path):
    opsets = private.opsets_of_torchscript()
    for opset, fits in ((3, False), (opsets[0], True), (opsets[-1], True), (opsets[-1] + 1, False)):
        with contextlib.nullcontext() if fits else pytest.raises(RuntimeError, match="Unsupported"):
            torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), str(tmp_path / "m.onnx"), dynamo=False, opset_version=opset)


def test_torchscript_exporter(tmp_path):
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(
        private.torchscript_exporter(), "export", lambda: torch.onnx.export(model, args, str(tmp_path / "m.onnx"), dynamo=False)
    )
    assert seen[0][0][0] is model
    assert {"kwargs", "training", "do_constant_folding", "keep_initializers_as_inputs", "opset_version"} <= set(
        inspect.signature(private.torchscript_exporter().export).parameters
    )


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


def test_torchscript_has():
    assert private.torchscript_has("aten::hardtanh", 17)
    assert not private.torchscript_has("aten::atanh", 17), "torch has one now: symbolics/quirks/torchscript_gaps.py may lose its own"
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


def test_torchscript_passes_that_infer_the_shape_of_a_node(tmp_path, monkeypatch):
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


def test_torchscript_passes(tmp_path, monkeypatch):
    class Transposes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return x @ self.weight.t()

    passes, results, kinds = private.torchscript_passes(), [], []
    original = passes._jit_pass_onnx_constant_fold

    def without_parameters(graph, parameters, opset):
        results.append(original(graph, {}, opset))
        kinds.extend(node.kind() for node in graph.nodes())
        return parameters

    monkeypatch.setattr(passes, "_jit_pass_onnx_constant_fold", without_parameters)
    torch.onnx.export(Transposes(), (torch.ones(2, 2),), str(tmp_path / "m.onnx"), dynamo=False)
    assert "onnx::Transpose" in kinds, "it folds a parameter that it was not given"
    assert results == [{}], "folded constants no longer stay nodes of the graph: they are new inputs now"


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


def test_unheard():
    heard = []

    class Listens(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Listens():
        with private.unheard():
            assert (x + 1).dtype == x.dtype
        assert not heard
        x + 1
    assert len(heard) == 1


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


def test_is_higher_order():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(private.is_higher_order(func))
            return func(*args, **(kwargs or {}))

    def probe(x):
        with Watch():
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    _inside_export(probe)
    assert {True, False} <= set(seen)


def test_is_tracing():
    seen = []
    torch.jit.trace(lambda x: seen.append(private.is_tracing()) or x + 1, (torch.ones(1),), check_trace=False)
    assert seen[0] is True
    assert private.is_tracing() is False


class LooksAtItsInput(torch.nn.Module):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        self.look(x)
        return x + 1


def test_has_no_value():
    seen = []
    look = LooksAtItsInput(lambda x: seen.extend(private.has_no_value(t) for t in (x, x > 0, torch.tensor(3))))
    torch.export.export(look, (torch.ones(2),), strict=False)
    assert seen[:3] == [True, True, False]
    assert private.has_no_value(torch.ones(2)) is False


def test_is_fake():
    seen = []
    torch.export.export(LooksAtItsInput(lambda x: seen.append(private.is_fake(x))), (torch.ones(2),), strict=False)
    assert seen[0] is True
    assert private.is_fake(torch.ones(2)) is False


def test_traced_producer():
    kinds = []

    def model(x):
        kinds.append(private.traced_producer(torch.sin(x)).kind())
        return x + x.shape[0]

    torch.jit.trace(model, (torch.ones(1),), check_trace=False)
    assert kinds[0] == "aten::sin"


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


def test_translator():
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(
        private.translator(), "_exported_program_to_onnx_program", lambda: torch.onnx.export(model, args, dynamo=True, verbose=False)
    )
    assert isinstance(seen[0][0][0], torch.export.ExportedProgram)


def test_quiet_exporter(caplog):
    def ours(x):
        raise AssertionError

    def theirs(x):
        raise AssertionError

    model, args = torch.nn.ReLU().train(), (torch.ones(2),)
    for function in (ours, theirs):
        function.__annotations__ = {"x": "no type"}
    table = {torch.ops.aten.erfinv.default: ours, torch.ops.aten.erfc.default: theirs}
    told = ["ours", "torchvision is not installed", "requested opset_version 9", "ONNX C API", "in training mode"]
    told += ["LeafSpec"] if TorchVersion(torch.__version__) < "2.15" else []
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")

    def said(*contexts):
        caplog.clear()
        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(caplog.at_level("WARNING"))
            for context in contexts:
                stack.enter_context(context)
            torch.onnx.export(model, args, dynamo=True, verbose=False, custom_translation_table=table, opset_version=9)
            registration.warning("torchvision is not installed. Skipping %s", "torchvision::nms")  # which it says once a process
        texts = "\n".join((caplog.text, *(str(warning.message) for warning in caught)))
        assert "theirs" in texts
        return [text for text in told if text in texts]

    assert said(private.quiet_exporter([ours])) == []
    assert said() == told  # what is not said any more by torch needs no silence


def test_rules_by_operator():
    """The same model from fewer questions; nothing stays behind."""
    from onnxscript import optimizer, rewriter

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Flatten()
    ).eval()
    program = torch.onnx.export(model, (torch.zeros(1, 3, 5, 5),), dynamo=True, optimize=False, verbose=False)
    plain, ours = (onnx_ir.from_proto(program.model_proto) for _ in range(2))
    rules = rewriter._DEFAULT_REWRITE_RULES
    optimizer.optimize(plain)
    with private.rules_by_operator():
        inside = rewriter._DEFAULT_REWRITE_RULES
        assert inside is not rules
        assert len(inside) == len(rules)
        assert sum(rule not in rules for rule in inside) > 30
        with private.rules_by_operator():
            assert rewriter._DEFAULT_REWRITE_RULES is inside
        optimizer.optimize(ours)
    assert rewriter._DEFAULT_REWRITE_RULES is rules
    assert onnx_ir.to_proto(ours) == onnx_ir.to_proto(plain)
    assert [node.op_type for node in ours.graph] != [node.op_type for node in onnx_ir.from_proto(program.model_proto).graph]


@pytest.mark.parametrize("rules", [None, (), (object(),)], ids=["none", "empty", "others"])
def test_rules_by_operator_of_another_onnxscript(rules, monkeypatch):
    from onnxscript import rewriter

    monkeypatch.setattr(rewriter, "_DEFAULT_REWRITE_RULES", rules)
    with private.rules_by_operator():
        assert rewriter._DEFAULT_REWRITE_RULES is rules
