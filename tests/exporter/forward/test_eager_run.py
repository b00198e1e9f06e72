"""The eager run that judges an export: it changes nothing, it is not fooled, and it blames nobody without a reason."""

from __future__ import annotations

import abc
import random
import threading
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.compiler import is_exporting
from torch.nn.utils import parametrize

import exporter
from exporter.forward.eager_graph import EagerGraph
from exporter.forward.unchanged import unchanged
from symbolics import torch_private as private
from symbolics.capture.interception import intercept, is_method_of_c, settled
from symbolics.errors import ExportError, PythonopWarning
from tests.support import nodes
from tests.zoo.steep import Call, Steep, SteepSetup, gradients, steep

ALLOW = ["tests.*:*"]


def traced():
    return torch.jit.is_tracing() or is_exporting()


# ------------------------------------------------------------------------------------------------- it is not fooled


def detached_statistic(x):
    scale = Steep.apply(x).detach().abs().max() + 1
    return (torch.round(x) * 2 if traced() else Steep.apply(x)) / scale


def spike(x):
    return Steep.apply(x)


def detached_on_the_same_line(x):
    scale = spike(x).detach().abs().max() + 1
    return (torch.round(x) * 2 if traced() else spike(x)) / scale


def unused_call(x):
    Steep.apply(x)
    return torch.round(x) * 2 if traced() else Steep.apply(x)


