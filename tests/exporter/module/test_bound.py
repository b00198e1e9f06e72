"""A call of a loaded module sees what the module and its arguments are now: nothing of an earlier call stands for it."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from symbolics.errors import RunError
from tests.exporter.module import functions as F
from tests.trains import assert_close, assert_same_grads, assert_step_alike, loaded


@pytest.fixture(scope="module")
def cubic():
    torch.manual_seed(0)
    model = F.Cubic()
    x = torch.randn(3, 4)
    return model, loaded(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.fixture
def both(cubic):
    """(the eager model, the loaded one), each a copy that has run a step."""
    torch.manual_seed(0)
    model, module = (copy.deepcopy(m) for m in cubic)
    assert_step_alike(module, model, (torch.randn(3, 4),))
    for m in (model, module):
        m.zero_grad()
    return model, module


def _change(m, how, values):
    weight = values.clone()
    if how == "parameter":
        m.first.weight = nn.Parameter(weight)
    elif how == "data":
        m.first.weight.data = weight
    elif how == "in place":
        with torch.no_grad():
            m.first.weight.copy_(weight)
    elif how == "optimizer":
        m.first.weight.grad = weight
        torch.optim.SGD(m.parameters(), lr=0.5).step()
        m.zero_grad()
    elif how == "parametrization":
        parametrize.register_parametrization(m.first, "weight", F.Halved())
    elif how == "plain attribute":  # as torch.nn.utils' older weight_norm leaves it
        del m.first._parameters["weight"]
        m.first.weight = weight * 3
    elif how == "transposed":
        m.first.weight = nn.Parameter(weight.T)
    elif how == "module":
        m.first = nn.Linear(4, 4)
        m.first.weight.data, m.first.bias.data = weight, weight[0].clone()


@pytest.mark.parametrize(
    "how", ["parameter", "data", "in place", "optimizer", "parametrization", "plain attribute", "transposed", "module"]
)
def test_a_parameter_that_something_changed_or_replaced(both, how):
    model, module = both
    torch.manual_seed(0)
    values, x = 0.3 * torch.randn(4, 4), torch.randn(3, 4)
    before = module(x)
    for m in both:
        _change(m, how, values)
    with torch.no_grad():
        assert_close(module(x), model(x))
        assert not torch.equal(module(x), before)
    assert_step_alike(module, model, (x,))


def test_another_type_is_refused_and_the_old_one_runs_again(both):
    model, module = both
    x = torch.randn(3, 4)
    module.first.weight.data = module.first.weight.data.double()
    with pytest.raises(RunError, match="'first.weight' is now torch.float64"):
        module(x)
    module.first.weight.data = torch.zeros(3, 3)
    with pytest.raises(RunError, match="of shape \\[3, 3\\]"):
        module(x)
    module.first.weight.data = model.first.weight.data.clone()
    assert_step_alike(module, model, (x,))
    module.first.weight = nn.Parameter(torch.zeros(4, 4, device="meta"))
    with pytest.raises(RunError, match="is on meta"):
        module(x)


def test_inputs_of_other_sizes_layouts_and_places(both):
    model, module = both
    for x in (torch.randn(5, 4), torch.randn(4, 3).T, torch.randn(8, 8)[::4, ::2], torch.randn(1, 4).expand(3, 4), torch.empty(0, 4)):
        assert_step_alike(module, model, (x,))
    negated = torch.randn(3, 4, dtype=torch.complex64).conj().imag  # when it is read
    assert negated.is_neg()
    assert_step_alike(module, model, (negated,))
    with pytest.raises(RunError, match="the shape \\[3, 5\\]"):
        module(torch.randn(3, 5))
    with pytest.raises(RunError, match="the shape \\[4\\]"):
        module(torch.randn(4))
    with pytest.raises(RunError, match="is on meta"):
        module(torch.randn(3, 4, device="meta"))
    assert_step_alike(module, model, (torch.randn(2, 4),))


def test_what_has_a_gradient_is_asked_at_each_call(both):
    model, module = both
    x = torch.randn(3, 4)
    for m in both:
        m.first.weight.requires_grad_(False)
    assert_step_alike(module, model, (x,))
    assert module.first.weight.grad is None
    for m in both:
        m.zero_grad()
        m.first.weight.requires_grad_()
    assert_step_alike(module, model, (x,))
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        y = module(x)
        assert y.is_inference() == model(x).is_inference()
        assert_close(y.clone(), model(x).clone())
    assert module(x).requires_grad
    assert module.eval()(x).requires_grad
    assert module.train()(x).requires_grad
    given = [x.clone().requires_grad_() for _ in both]
    for m, value in zip(both, given, strict=True):
        m(value).sum().backward()
    assert_close(given[0].grad, given[1].grad)


def test_a_result_is_the_callers():
    """The structure is read once, and what the caller does to one result does not show in the next."""
    module = loaded(F.Plain(), (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    found = module(x)
    assert [type(part) for part in found["more"]] == [torch.Tensor, type(None), tuple]
    found["more"].append("mine")
    found["mine"] = found.pop("sum")
    again = module(2 * x)
    assert list(again) == ["sum", "more"]
    assert again["more"][1:] == [None, ()]
    assert_close(again["sum"], 2 * found["mine"])


def test_a_tensor_that_left_a_transform(both):
    model, module = both
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.randn(3, 4))
    assert_step_alike(module, model, (left[0],))


def test_a_cotangent_that_does_not_lie_as_it_reads(both):
    model, module = both
    x, g = torch.randn(3, 4), torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert g.is_neg()
    for cotangent in (g, torch.randn(4, 3).T, torch.ones(()).expand(3, 4)):
        for m in both:
            m.zero_grad()
            m(x).backward(cotangent)
        assert_same_grads(module, model)


def test_a_function_that_calls_the_module_it_is_in(monkeypatch):
    """What the inner run keeps for its backward is the inner call's, also when the outer run has ended."""
    x = torch.rand(3).double().requires_grad_()
    module = loaded(F.CallsWithin(), (x.detach(),))
    store = module._onnx.plans.store
    monkeypatch.setattr(F.Within, "module", module)
    y = module(x)
    assert len(store) == 2  # Cube and Within as one, in both runs
    assert_close(y, _nested(x))
    (g,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(_nested(x).sum(), x)
    assert_close(g, expected)
    assert len(store) == 0
    module(x)
    assert len(store) == 0


@pytest.mark.parametrize("create", [False, True])
def test_a_backward_inside_a_backward_keeps_what_the_outer_one_retains(monkeypatch, create):
    model, x = F.CallsBehind(), torch.rand(3).requires_grad_()
    module = loaded(model, (x.detach(),))
    found = []
    for m in (module, model):
        y = m(x).sum()
        with monkeypatch.context() as within:
            within.setattr(F.Behind, "module", m)
            (g,) = torch.autograd.grad(y, x, retain_graph=True, create_graph=create)
        found.append((g.detach(), *torch.autograd.grad(g.sum() if create else y, x)))
    for one, two in zip(*found, strict=True):
        assert_close(one, two)
    del y, g
    assert len(module._onnx.plans.store) == 0


def _nested(x):
    """module(x) = within(x ** 3) + 1, where within is the module once more, and there the square."""
    inner = ((x**3) ** 3) ** 2 + 1
    return inner + 1


def test_a_run_that_fails_leaves_nothing(monkeypatch):
    """Neither the outer nor the inner one, which the Function around it survives."""
    x = torch.rand(3).double().requires_grad_()
    module = loaded(F.CallsWithin(), (x.detach(),))

    def fails(value):
        with pytest.raises(RunError, match="shape"):
            module(value[:2])
        raise KeyError("mine")

    monkeypatch.setattr(F.Within, "module", staticmethod(fails))
    with pytest.raises(KeyError, match="mine"):
        module(x)
    assert len(module._onnx.plans.store) == 0
    assert not module._onnx.plans.store.runs


def test_threads_share_a_module(both):
    model, module = both
    inputs = [torch.randn(n + 1, 4) for n in range(4)]
    expected = [model(x).detach() for x in inputs]
    gradients = [torch.autograd.grad(model(x).sum(), model.first.weight)[0] for x in inputs]
    wrong = []

    def work(number):
        for _ in range(30):
            y = module(inputs[number])
            (g,) = torch.autograd.grad(y.sum(), module.first.weight)
            with torch.no_grad():
                z = module(inputs[number])
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in ((y, expected[number]), (z, expected[number]), (g, gradients[number]))):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_outlive_what_they_were_made_of(both):
    """Inputs are read where they lie, and results lie in onnxruntime's memory."""
    model, module = both
    x = torch.randn(3, 4)
    expected = model(x).detach()
    y = module(x.clone())
    gc.collect()
    with torch.no_grad():
        for _ in range(5):
            module(torch.full((3, 4), 7.0))
    assert_close(y.detach(), expected)
    weights = torch.randn(3, 4)
    (y * weights).sum().backward()
    (model(x) * weights).sum().backward()
    assert_same_grads(module, model)


def test_the_collector_is_as_it_was_after_the_first_call():
    module = loaded(F.Cubic(), (torch.randn(3, 4),))
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            module.train(enabled)(torch.randn(3, 4, requires_grad=True))
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_torch_compile_runs_a_module_between_its_graphs():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), torch.randn(5, 4)
    module, found = loaded(model, (x,)), []
    for m in (module, model):
        compiled = torch.compile(m, backend="eager")
        around = torch.compile(lambda x, m=m: m(x * 2) + 1, backend="eager")
        results = compiled(x), around(x), around(x)
        sum(result.square().sum() for result in results).backward()
        found.append(results)
    for one, two in zip(*found, strict=True):
        assert_close(one, two)
    assert_same_grads(module, model, 1e-4)
    for one, two in zip(module.buffers(), model.buffers(), strict=True):
        assert_close(one, two)
