"""A call of Function.apply is caught on every torch, or the hook does not open; eager's own graph says what a file must hold."""

from __future__ import annotations

import functools
import linecache
import random
import sys
import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.compiler import is_exporting

import exporter
import exporter.forward.hook
import symbolics.capture.recorder
import symbolics.capture.tripwire
from symbolics.capture.disguise import as_in_eager
from symbolics.errors import ExportError, PythonopWarning
from symbolics.node.attributes import read_attributes, values_of
from tests.support import Calls, nodes
from tests.zoo.steep import Call, Outer, Overridden, Steep, SteepSetup, gradients, made_per_call, steep, steep_setup

UNDEFINED = torch.autograd.Function.setup_context


def looked_up_before(x):
    """Python's own look at a class is answered with the truth, also while calls are caught."""
    assert Steep.setup_context is UNDEFINED and SteepSetup.setup_context is not UNDEFINED
    getattr(Steep, "setup_context")  # noqa: B009  (not told from C's look-up: it must not disturb the next call)
    return Steep.apply(x)


CALLS = {
    "late": lambda x: Steep.apply(x),
    "early": lambda x: steep(x),
    "keyword": lambda x: Steep.apply(x, k=3.0),
    "early keyword": lambda x: steep(x, k=3.0),
    "setup_context": lambda x: SteepSetup.apply(x),
    "early setup_context": lambda x: steep_setup(x, k=3.0),
    "override": lambda x: Overridden.apply(x, 3.0),
    "map": lambda x: sum(map(steep, (x,))),
    "partial": lambda x: functools.partial(Steep.apply, k=3.0)(x),
    "starred": lambda x: Steep.apply(*(x,), k=3.0),
    "nested": lambda x: Outer.apply(x),
    "made per call": made_per_call,
    "looked up before": looked_up_before,
}


def assert_kept(program, model, x, name="Steep", module=Steep.__module__):
    """The one call of a Function is in the file, and outputs and gradients of the loaded file are eager's."""
    assert [read_attributes(values_of(node)).name for node in nodes(program.model, "PythonOp")] == [f"{module}:{name}"]
    y, grads = gradients(model, x)
    z, others = gradients(exporter.load(program, allow=[f"{module}:*"]), x)
    torch.testing.assert_close([y, *grads], [z, *others])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_way_to_call(call, dynamo):
    model, x = Call(call), torch.randn(3, 4)
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert len(nodes(program.model, "PythonOp")) == 1
    name = read_attributes(values_of(nodes(program.model, "PythonOp")[0])).name
    if name == f"{Steep.__module__}:Made":
        return  # its class is gone: a file can only be run where it is registered
    assert_kept(program, model, x, name.partition(":")[2])


def test_what_goes_by_is_untouched():
    """Calls outside of an export, under torch.func and by Python's own look at a class are as if no hook were open."""
    with exporter.hook():
        assert SteepSetup.setup_context is not Steep.setup_context is torch.autograd.Function.setup_context
        x = torch.ones(2, requires_grad=True)
        steep(x, k=4.0).sum().backward()
        assert x.grad.tolist() == [12, 12]
        assert torch.func.grad(lambda x: steep_setup(x).sum())(torch.ones(2)).tolist() == [10, 10]
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: steep(x).sum())(torch.ones(2))
        with pytest.raises(TypeError):
            steep_setup(x, 1, 2, 3)


def test_a_failing_call_leaves_nothing_behind(dynamo):
    def fails(x):
        return SteepSetup.apply(x, 1, 2, 3)

    for _ in range(2):
        with pytest.raises(Exception, match="too many positional arguments|fit the signature"):
            exporter.export(Call(fails), (torch.randn(3, 4),), dynamo=dynamo)
    assert not torch._C._are_functorch_transforms_active()
    assert len(nodes(exporter.export(Call(CALLS["late"]), (torch.randn(3, 4),), dynamo=dynamo).model, "PythonOp")) == 1


# ------------------------------------------------------------------------------------------------------- tripwire


def test_a_capture_that_sees_nothing_is_an_error(monkeypatch, dynamo):
    monkeypatch.setattr(exporter.forward.hook, "intercept", lambda stand_in, wanted: lambda: None)
    for opens in (
        lambda: exporter.hook().__enter__(),
        exporter.install,
        lambda: exporter.export(Call(steep), (torch.randn(3, 4),), dynamo=dynamo),
    ):
        with pytest.raises(ExportError) as caught:
            opens()
        assert torch.__version__ in str(caught.value) and "way out" in str(caught.value) and len(str(caught.value).splitlines()) <= 6
    assert symbolics.capture.recorder.active_recorder() is None


def test_a_capture_that_misses_early_bound_calls_is_an_error(monkeypatch):
    original = exporter.forward.hook.intercept

    def late_alone(stand_in, wanted):
        return original(stand_in, lambda: wanted() and not stands_at_the_early_probe(sys._getframe()))

    def stands_at_the_early_probe(frame):
        while frame.f_code is not symbolics.capture.tripwire.prove_capture.__code__:
            frame = frame.f_back
        return "_early(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)

    monkeypatch.setattr(exporter.forward.hook, "intercept", late_alone)
    with pytest.raises(ExportError, match=r"written as f = MyFn.apply; f\(x\) goes past"):
        exporter.hook().__enter__()