def other_call_in_a_checkpoint(x):
    y = torch.utils.checkpoint.checkpoint(Steep.apply, x, use_reentrant=True)
    return y + (torch.round(x) * 2 if traced() else Steep.apply(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [detached_statistic, detached_on_the_same_line, unused_call, other_call_in_a_checkpoint])
def test_a_call_that_no_gradient_flows_through_stands_for_no_other(function, dynamo):
    """One call that is in the file does not hide another that is not: it is exported as in eager."""
    model, x = Call(function), torch.randn(3, 4)
    program = exporter.export(model, (x,), dynamo=dynamo)
    _, others = gradients(exporter.load(program, allow=ALLOW), x)
    if function is not other_call_in_a_checkpoint:  # inlined, which is what its notice says
        torch.testing.assert_close(gradients(model, x)[1], others)
    assert len(nodes(program.model, "PythonOp")) == 2


def test_a_file_made_in_disguise_says_so(dynamo):
    with pytest.warns(PythonopWarning, match="told that it runs in eager mode"):
        exporter.export(Call(lambda x: torch.round(x) * 2 if traced() else Steep.apply(x)), (torch.randn(3, 4),), dynamo=dynamo)


class Masked(nn.Module):
    """Asks for its Function and, elsewhere, for its mask."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask):
        y = self.spike(self.linear(x))
        return y if self.skips(mask) else y * mask

    def spike(self, y):
        return torch.round(y) * 2 if traced() else Steep.apply(y)

    def skips(self, mask):
        return not traced() and bool(mask.all())


class MaskedAtOnce(Masked):
    def forward(self, x, mask):
        tracing, y = traced(), self.linear(x)
        y = torch.round(y) * 2 if tracing else Steep.apply(y)
        return y if not tracing and bool(mask.all()) else y * mask


@pytest.mark.filterwarnings("ignore")
def test_only_what_leads_to_the_function_is_told_so(dynamo):
    program = exporter.export(Masked(), (torch.randn(3, 4), torch.ones(3, 1)), dynamo=dynamo)
    assert [v.name for v in program.model.graph.inputs] == ["x", "mask"] and len(nodes(program.model, "PythonOp")) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_disguise_that_costs_an_input_is_refused(dynamo):
    with pytest.raises(ExportError, match=r"Steep.*\n.*\n.*told that it runs in eager mode, the export fails"):
        exporter.export(MaskedAtOnce(), (torch.randn(3, 4), torch.ones(3, 1)), dynamo=dynamo)


@pytest.mark.filterwarnings("ignore")
def test_a_refused_program_is_not_left_in_the_handle(dynamo):
    with exporter.hook() as handle, pytest.raises(ExportError):
        torch.onnx.export(MaskedAtOnce(), (torch.randn(3, 4), torch.ones(3, 1)), dynamo=dynamo, **({} if dynamo else {"f": None}))
    assert handle.program is None


# ------------------------------------------------------------------------------------------- it blames without reason


class Drops(nn.Module):
    """LayerDrop with a generator of its own."""

    def __init__(self, seed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.random, self.numpy = random.Random(seed), np.random.default_rng(seed)

    def forward(self, x):
        for layer in self.layers:
            if self.random.random() < 0.5 or self.numpy.random() < 0.3:
                x = Steep.apply(layer(x))
        return x


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_layers(seed, dynamo):
    exporter.export(Drops(seed), (torch.randn(3, 4),), dynamo=dynamo)


class Memo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.memo = nn.Parameter(torch.rand(4)), types.SimpleNamespace(quantized=None)

    def forward(self, x):
        if self.memo.quantized is None:
            self.memo.quantized = Steep.apply(self.weight)
        return x * self.memo.quantized


def test_a_memo_outside_of_the_module():
    exporter.export(Memo(), (torch.randn(3, 4),))


class Quantized(nn.Module):
    def forward(self, weight):
        return Steep.apply(weight)


def test_cached_parametrizations():
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Quantized())
    with parametrize.cached():
        assert len(nodes(exporter.export(model, (torch.randn(3, 4),)).model, "PythonOp")) == 1


def test_what_torch_takes_as_arguments(tmp_path):
    class Keywords(Call):
        def forward(self, x, mask=None):
            return super().forward(x) * (1 if mask is None else mask)

    model, x = Keywords(steep), torch.randn(3, 4)
    with warnings.catch_warnings(), exporter.hook() as handle:
        warnings.simplefilter("error", PythonopWarning)
        torch.onnx.export(model, (), kwargs={"x": x}, dynamo=True, verbose=False)
        assert "pythonop.unchecked" not in handle.program.model.metadata_props
        torch.onnx.export(model, (x, {"mask": torch.ones(3, 1)}), tmp_path / "m.onnx", dynamo=False)
        assert "pythonop.unchecked" not in handle.program.model.metadata_props


def test_the_mode_that_torch_is_asked_for(tmp_path):
    class InTraining(Call):
        def forward(self, x):
            return super().forward(x) if self.training else self.linear(x)

    model = InTraining(steep).eval()
    with exporter.hook() as handle:
        torch.onnx.export(model, (torch.randn(3, 4),), tmp_path / "m.onnx", dynamo=False, training=torch.onnx.TrainingMode.TRAINING)
    assert len(nodes(handle.program.model, "PythonOp")) == 1 and not model.training


def test_lazy_modules(dynamo):
    program = exporter.export(nn.Sequential(nn.LazyLinear(4), Call(steep)), (torch.randn(3, 5),), dynamo=dynamo)
    assert len(nodes(program.model, "PythonOp")) == 1


def test_results_that_torch_does_not_know(dynamo):
    class Result:
        def __init__(self, y):
            self.inner = types.SimpleNamespace(y=[y])

    graph = EagerGraph.of(Call(lambda x: Result(Steep.apply(x))), (torch.randn(3, 4),), {})
    assert list(graph.calls) == [Steep]


# --------------------------------------------------------------------------------------------------- it changes nothing


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self):
        self.count, self.items = 0, []


class Everything(nn.Module):
    """Changes whatever can be reached from a module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("expanded", torch.arange(4.0).expand(3, 4))
        self.register_buffer("count", torch.zeros(()))
        self.nested = {"a": {"steps": 0, "tensors": [torch.zeros(2)]}}
        self.ordered, self.default, self.counter = OrderedDict(a=1), defaultdict(list), Counter()
        self.queue, self.names, self.array = deque([1], maxlen=2), {"a"}, np.zeros(3)
        self.object, self.slotted = types.SimpleNamespace(items=[]), Slotted()
        self.generator, self.lock, self.random = torch.Generator().manual_seed(1), threading.Lock(), random.Random(3)
        total = 0

        def step():
            nonlocal total
            total += 1
            return total

        self.step = step

    def forward(self, x, cache):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        self.frozen.data.mul_(2).add_(1)
        self.frozen.data = torch.zeros(5)
        self.count += 1
        self.count = self.count * 2
        self.nested["a"]["steps"] += 1
        self.nested["a"]["tensors"][0].add_(1)
        self.nested["b"] = 1
        self.ordered["b"] = self.default["x"].append(1) or 2
        self.counter["x"] += 1
        self.queue.append(5)
        self.names.add("b")
        self.array += 1
        self.object.items.append(x)
        self.object.new = x
        self.slotted.count += 1
        self.slotted.items.append(1)
        cache.hidden.append(x)
        self.random.random()
        torch.rand(1, generator=self.generator)
        return Steep.apply(self.linear(x)) * self.step()


def picture(model, cache):
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return repr(
        (
            {k: v.tolist() for k, v in model.state_dict().items()},
            model.nested, model.ordered, model.default, model.counter, model.queue, sorted(model.names), model.array,
            model.object, model.slotted.count, model.slotted.items, model.generator.get_state().tolist(), model.random.getstate(),
            model.step.__closure__[0].cell_contents, sorted(own), cache.hidden,
        )
    )  # fmt: skip


def test_nothing_is_changed():
    model, cache, x = Everything(), types.SimpleNamespace(hidden=[]), torch.randn(3, 4)
    before, pending = picture(model, cache), (model.linear(x) * model.expanded).sum()
    graph = EagerGraph.of(model, (x, cache), {})
    assert not graph.unchecked and list(graph.calls) == [Steep]
    assert picture(model, cache) == before
    model.linear.weight.requires_grad_()
    pending.backward()  # autograd heard of no change


def _no(*_):
    raise NotImplementedError


_REFUSED = (
    "__len__",
    "__iter__",
    "__contains__",
    "__getitem__",
    "__setitem__",
    "clear",
    "update",
    "extend",
    "index",
    "count",
    "values",
    "items",
)


@pytest.mark.parametrize("kind", [dict, OrderedDict, list, deque, set, tuple, frozenset])
def test_a_container_whose_class_refuses_its_methods_is_kept(kind):
    """e3nn's irreps are tuples without a length."""
    inner: list[int] = []
    content = {"a": inner, "b": 4} if issubclass(kind, dict) else [4, 5] if kind in (set, frozenset) else [inner, 4]
    value = type("Refusing", (kind,), {})(content)
    for name in _REFUSED:
        setattr(type(value), name, _no)
    with unchanged(value):
        if 5 not in content:
            inner.append(1)
        if kind not in (tuple, frozenset):
            kind.clear(value)
    assert inner == []
    assert [*kind.__iter__(value)] == [*content]


def test_what_was_not_changed_is_not_touched():
    model, x = Call(steep), torch.randn(3, 4)
    versions = [p._version for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    EagerGraph.of(model, (x,), {})
    assert versions == [p._version for p in model.parameters()] and addresses == [p.data_ptr() for p in model.parameters()]


def test_after_an_exception_too():
    model = Everything()
    cache = types.SimpleNamespace(hidden=[])
    model.forward = lambda *args: (Everything.forward(model, *args), 1 / 0)
    before = picture(model, cache)
    with pytest.raises(ExportError, match="ZeroDivisionError: division by zero"):
        EagerGraph.of(model, (torch.randn(3, 4), cache), {})
    assert picture(model, cache) == before


def test_gradients_and_classes_are_put_back():
    model = nn.Linear(2, 2)
    with unchanged(model):
        model(torch.ones(1, 2)).sum().backward()
        model.__class__ = nn.Identity
    assert model.weight.grad is None and type(model) is nn.Linear


def test_classes_that_abc_has_made_are_put_back():
    """torch parametrizes a layer by a class that it makes: of an abstract one, it says that it is of the module abc."""

    class Layer(nn.Linear, abc.ABC):
        pass

    model = torch.nn.utils.parametrizations.weight_norm(Layer(2, 2))
    assert type(model).__module__ == "abc"
    with unchanged(model):
        model.eval().note = 1
    assert all(module.training for module in model.modules()) and not hasattr(model, "note")


def test_interleaved_runs_leave_the_process_as_it_was():
    """Two threads export at once: neither compilation nor warnings stay switched off."""
    import torch._dynamo

    filters, barrier = list(warnings.filters), threading.Barrier(2, timeout=5)

    class Slow(Call):
        def forward(self, x):
            try:
                barrier.wait(0.5)
            except threading.BrokenBarrierError:
                pass
            return super().forward(x)

    threads = [threading.Thread(target=EagerGraph.of, args=(Slow(steep), (torch.randn(3, 4),), {})) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == filters and torch._dynamo.eval_frame._stance.stance == "default"


# ------------------------------------------------------------------------------------------------- nothing is left


@pytest.mark.xfail(
    not is_method_of_c(), reason="apply is Python on this torch: no transform is entered", raises=AssertionError, strict=True
)
def test_an_interrupt_between_entering_and_leaving(monkeypatch):
    leave = private.leave_transform

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(private, "leave_transform", interrupted)
    undo, raised = intercept(lambda cls, *args: None, lambda: True), False
    try:
        with settled():
            try:
                Steep.apply(torch.ones(1))
            except KeyboardInterrupt:
                raised = private.transform_depth() == 1
    finally:
        undo()
        monkeypatch.setattr(private, "leave_transform", leave)
    assert private.transform_depth() == 0 and torch._C._functorch.get_interpreter_stack() is None
    assert Steep.apply(torch.ones(1)).item() == 2
    assert raised


def test_a_failed_export_under_vmap_leaves_no_transform(dynamo):
    class Mapped(SteepSetup):
        generate_vmap_rule = True

    for options in ({"inline": [Mapped]}, {}):
        with pytest.raises(Exception):  # noqa: B017, PT011  (torch's own, or ours)
            exporter.export(
                Call(lambda x: torch.func.vmap(lambda y: Mapped.apply(y).nothing)(x)), (torch.randn(3, 4),), dynamo=dynamo, **options
            )
        assert torch._C._functorch.get_interpreter_stack() is None
        assert Steep.apply(torch.ones(1)).item() == 2


def test_what_changes_is_found_beside_a_parameter_that_gets_another_shape():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.calls = nn.Parameter(torch.ones(4), requires_grad=False), 0

        def forward(self, x):
            y = x * self.frozen.sum() * self.calls
            self.frozen.data = torch.zeros(5)
            self.calls += 1
            return y

    graph = EagerGraph.of(Grows(), (torch.ones(2),), {})
    assert not graph.unchecked and "calls" in graph.state


# ------------------------------------------------------------------------------------- a module that a model has twice


class Inner(nn.Module):
    def forward(self, x):
        return Steep.apply(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(self.linear(x))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = Outer(), Inner()
        self.again = self.first

    def forward(self, x):
        return self.first(x) + self.again(x) + self.other(x)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_a_model_that_has_a_module_twice(dynamo):
    """torch.export then runs other objects in the place of all modules: a call was looked for in the module around them."""
    program = exporter.export(Twice(), (torch.randn(2, 3),), dynamo=dynamo)
    found = [node.metadata_props["pythonop.module"] for node in nodes(program.model, "PythonOp")]
    assert sorted(found) == ["first.inner", "first.inner", "other"]
