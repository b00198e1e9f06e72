"""The private names of torch around operators of the dispatcher: a test each, as in test_torch_private.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from symbolics import torch_private as private
from tests.zoo.functions import Double


@pytest.fixture
def operator():
    library = torch.library.Library("private_names", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    library.impl("double", lambda x: Double.apply(x), "Autograd")
    yield torch.ops.private_names.double
    library._destroy()


def test_operator_name(operator):
    assert private.operator_name(operator) == private.operator_name(operator.default) == "private_names::double"
    assert private.operator_name(torch.ops.aten.sin.default) == private.operator_name(torch.sin) == private.operator_name(None) == ""


def test_kernel_of(operator):
    x = torch.ones(1, requires_grad=True)
    y = private.kernel_of(operator.default, "Autograd", [x])(x)
    assert y.item() == 2 and private.function_of(y.grad_fn) is Double
    assert private.kernel_of(operator.default, "", [x])(x).item() == 2
    assert private.kernel_of(operator.default, "Autograd", []) is None


def test_find_overload(operator):
    assert private.find_overload("private_names::double", "default") is operator.default
    assert private.find_overload("private_names::double", "other") is private.find_overload("private_names::nothing", "default") is None
    assert private.find_overload("load_library::x", "default") is None, "what torch.ops itself has is no namespace"


def test_overload_of(operator):
    x = torch.ones(1)
    assert private.overload_of(operator, (x,), {}) is private.overload_of(operator.default, (x,), {}) is operator.default
    assert private.overload_of(torch.ops.aten.add, (x, 1), {}) is torch.ops.aten.add.Tensor
    with pytest.raises(RuntimeError):
        private.overload_of(torch.ops.aten.add, ("x",), {})


def test_operator_classes(operator):
    overload, packet = private.operator_classes()
    assert type(operator) is packet and type(operator.default) is overload


def test_unwrapped_operator(operator):
    assert private.unwrapped_operator(operator.default)(torch.ones(1)).item() == 2


def test_check_schema(operator):
    private.check_schema(operator.default, (torch.empty(()),), {})
    for args in ((), (1,), (torch.empty(()), 2)):
        with pytest.raises((RuntimeError, TypeError)):
            private.check_schema(operator.default, args, {})


def test_definition_of(operator):
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    made = torch.library.custom_op("private_names_custom::triple", triple, mutates_args=())
    assert private.definition_of(torch.ops.private_names_custom.triple.default) is triple
    assert private.definition_of(operator.default) is None
    assert made is not None


def test_formula_of(operator):
    made = torch.library.custom_op("private_names_custom::thrice", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor")

    def setup(ctx, inputs, output):
        pass

    def backward(ctx, g):
        return g * 3

    assert private.formula_of(torch.ops.private_names_custom.thrice.default) == (None, None)
    made.register_autograd(backward, setup_context=setup)
    assert private.formula_of(torch.ops.private_names_custom.thrice.default) == (setup, backward)
    assert private.formula_of(operator.default) == (None, None)


def test_below_autograd(operator):
    seen = []

    def run(func, args, kwargs):
        seen.append((func, torch.is_grad_enabled(), kwargs))
        return func(*args, **kwargs)

    x = torch.ones(1, requires_grad=True)
    with private.below_autograd(run):
        y = operator(x)
    assert y.grad_fn is not None, "autograd is done with it"
    assert [(func, grad) for func, grad, _ in seen if func is torch.ops.aten.mul.Tensor] == [(torch.ops.aten.mul.Tensor, False)]


def test_is_python_kernel(operator):
    assert private.is_python_kernel(operator.default, "CPU") and private.is_python_kernel(operator.default, "AutogradCPU")
    assert not private.is_python_kernel(torch.ops.aten.sin.default, "CPU")
    assert not private.is_python_kernel(torch.ops.aten.sin.default, "AutogradCPU")


def test_generated_formula():
    def backward(ctx, *g):
        return g

    for kind in (torch.Tensor, list[torch.Tensor]):

        def same(x):
            return x[0].clone() if isinstance(x, list) else x.clone()

        same.__annotations__ = {"x": kind, "return": torch.Tensor}
        made = torch.library.custom_op("private_names_custom::same", same, mutates_args=())
        x = torch.ones(1, requires_grad=True)
        function = private.function_of(made(x if kind is torch.Tensor else [x]).grad_fn)
        assert private.is_generated(function) and private.generated_formula(function) is None
        made.register_autograd(backward)
        assert private.generated_formula(function) is backward


def test_is_generated(operator):
    function = private.function_of(operator(torch.ones(1, requires_grad=True)).grad_fn)
    assert function is Double and not private.is_generated(function)


def test_registered_at(operator):
    assert private.registered_at(operator.default) == __file__


@pytest.fixture
def composite(operator):
    library = torch.library.Library("private_names", "FRAGMENT")
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
    yield torch.ops.private_names.composite
    library._destroy()


def test_has_autograd_kernel(operator, composite):
    assert private.has_autograd_kernel(operator.default)
    assert not private.has_autograd_kernel(composite.default)


def test_has_fake_kernel(operator):
    assert not private.has_fake_kernel(operator.default)
    torch.library.register_fake("private_names::double", torch.empty_like)
    assert private.has_fake_kernel(operator.default)


def test_give_fake_kernel(operator):
    private.give_fake_kernel(torch.ops.aten.sin.default, None)  # it has one
    assert private.has_fake_kernel(torch.ops.aten.sin.default)
    assert all(map(private.has_fake_kernel, private.quantizers_with_masks()))


@pytest.mark.parametrize("place", range(3))
def test_quantizers_with_masks(place):
    """Where torch brings fake kernels of its own, ours can go: symbolics/quirks/pytorch/fake_quantization.py."""
    operator = private.quantizers_with_masks()[place]
    code = f"import torch; print(torch._C._dispatch_has_kernel_for_dispatch_key({operator.name()!r}, 'Meta'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_is_composite(operator, composite):
    assert private.is_composite(composite.default)
    assert not private.is_composite(operator.default)


def test_private_quantizers():
    one, channels, switched = private.private_quantizers()
    x, scale, zero = torch.tensor([[0.26, 9.0]]), torch.tensor([0.1]), torch.zeros(1)
    for got in (
        one(x, scale, zero, -8, 7, 1.0),
        channels(x, scale, zero, 0, -8, 7, 1.0),
        switched(x, scale, zero.int(), torch.ones(1), -8, 7)[0],
    ):
        torch.testing.assert_close(got, torch.tensor([[0.3, 0.7]]))


def test_schema_of(operator):
    assert private.schema_of(operator.default).name == "private_names::double"
    assert [argument.name for argument in private.schema_of(operator.default).arguments] == ["x"]


def test_torchlib_operators():
    found = private.torchlib_operators()
    assert {"aten::add.Tensor", "torchvision::roi_align"} & found >= {"torchvision::roi_align"} and "private_names::double" not in found


def test_signatures_of():
    found = {schema.overload_name: schema for schema in private.signatures_of("max")}
    assert [(a.name, a.kwarg_only, a.has_default_value(), a.is_out) for a in found["dim"].arguments] == [
        ("self", False, False, False),
        ("dim", False, False, False),
        ("keepdim", False, True, False),
    ]
    assert found["out"].arguments[-1].is_out and found["out"].arguments[-1].kwarg_only
    (tile,) = (schema for schema in private.signatures_of("tile") if not any(argument.is_out for argument in schema.arguments))
    assert str(tile.arguments[1].type).startswith("List")
    assert private.signatures_of("no_such_operator") == []


_M = torch.rand(3, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda f: f(torch.linalg.solve, _M, _M), "aten::linalg_solve"),  # torch takes it apart
        (lambda f: f(torch.Tensor.isclose, _M, _M), "aten::isclose"),
        (lambda f: f(torch.special.i0, _M), "aten::special_i0"),
        (lambda f: f(torch.Tensor.erfinv_, _M), "aten::erfinv_"),
        (lambda f: f(torch.ops.aten.add, _M, 2), "aten::add.Tensor"),
        (lambda f: f(torch.Tensor.size, _M), None),
    ],
)
@pytest.mark.parametrize("surrounded", [False, True])
def test_first_operator(call, name, surrounded):
    before = _M.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16) if surrounded else torch.no_grad():
        found = call(lambda func, *args: private.first_operator(func, args, {}))
    assert (found is None) if name is None else (found[0].name() == name and found[1][0] is _M and found[2] == {})
    assert torch.equal(before, _M), "it is not called"


def test_is_dispatched(operator):
    assert private.is_dispatched(operator.default) and private.is_dispatched(torch.ops.aten.relu.default)
    assert not private.is_dispatched(torch.ops.aten.save.default)


def test_autocast_schemas():
    cast, left = private.autocast_schemas("prod")
    assert {schema.overload_name for schema in cast} >= {"", "dim_int"} and all(
        schema.overload_name.startswith("dim_Dim") for schema in left
    )
    cast, left = private.autocast_schemas("fake_quantize_per_tensor_affine")
    assert [schema.overload_name for schema in (*cast, *left)] == ["", "tensor_qparams"]
    assert private.autocast_schemas("sum") == private.autocast_schemas("no_such_operator") == private.autocast_schemas("atan2") == ([], [])
