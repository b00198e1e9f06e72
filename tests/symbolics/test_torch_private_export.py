"""The private names of torch's tracing and of its exporters: a test each, as in test_torch_private.py."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import io
import logging
import math
import sys
import threading
import types
import warnings

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


def test_put_builtins():
    own, mine = (max, min, math.pow, math.sqrt), tuple(functools.partial(function) for function in (max, min, math.pow, math.sqrt))
    with private.put_builtins(*mine):
        assert (builtins.max, builtins.min, math.pow, math.sqrt) == mine
    assert (builtins.max, builtins.min, math.pow, math.sqrt) == own


def test_standing_for_builtins():
    own = (max, min, math.pow, math.sqrt)
    mine = tuple(functools.partial(function) for function in own)

    def now():
        return builtins.max, builtins.min, math.pow, math.sqrt

    def probe(x):
        with private.own_builtins():
            inside = now()
        return now(), inside

    with private.standing_for_builtins(*mine):
        assert _inside_export(probe) == (mine, own)
        assert now() == own
        one, two = contextlib.ExitStack(), contextlib.ExitStack()
        for stack in (one, two):  # as two threads that export
            stack.enter_context(torch.export._trace._override_builtin_ops())
        one.close()
        assert now() == mine
        two.close()
    assert now() == own


def test_own_builtins():
    with private.own_builtins():
        assert (max(1, 2), min(1, 2), math.pow(2, 3), math.sqrt(4)) == (2, 1, 8.0, 2.0)


def test_sizes_watched():
    with private.sizes_watched(None) as asked:
        assert asked == []

    def probe(x):
        with private.sizes_watched(private.detect_fake_mode([x]).shape_env) as asked:
            int(x.shape[0])
        return [str(expression) for expression in asked]

    assert len(_inside_export(probe)) == 1, "int() of a size no longer goes through ShapeEnv.evaluate_expr"


def test_answers_of_sizes_watched():
    asked = []

    def probe(x):
        with private.answers_of_sizes_watched(lambda frame, _, answer: asked.append((frame.f_code.co_name, answer))):
            return bool(x.shape[0] > 2), bool(x.shape[0] >= 1), [0, 1, 2, 3][x.shape[0] % 4], int(x.shape[0] % 3), float(x.shape[0] / 2)

    methods = [(torch.SymBool, "__bool__"), (torch.SymInt, "__int__"), (torch.SymInt, "__index__"), (torch.SymFloat, "__float__")]
    originals = [getattr(kind, name) for kind, name in methods]
    with pytest.raises(Exception, match="Constraints violated"):  # what torch.onnx.export asks torch.export to leave out
        _inside_export(probe)
    assert {name for name, _ in asked} == {"probe"} and [type(answer) for _, answer in asked] == [bool, int, int, float], (
        "torch.export no longer assumes what a branch on a size, or a number made of it, assumes"
    )
    assert [getattr(kind, name) for kind, name in methods] == originals


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


def test_torchscript_exporter(tmp_path):
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(
        private.torchscript_exporter(), "export", lambda: torch.onnx.export(model, args, str(tmp_path / "m.onnx"), dynamo=False)
    )
    assert seen[0][0][0] is model
    assert {"kwargs", "training", "do_constant_folding", "keep_initializers_as_inputs", "opset_version"} <= set(
        inspect.signature(private.torchscript_exporter().export).parameters
    )


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


def test_is_of_a_capture():
    seen = []
    torch.export.export(LooksAtItsInput(lambda x: seen.extend([x, x.detach()])), (torch.ones(2),), strict=False)
    assert all(map(private.is_of_a_capture, seen)) and not private.is_of_a_capture(torch.ones(2))
    wrapped = torch._to_functional_tensor(torch.ones(2))
    assert private.is_of_a_capture(wrapped)


def test_is_fake():
    seen = []
    torch.export.export(LooksAtItsInput(lambda x: seen.append(private.is_fake(x))), (torch.ones(2),), strict=False)
    assert seen[0] is True
    assert private.is_fake(torch.ones(2)) is False


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

    class Both(torch.nn.Module):
        def forward(self, x, y):
            return x + y

    model, args = torch.nn.ReLU().train(), (torch.ones(2),)
    for function in (ours, theirs):
        function.__annotations__ = {"x": "no type"}
    table = {torch.ops.aten.erfinv.default: ours, torch.ops.aten.erfc.default: theirs}
    told = ["ours", "torchvision is not installed", "requested opset_version 9", "ONNX C API", "in training mode"]
    told += ["The axis name: rows will not be used"]
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
            torch.onnx.export(Both(), (args[0], args[0]), dynamo=True, verbose=False, dynamic_shapes=({0: "rows"}, {0: "rows"}))
            registration.warning("torchvision is not installed. Skipping %s", "torchvision::nms")  # which it says once a process
        texts = "\n".join((caplog.text, *(str(warning.message) for warning in caught)))
        assert "theirs" in texts
        return [text for text in told if text in texts]

    assert said(private.quiet_exporter([ours])) == []
    assert said() == told  # what is not said any more by torch needs no silence


def test_quiet_torchscript(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.rnn = torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 2, batch_first=True)

        def forward(self, x):
            return self.rnn(self.norm(x)[:, None])[0]

    told = [
        "You are using the legacy",
        "The feature will be removed",
        "ONNX Preprocess - Removing mutation",
        "Exporting a model to ONNX with a batch",
    ]

    def said(context):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with context:
                file, training = str(tmp_path / "x.onnx"), torch.onnx.TrainingMode.TRAINING
                torch.onnx.export(Net().train(), (torch.ones(2, 3),), file, dynamo=False, training=training, do_constant_folding=False)
        return [text for text in told if any(str(warning.message).startswith(text) for warning in caught)]

    assert said(private.quiet_torchscript()) == []
    assert said(contextlib.nullcontext()) == told  # what is not said any more by torch needs no silence


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


def test_draws_not_folded():
    from onnxscript.optimizer import _constant_folding

    before = _constant_folding._NON_DETERMINISTIC_OPS
    assert "RandomUniform" in before
    with private.draws_not_folded(["Dropout"]):
        inside = _constant_folding._NON_DETERMINISTIC_OPS
        assert inside == before | {"Dropout"}
        with private.draws_not_folded(["Dropout"]):
            assert _constant_folding._NON_DETERMINISTIC_OPS is inside
    assert _constant_folding._NON_DETERMINISTIC_OPS is before


def test_draws_not_folded_of_another_onnxscript(monkeypatch):
    from onnxscript.optimizer import _constant_folding

    monkeypatch.delattr(_constant_folding, "_NON_DETERMINISTIC_OPS")
    with private.draws_not_folded(["Dropout"]):
        assert not hasattr(_constant_folding, "_NON_DETERMINISTIC_OPS")


def test_standing_for_len():
    here, other = sys.modules[__name__], types.ModuleType("other")
    other.len = own = functools.partial(len)
    mine = functools.partial(len)
    with private.standing_for_len(mine, [here, other]):
        assert vars(here)["len"] is mine
        assert other.len is own
        with private.standing_for_len(mine, [here]), private.own_builtins():
            assert "len" not in vars(here)
        assert vars(here)["len"] is mine
    assert "len" not in vars(here)
    assert other.len is own


def test_given_data():
    class Gives(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.data = self.weight.data * 2
            return super().forward(x)

    program = torch.export.export(Gives(2, 2), (torch.zeros(1, 2),), strict=True)
    assert private.given_data(program) == ["weight"]
    assert private.given_data(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))) == []


def test_invented_complex_nodes():
    class Model(torch.nn.Module):
        def forward(self, x):
            z = torch.view_as_complex(x)
            return torch.view_as_real(z * torch.ones(3, dtype=z.dtype) * 2 + torch.polar(x[:, 0], x[:, 1]))

    program = torch.export.export(Model(), (torch.randn(3, 2),), strict=False)
    assert [node.operator for node in private.invented_complex_nodes(program)] == ["aten::ones"]