def test_a_torch_without_the_names_is_an_error(monkeypatch):
    def moved(stand_in, wanted):
        raise AttributeError("module 'torch.autograd.function' has no attribute '_bind_default_args'")

    monkeypatch.setattr(exporter.forward.hook, "intercept", moved)
    with pytest.raises(ExportError, match="cannot be caught on torch .*_bind_default_args"):
        exporter.hook().__enter__()


# -------------------------------------------------------------------------------------------- eager's graph judges


def tells_c(x):
    return torch.round(x) * 2 if torch._C._get_tracing_state() else Steep.apply(x)


def tells_public(x):
    return torch.round(x) * 2 if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export() or is_exporting() else Steep.apply(x)


@pytest.mark.parametrize("function", [tells_c, tells_public])
def test_a_library_that_asks_whether_it_is_traced(function, dynamo):
    model, x = Call(function), torch.randn(3, 4)
    assert_kept(exporter.export(model, (x,), dynamo=dynamo), model, x)
    assert torch._C._get_tracing_state() is None and type(torch._C._get_tracing_state).__name__ == "builtin_function_or_method"
    assert not is_exporting() and is_exporting.__code__.co_filename.endswith("compiler/__init__.py")


def test_only_a_model_that_needs_it_is_disguised(dynamo):
    asked = []

    def asks(x):
        asked.append(torch.jit.is_tracing() or is_exporting())
        return Steep.apply(x)

    exporter.export(Call(asks), (torch.randn(3, 4),), dynamo=dynamo)
    assert any(asked), "the truth was not told"


def test_torch_itself_is_told_the_truth():
    with as_in_eager():
        answers = []
        torch.jit.trace(
            lambda x: answers.append((torch.jit.is_tracing(), torch._C._is_tracing())) or x + 1, torch.ones(1), check_trace=False
        )
        scope = dict(vars(torch.nn.functional))
        exec("def ask(): return torch._C._is_tracing(), torch.jit.is_tracing()", scope)
        torch.jit.trace(lambda x: answers.append(scope["ask"]()) or x + 1, torch.ones(1), check_trace=False)
    assert answers == [(False, False), (True, True)]


@pytest.fixture
def operator():
    library = torch.library.Library("capture_tests", "DEF")
    library.define("steep(Tensor x) -> Tensor")
    library.impl("steep", lambda x: torch.round(x) * 2, "CPU")
    library.impl("steep", lambda x: torch.empty_like(x), "Meta")
    library.impl("steep", lambda x: Steep.apply(x), "Autograd")
    yield torch.ops.capture_tests.steep
    library._destroy()


def test_an_operator_with_a_translation_is_inlined_by_choice(operator):
    def steep(g, x):
        return g.op("Mul", g.op("Round", x), g.op("Constant", value_t=torch.tensor(2.0)))

    torch.onnx.register_custom_op_symbolic("capture_tests::steep", steep, 18)
    try:
        with pytest.warns(PythonopWarning, match="Steep is called inside the operator capture_tests::steep, for which"):
            program = exporter.export(Call(operator), (torch.randn(3, 4),), dynamo=False, opset_version=18)
    finally:
        torch.onnx.unregister_custom_op_symbolic("capture_tests::steep", 18)
    assert nodes(program.model, "Round") and "translation of the user's own" in program.inlined[f"{Steep.__module__}:Steep"]


def went_around(x):
    """Calls the Function in eager mode alone, whatever it is told."""
    stack, frame = [], sys._getframe()
    while frame is not None:
        stack.append(frame.f_code.co_name)
        frame = frame.f_back
    return Steep.apply(x) if "of" in stack else torch.round(x) * 2


@pytest.mark.slow
def test_what_cannot_be_mended_is_refused_by_name(dynamo, tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), Call(went_around)), torch.randn(3, 4)
    with pytest.raises(ExportError) as caught:
        exporter.export(model, (x,), dynamo=dynamo)
    said = str(caught.value)
    for part in (f"{Steep.__module__}:Steep", "module 1", f"{__name__}:", "eager makes 1 call", "way out", "eager_check=False", "inline="):
        assert part in said
    assert len(said.splitlines()) <= 6
    with pytest.raises(ExportError, match="eager makes 1 call"), exporter.hook():
        torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=dynamo)
    assert not list(tmp_path.iterdir()), "something was written"
    assert not nodes(exporter.export(model, (x,), dynamo=dynamo, inline=[Steep]).model, "PythonOp")


