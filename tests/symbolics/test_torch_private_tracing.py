"""One test for each name of symbolics/torch_private/tracing.py, so that a release that moves one fails by its name."""

from __future__ import annotations

import contextlib

import onnx_ir as ir
import pytest
import sympy
import torch
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx

from symbolics import torch_private as private
from symbolics.capture.translate import translations
from tests.zoo.portable import AsksForNone

aten = torch.ops.aten


def operators(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def fakes(*tensors, moves=True):
    env, mode = private.fake_mode()
    made = [private.fake_tensor(mode, t, [moves] * t.dim(), i) for i, t in enumerate(tensors)]
    return env, mode, made


def test_fake_mode():
    env, mode = private.fake_mode()
    assert mode.shape_env is env
    with mode:
        assert private.is_fake(torch.zeros(2))


def test_fake_tensor():
    env, mode, (x, y) = fakes(torch.zeros(5, 7), torch.zeros(7))
    assert isinstance(x.shape[0], torch.SymInt)
    assert x.shape[1].node.expr == y.shape[0].node.expr != x.shape[0].node.expr
    fixed = private.fake_tensor(mode, torch.zeros(5), [False], 2)
    assert type(fixed.shape[0]) is int


def test_symbolic_size():
    env, _, (x,) = fakes(torch.zeros(5))
    sizes = [private.symbolic_size(env, 7, f"s{lowest}", lowest) for lowest in (2, 0, None)]
    assert [size.node.hint for size in sizes] == [7, 7, 7]
    assert len({size.node.expr for size in (*sizes, x.shape[0])}) == 4
    assert [env.var_to_range[size.node.expr].lower for size in sizes[:2]] == [2, 0]
    assert env.var_to_range[sizes[2].node.expr].lower < -(10**9)


def test_computed_size():
    env, mode = private.fake_mode()
    size = private.symbolic_size(env, 12, "n", 2)
    more = private.computed_size(env, size.node.expr * 2, 24)
    assert more.node.hint == 24
    with mode:
        assert torch.cat([torch.empty(size)] * 2).shape[0].node.expr == more.node.expr


def test_example_size():
    env, mode = private.fake_mode()
    x = private.fake_tensor(mode, torch.zeros(3, 4), (True, False), 0)
    assert [private.example_size(size) for size in x.shape] == [3, 4]
    assert not env.guards
    assert isinstance(x.shape[0], torch.SymInt)


def test_same_size():
    _, _, (x,) = fakes(torch.zeros(5))
    again = private.same_size(x.shape[0])
    assert again is not x.shape[0]
    assert (again.node.expr, again.node.hint) == (x.shape[0].node.expr, x.shape[0].node.hint)


def test_never_negative():
    n, m = sympy.symbols("n m", integer=True)
    assert private.never_negative(n * m + 1)
    assert not private.never_negative(n - m)


def test_in_python():
    """Without it, addcmul makes numbers of symbolic sizes."""
    _, mode, (x, y) = fakes(torch.zeros(5, 3), torch.zeros(3))
    with mode, private.in_python():
        assert torch.addcmul(x, x, y).shape[0].node.expr == x.shape[0].node.expr


def test_guards_told():
    env, _, (x,) = fakes(torch.zeros(5))
    told = []
    private.guards_told(env, lambda: told.append(len(env.guards)))
    assert x.shape[0] > 4
    assert told == [len(env.guards)]


def test_trace_to_aten():
    x = torch.ones(3, requires_grad=True)
    graph = private.trace_to_aten(lambda x, g: torch.autograd.grad(x.sin(), x, g)[0], (x, torch.ones(3)))
    assert operators(graph)[:1] == [aten.sin.default]
    assert aten.cos.default in operators(graph)


def test_traced_nodes():
    seen = []

    def function(x):
        y = x.sin()
        seen.append(private.traced_nodes())
        return y.cos()

    private.trace_to_aten(function, (torch.ones(3),))
    assert seen == [{"x_1", "sin"}]


def test_functionalized():
    graph = private.trace_to_aten(lambda x: x.clone().mul_(2).detach(), (torch.ones(3),))
    assert aten.mul_.Tensor in operators(graph)
    found = operators(private.functionalized(graph, [torch.ones(3)], {}))
    assert aten.mul.Tensor in found
    assert not {aten.mul_.Tensor, aten.detach.default} & set(found)


def test_functionalized_of_an_operator_made_of_writes():
    def made(x):
        z = torch.zeros_like(x)
        z[:2].copy_(x[:2])
        return z

    graph = private.trace_to_aten(lambda x: x.neg(), (torch.ones(3),))
    found = private.functionalized(graph, [torch.ones(3)], {aten.neg.default: made})
    assert found(torch.ones(3)).tolist() == [1, 1, 0]
    assert not any(private.written_arguments(node.target) for node in found.graph.nodes)


def test_lift_constants():
    graph = private.trace_to_aten(lambda x: x * torch.tensor([1.0, 2.0]), (torch.ones(2),))
    (constant,) = private.lift_constants(graph)
    assert constant.tolist() == [1, 2]
    assert [node.op for node in graph.graph.nodes].count("placeholder") == 2
    assert graph(torch.ones(2), constant).tolist() == [1, 2]
    alone = private.trace_to_aten(lambda: torch.tensor([1.0, 2.0]) * 2, ())
    (constant,) = private.lift_constants(alone)
    assert next(iter(alone.graph.nodes)).op == "placeholder" and alone(constant).tolist() == [2.0, 4.0], "without inputs"


@pytest.mark.parametrize(
    ("function", "condition"),
    [
        (lambda x: x + 1, None),
        (lambda x: x + 1 if x.shape[0] > 4 else x, "4"),
        (lambda x: x * int(x.shape[0]), "5"),
        (lambda x: x + 1 if torch.sym_min(x.shape[0], x.shape[0] * x.shape[0]) == x.shape[0] else x, None),
        (lambda x: torch.eye(x.shape[0] - 1) * x[:-1, None], None),
        (lambda x: x.topk(x.shape[0] // 2).values, None),
        (lambda x: x.topk((x.shape[0] + 1) // 3 + 1).values, None),
        (lambda x: x.topk(x.shape[0] // 2 + 2).values, "2"),
        (lambda x: x + 1 if (x.shape[0] - 1) ** 2 >= 2 else x, "2"),
        (lambda x: x + 1 if torch.sym_min(x.shape[0] * 2, x.shape[0] + 7) == x.shape[0] * 2 else x, "Min"),
    ],
    ids=[
        "none",
        "a branch",
        "a number",
        "true of all sizes",
        "strides of n - 1",
        "true of halves",
        "true of thirds",
        "not of one",
        "a branch on n - 1",
        "true of some sizes",
    ],
)
def test_condition_on_sizes(function, condition):
    env, mode, (x,) = fakes(torch.zeros(5))
    with mode:
        private.trace_to_aten(function, (x,))
    found = private.condition_on_sizes(env, (), ())
    assert found is None if condition is None else condition in str(found.expr)


@pytest.mark.parametrize("function", [lambda x: 1 if x.sum() > 0 else 2, lambda x: x.item() > 0 and 1])
def test_is_data_dependent(function):
    _, mode, (x,) = fakes(torch.zeros(()))
    with mode, pytest.raises(Exception) as caught:  # noqa: PT011
        function(x)
    assert private.is_data_dependent(caught.value)
    assert not private.is_data_dependent(RuntimeError("x"))


def test_written_arguments():
    assert private.written_arguments(aten.mul_.Tensor) == [0]
    assert private.written_arguments(aten.mul.Tensor) == []
    assert private.written_arguments(len) == []


def _nodes(function, *values):
    return [node for node in private.trace_to_aten(function, values).graph.nodes if node.op == "call_function"]


def test_written_values():
    (add,) = _nodes(lambda x, y: x.add_(y), torch.ones(2), torch.ones(2))
    assert private.written_values(add) == [add.args[0]]
    (added,) = _nodes(lambda x, y: torch.add(x, x, out=y), torch.ones(2), torch.ones(2))
    assert private.written_values(added) == [added.kwargs["out"]]


def test_shared_values():
    view, neg = _nodes(lambda x: x.view(-1).neg(), torch.ones(2, 2))
    assert private.shared_values(view) == [view.args[0]]
    assert private.shared_values(neg) == []


def test_is_random():
    assert private.is_random(aten.bernoulli.default)
    assert not private.is_random(aten.mul.Tensor)
    assert not private.is_random(len)


def test_is_once_differentiable():
    class Once(torch.autograd.Function):
        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return g

    assert private.is_once_differentiable(Once)
    assert not private.is_once_differentiable(torch.autograd.Function)


def test_translator_of():
    translator = private.translator_of(translations)
    assert private.translator_of(translations) is translator
    assert aten.silu_backward.default in translator.decompositions
    _, mode, (x,) = fakes(torch.ones(3), moves=False)
    with mode:
        graph = private.trace_to_aten(lambda x: (x.sin() + 1,), (x,))
    model = translator.translate(graph, 20)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"][:1] == ["Sin"]
    assert model.opset_imports[""] == 20
    assert isinstance(model, ir.Model)


def test_materialization_watched():
    x = torch.ones(2, requires_grad=True)
    with private.materialization_watched() as said:
        y, _ = AsksForNone.apply(x)
    assert said == [False]
    y.sum().backward()
    AsksForNone.apply(x)
    assert said == [False]


@pytest.mark.parametrize("fails", [False, True])
def test_forward_hooks_inside(fails):
    module, said = torch.nn.Identity(), []

    def forward(x, y=1):
        assert x == 3 or not fails
        return x * y

    module.forward = forward
    module.register_forward_pre_hook(lambda own, args: args[0] + 1)
    module.register_forward_pre_hook(lambda own, args, kwargs: (args, {"y": kwargs["y"] + 1}), with_kwargs=True)
    module.register_forward_hook(lambda own, args, kwargs, result: said.append((args, kwargs, result)), with_kwargs=True, always_call=True)
    module.register_forward_hook(lambda own, args, result: result + 1)
    with private.forward_hooks_inside(module) as called:
        if fails:
            with pytest.raises(AssertionError):
                called(forward, 1, y=2)
            assert said == [((2,), {"y": 3}, None)]
        else:
            assert module(2) == 2 and not said
            assert called(forward, 1, y=2) == 7 and said == [((2,), {"y": 3}, 6)]
    assert fails or (module(1, y=2) == 7 and len(said) == 2)


def test_holding():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    weight, mean = module[0].weight, module[0].running_mean
    value = torch.zeros(2)
    with private.holding(module, "0.weight", value), private.holding(module, "0.running_mean", value):
        assert module[0].weight is value
        assert module[0].running_mean is value
    assert module[0].weight is weight
    assert module[0].running_mean is mean


def test_quiet_trial(caplog):
    def fail():
        _, mode, (x,) = fakes(torch.zeros(2, 3))
        with mode, pytest.raises(RuntimeError):
            torch.mm(x, torch.zeros(4, 5))
        return [record for record in caplog.records if "failed while attempting to run meta" in record.getMessage()]

    with private.quiet_trial():
        with private.quiet_trial():
            assert fail() == []
        assert fail() == []
    assert fail() != []


@pytest.mark.parametrize("own", [True, False])
def test_refusals_watched(own):
    env, mode, (x,) = fakes(torch.zeros(()))
    told: list[Exception] = []
    with mode, private.refusals_watched(env if own else None, told.append), contextlib.suppress(Exception):
        assert x.item() > 0
    assert [private.is_data_dependent(error) for error in told] == [True]
    with mode, contextlib.suppress(Exception):
        assert x.item() > 0
    assert len(told) == 1


def test_sizes_apart():
    def function(x, n):
        return torch.zeros(x.shape[0]) + n

    def traced():
        return operators(make_fx(function, tracing_mode="symbolic")(torch.ones(3, 2), 3))

    assert aten.sym_size.int not in traced(), "a trace no longer joins equal sizes: sizes_apart can go"
    with private.sizes_apart():
        assert aten.sym_size.int in traced(), "a trace joins equal sizes elsewhere (torch._inductor.fx_passes.dedupe_symint_uses)"
