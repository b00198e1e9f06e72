"""The private names of torch: each has a test of its own, and they stand in one module.

When a release of torch moves one of them, the test that fails has its name.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import types as types_module

import pytest
import torch

from symbolics import torch_private as private
from symbolics.capture.binding import has_setup_context
from symbolics.capture.interception import intercept, is_method_of_c
from tests.zoo.functions import Double

# ------------------------------------------------------------------------------------------------------- a test a name


in_c = pytest.mark.xfail(not is_method_of_c(), raises=AttributeError, reason="apply is Python on this torch: it hands nothing over")


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_in_body_of_a_loop():
    assert not private.in_body_of_a_loop()
    for name, tracing in (("torch._higher_order_ops.scan", "trace_scan"), ("torch._higher_order_ops.while_loop", "while_loop_tracing")):
        assert hasattr(importlib.import_module(name), tracing)
        scope = {"__name__": name, "asked": private.in_body_of_a_loop}
        exec("def body(): return asked()", scope)
        assert scope["body"]()


def test_SingleLevelFunction():
    assert issubclass(torch.autograd.Function, private.SingleLevelFunction)
    assert "apply" not in vars(private.SingleLevelFunction) or is_method_of_c(), "it takes the place that our hook takes"
    assert not has_setup_context(Double)


def test_FunctionMeta():
    assert type(Double) is private.FunctionMeta
    assert "__getattribute__" not in vars(private.FunctionMeta), "it takes the place that our hook takes"


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_apply_is_caught(late):
    early, seen, x = Double.apply, [], torch.ones(1)
    undo = intercept(lambda cls, *args, **kwargs: seen.append((cls, args, kwargs)), lambda: True)
    try:
        (Double.apply if late else early)(x, scale=3)
    finally:
        undo()
    assert seen == [(Double, (x,), {"scale": 3})], "Function.apply goes another way than symbolics/capture/interception.py knows"
    assert early(x).item() == Double.apply(x).item() == 2


def test_apply_of_base():
    x = torch.ones(2, requires_grad=True)
    y = private.apply_of_base(Double)(x)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_unwrap_if_dead():
    """Function.apply asks it of each argument: what left a transform that has ended is a plain tensor again."""
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.ones(3))
    assert len(list(private.layers_of(left[0]))) == 2
    plain = torch.ones(2)
    assert private.unwrap_if_dead(plain) is plain
    assert len(list(private.layers_of(private.unwrap_if_dead(left[0])))) == 1


@in_c
def test_helpers_of_apply():
    """C still looks both up, at each call, in this order; `call` only under a transform."""
    assert _helpers_called() == ["bind", "call"]


def _helpers_called():
    seen, originals = [], private.helpers_of_apply()
    bind, _ = originals

    def binds(forward, args, kwargs):
        seen.append("bind")
        private.enter_transform()
        return bind(forward, args, kwargs)

    def calls(cls, args, kwargs):
        seen.append("call")
        private.leave_transform()
        return torch.full((1,), 2.0)

    private.replace_helpers_of_apply(binds, calls)
    try:
        assert Mapped.apply(torch.ones(1)).item() == 2
    finally:
        private.replace_helpers_of_apply(*originals)
    assert Mapped.apply(torch.ones(1)).item() == 2
    return seen


@in_c
def test_replace_helpers_of_apply():
    before = private.helpers_of_apply()
    _helpers_called()
    assert private.helpers_of_apply() == before


def test_forget_kernels():
    operator, key = torch.ops.aten.lstm.input, torch._C.DispatchKey.CompositeImplicitAutograd
    operator._get_dispatch(key)
    assert key in operator._dispatch_cache
    private.forget_kernels(operator)
    assert not operator._dispatch_cache


def test_composite_kernel():
    operator, key, table = torch.ops.aten.gru.input, torch._C.DispatchKey.CompositeImplicitAutograd, torch._decomp.decomposition_table
    before = operator.py_kernels[key], table[operator]
    with private.composite_kernel(operator, lambda kernel: lambda *given: (kernel, *given)):
        assert operator.py_kernels[key](1) == table[operator](1) == (before[0], 1)
    assert (operator.py_kernels[key], table[operator]) == before


def test_is_recorded():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    make_fx(lambda x: seen.append(private.is_recorded()) or x)(torch.ones(2))
    assert seen == [True] and not private.is_recorded()


def test_transforms_active():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.transforms_active()) or x)(torch.ones(2))
    assert seen == [True]
    assert not private.transforms_active()


def test_requires_grad():
    """Of a batch inside of grad, the batch itself says no."""
    seen = []

    def inner(x):
        seen.append((x.requires_grad, private.requires_grad(x)))
        return x * 2

    torch.func.grad(lambda x: torch.func.vmap(inner)(x).sum())(torch.ones(2))
    torch.func.vmap(inner)(torch.ones(2))
    inner(torch.ones(2, requires_grad=True))
    assert seen == [(False, True), (False, False), (True, True)]


def test_outside_of_compile():
    compiling = []

    @private.outside_of_compile
    def outside(x):
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    found = torch.compile(lambda x: outside(x + 1) + 1, backend="eager")(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 5.0))
    assert compiling == [False]


def test_is_legacy_batch():
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append((private.is_legacy_batch(grad), private.transforms_active()))
            return grad

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Ask.apply(x), x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(Ask.apply(x), x, torch.ones(2))
    assert seen == [(True, False), (False, False)]


def test_enter_transform():
    private.enter_transform()
    try:
        assert private.transforms_active()
    finally:
        private.leave_transform()


def test_leave_transform():
    private.enter_transform()
    private.leave_transform()
    assert not private.transforms_active()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_transform_depth():
    seen = []
    torch.func.grad(lambda x: torch.func.vmap(lambda y: seen.append(private.transform_depth()) or y)(x).sum())(torch.ones(2))
    assert seen == [2] and private.transform_depth() == 0


def test_leave_transforms():
    private.enter_transform()
    private.enter_transform()
    private.leave_transforms(1)
    assert private.transform_depth() == 1
    private.leave_transforms(0)
    assert private.transform_depth() == 0
    assert Double.apply(torch.ones(1)).item() == 2


def test_parametrization_cache():
    model = torch.nn.Linear(2, 2)
    torch.nn.utils.parametrize.register_parametrization(model, "weight", torch.nn.Identity())
    assert not private.parametrization_cache()
    with torch.nn.utils.parametrize.cached():
        model(torch.ones(1, 2))
        assert len(private.parametrization_cache()) == 1


def test_function_of():
    y = Double.apply(torch.ones(1, requires_grad=True))
    assert private.function_of(y.grad_fn) is Double
    assert private.function_of((y * 2).grad_fn) is None


def _double_backward(ctx, g):
    return 2 * g


@pytest.fixture
def registered():
    """The Function that torch.library makes of register_autograd."""
    library = torch.library.Library("registered_autograd", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    torch.library.register_autograd("registered_autograd::double", _double_backward, lib=library)
    yield private.function_of(torch.ops.registered_autograd.double(torch.ones(1, requires_grad=True)).grad_fn)
    library._destroy()


def test_is_registered_autograd(registered):
    assert private.is_registered_autograd(registered)
    assert not private.is_registered_autograd(Double) and not private.is_registered_autograd(None)


def test_backward_of(registered):
    class ByVjp(torch.autograd.Function):
        @staticmethod
        def vjp(ctx, g):
            return g

    assert private.backward_of(registered) is _double_backward
    assert private.backward_of(Double) is Double.backward
    assert private.backward_of(ByVjp) is ByVjp.vjp
    assert private.backward_of(None) is None


def test_is_module_hook(monkeypatch):
    linear = torch.nn.Linear(2, 2)
    linear.register_full_backward_hook(lambda *_: None)
    seen = [type(node) for node, _ in linear(torch.ones(1, 2, requires_grad=True)).grad_fn.next_functions]
    node = linear(torch.ones(1, 2, requires_grad=True)).grad_fn
    assert private.is_module_hook(private.function_of(node)), seen
    assert not private.is_module_hook(Double)


def test_cpp_function_of():
    x = torch.ones(1, requires_grad=True)
    assert private.cpp_function_of((x * 2).grad_fn) == private.cpp_function_of(Double.apply(x).grad_fn) == ""


def test_functions(monkeypatch):
    seen = []
    original = private.functions().custom_function_call
    monkeypatch.setattr(private.functions(), "custom_function_call", lambda cls, *args: seen.append(cls) or original(cls, *args))
    torch.func.vmap(Mapped.apply)(torch.ones(2))
    assert seen == [Mapped], "Function.apply under torch.func no longer looks custom_function_call up there"


def test_storage_key():
    x = torch.ones(3)
    assert private.storage_key(x) == private.storage_key(x[1:]) == private.storage_key(x.detach())
    assert private.storage_key(x) != private.storage_key(x.clone())
    assert private.storage_key(torch.sparse_coo_tensor(size=(2, 2))) is None


def test_classes_are_asked():
    assert private.classes_are_asked()
    with torch._C.DisableTorchFunctionSubclass():
        assert not private.classes_are_asked()


def test_has_own_torch_function():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    class Inherits(torch.Tensor):
        pass

    assert private.has_own_torch_function(Own)
    assert not any(map(private.has_own_torch_function, (Inherits, torch.Tensor, torch.nn.Parameter)))


def test_operators_heard():
    x, seen = torch.ones(2, requires_grad=True), []
    with private.operators_heard(lambda func, args, kwargs: seen.append(func._schema.name)):
        (x * 2).sum().backward()
        torch.zeros(2).copy_(x.detach())
    assert {"aten::mul", "aten::sum", "aten::copy_"} <= set(seen)
    count = len(seen)
    x * 2
    assert len(seen) == count


def test_shares_memory():
    x = torch.ones(4)
    assert private.shares_memory(x, x[1:])
    assert not private.shares_memory(x, x.clone())


def test_random_operators():
    with private.random_operators() as drawn:
        torch.ones(2).sin()
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3)
        assert not drawn
        torch.nn.functional.dropout(torch.rand(2), 0.5)
    assert len(drawn) >= 2


def test_is_any_autocast_enabled():
    assert private.is_any_autocast_enabled() is False
    with torch.autocast("cpu"):
        assert private.is_any_autocast_enabled() is True


def test_from_dlpack():
    x = torch.ones(2)
    assert private.from_dlpack(torch.utils.dlpack.to_dlpack(x)).data_ptr() == x.data_ptr()


def test_set_grad_enabled():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch.no_grad():
        pass
    assert private.set_grad_enabled in seen


def test_buffers_assigned_unseen():
    class Assigns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x):
            with private.buffers_assigned_unseen() if self.unseen else contextlib.nullcontext():
                self.b = self.b + x
            return x * 1

    for unseen in (False, True):
        model = Assigns()
        model.unseen = unseen
        program = torch.export.export(model, (torch.ones(2),), strict=False).run_decompositions()
        assert bool(program.graph_signature.buffers_to_mutate) is not unseen


def test_answered_draws():
    asked = []

    def answer(shape, probability):
        asked.append((shape, probability))
        return torch.eye(3) if shape == (3, 3) else torch.ones(shape)

    attention = torch.nn.functional.scaled_dot_product_attention
    x = torch.ones(3, 3, requires_grad=True)
    with private.answered_draws(answer):
        y = torch.nn.functional.dropout(x, 0.5)
        attention(torch.rand(2, 3), torch.rand(2, 3), torch.rand(2, 3), dropout_p=0.25)
        torch.nn.LSTM(3, 4, 2, dropout=0.5).train()(x)
    assert torch.equal(y, 2 * torch.eye(3))
    assert [(math.prod(shape), probability) for shape, probability in asked] == [(9, 0.5), (4, 0.75), (12, 0.5)]
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.eye(3))
    torch.nn.functional.dropout(x, 0.5)
    assert len(asked) == 3


def test_inner_function():
    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            if getattr(func, "__code__", None) is None:
                return func(*args, **(kwargs or {}))
            with self:
                scope = {**func.__globals__, **dict.fromkeys(("has_torch_function_variadic", "has_torch_function_unary"), lambda *_: False)}
                body = types_module.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
                body.__kwdefaults__ = func.__kwdefaults__
                return body(*args, **(kwargs or {}))

    functional, x = torch.nn.functional, torch.rand(1, 2, 4)
    calls = {
        "binary_cross_entropy": lambda: functional.binary_cross_entropy(x, x),
        "pad": lambda: functional.pad(x, (1, 1)),
        "adaptive_avg_pool2d": lambda: functional.adaptive_avg_pool2d(x, 1),
        "cdist": lambda: torch.cdist(x, x),
    }
    for name, call in calls.items():
        seen = []
        with Sees():
            call()
        assert private.inner_function(name) in seen, name


def test_every_result():
    seen = []
    x = torch.ones(2, requires_grad=True)
    with private.every_result(lambda t: seen.append(tuple(t.shape))):
        (x.unsqueeze(0) * 3).sum().backward()
    assert (1, 2) in seen
    assert () in seen
    assert len(seen) >= 4, "operators of the backward are no longer seen"
    count = len(seen)
    x * 2
    assert len(seen) == count


def test_widened_casts():
    x = torch.full((2, 2), 1 / 3, dtype=torch.float64, requires_grad=True)
    with private.widened_casts():
        y = (x.half() @ x.detach().bfloat16()).float() + torch.ones(2, dtype=torch.float16)
        y.sum().backward()
    assert y.dtype == torch.float64 and torch.equal(y.detach(), x.detach() @ x.detach() + 1)
    assert torch.equal(x.grad, torch.ones_like(x) @ x.detach())
    assert x.half().dtype == torch.float16


def test_run_forward_pre_hooks():
    module, said = torch.nn.Linear(2, 3), []
    module.register_forward_pre_hook(lambda own, args: said.append((own, args)))
    module.register_forward_pre_hook(lambda own, args, kwargs: said.append((own, args, kwargs)), with_kwargs=True)
    private.run_forward_pre_hooks(module)
    assert said == [(module, ()), (module, (), {})]


def test_scripts_run_as_python():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    script = torch.jit.script(doubled)
    assert script._torchdynamo_inline is doubled
    with private.scripts_run_as_python():
        plain = torch.jit.trace(lambda x: script(x), (torch.ones(2),), check_trace=False)
        assert script(torch.ones(2)).tolist() == [2, 2]
    as_it_is = torch.jit.trace(lambda x: script(x), (torch.ones(2),), check_trace=False)
    called = [any(node.kind() == "prim::CallFunction" for node in traced.graph.nodes()) for traced in (plain, as_it_is)]
    assert called == [False, True]