def test_the_check_can_be_switched_off_and_the_file_says_so(dynamo, tmp_path):
    model, x = Call(went_around), torch.randn(3, 4)
    program = exporter.export(model, (x,), dynamo=dynamo, eager_check=False)
    program.save(tmp_path / "m.onnx")
    assert ir.load(tmp_path / "m.onnx").metadata_props["pythonop.unchecked"] == "eager_check=False"
    with exporter.hook(eager_check=False) as handle:
        torch.onnx.export(model, (x,), dynamo=dynamo, **({} if dynamo else {"f": None}))
    assert handle.program.model.metadata_props["pythonop.unchecked"] == "eager_check=False"
    assert "pythonop.unchecked" not in exporter.export(Call(steep), (x,), dynamo=dynamo).model.metadata_props


def test_a_model_that_only_an_exporter_can_run_is_not_compared(dynamo):
    def only_exported(x):
        if not (torch.jit.is_tracing() or is_exporting()):
            raise RuntimeError("not in eager" + " whatever" * 30)
        return Steep.apply(x)

    model, x = Call(only_exported), torch.randn(3, 4)
    with pytest.warns(
        PythonopWarning,
        match=r"could not be compared with those of eager mode: an eager run raised RuntimeError: not in eager( whatever)+ …\.",
    ):
        found = exporter.export(model, (x,), dynamo=dynamo).model
    assert len(nodes(found, "PythonOp")) == 1 and "RuntimeError: not in eager" in found.metadata_props["pythonop.unchecked"]
    assert exporter.export(model, (x,), dynamo=dynamo, eager_check=False).model.metadata_props["pythonop.unchecked"] == "eager_check=False"


def test_a_branch_that_only_a_compilation_can_run_is_compared():
    """torch.cond compiles what its branches close over; what watches the eager run must not keep it from that, then or later."""
    import torch._dynamo  # where torch has it, torch.compile is told to stand aside

    weight = nn.Parameter(torch.tensor(2.0))
    model, x = Calls(lambda x: torch.cond(x.sum() > 0, lambda y: y * weight, lambda y: y - weight, (Steep.apply(x),))), torch.ones(3)
    model.weight = weight
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        found = exporter.export(model, (x,), dynamo=True).model
    assert len(nodes(found, "PythonOp")) == 1 and "pythonop.unchecked" not in found.metadata_props
    assert model(x).shape == (3,)


def test_a_run_that_fails_because_somebody_looks_is_no_fault_of_the_model():
    from exporter.forward.eager_graph import EagerGraph

    def suspicious(x):
        if x.requires_grad:
            raise AssertionError("somebody looks")
        return x * 2

    graph = EagerGraph.of(Calls(suspicious), (torch.randn(3),), {})
    assert graph.failed and graph.unchecked == "an eager run raised AssertionError: somebody looks"


def test_functions_of_torchs_own_packages(dynamo):
    """torch.nn's CrossMapLRN2d is an autograd Function with a backward of its own."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.CrossMapLRN2d(3)), torch.randn(2, 3, 4, 4)
    assert_kept(exporter.export(model, (x,), dynamo=dynamo), model, x, "CrossMapLRN2d", "torch.nn.modules._functions")


class Remembers(nn.Module):
    """Changes whatever an eager run may change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.seen, self.memory = 0, [], torch.zeros(4)

    def forward(self, x, cache=None):
        self.calls += 1
        self.seen.append(1)
        self.count += 1
        self.memory.add_(1)
        self.new = x
        random.random(), np.random.rand(), torch.rand(1)
        if cache is not None:
            cache["calls"] = cache.get("calls", 0) + 1
        return Steep.apply(self.norm(x))


def test_the_eager_run_leaves_no_trace(dynamo):
    from exporter.forward.eager_graph import EagerGraph

    model, cache, x = Remembers(), {}, torch.randn(3, 4)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    eager = EagerGraph.of(model, (x,), {"cache": cache})
    assert not eager.unchecked and {f.__name__: len(calls) for f, calls in eager.calls.items()} == {"Steep": 1}
    assert (model.calls, model.seen, cache, model.memory.tolist(), hasattr(model, "new")) == (0, [], {}, [0, 0, 0, 0], False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (
        states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state()) and states[2] == np.random.get_state()[1].tolist()
    )


def test_calls_without_a_gradient_are_not_asked_for(dynamo):
    def partly(x):
        with torch.no_grad():
            y = Steep.apply(x)
        return x + y, Steep.apply(x.detach())

    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(Call(partly), (torch.randn(3, 4),), dynamo=dynamo)
    assert len(nodes(program.model, "PythonOp")) == 2


def test_a_training_step_is_judged_by_its_loss(dynamo):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            return g

    def loss(y):
        return y.sum() if torch.jit.is_tracing() or is_exporting() else Loss.apply(y)

    exporter.register(Loss, "capture-tests-loss")
    try:
        step = exporter.export_training_step(nn.Linear(4, 4), (torch.randn(3, 4),), loss=loss, optimizer="sgd", dynamo=dynamo)
    finally:
        exporter.files.trust.unregister("capture-tests-loss")
    assert len(nodes(step.model, "PythonOpGrad")) == 1
