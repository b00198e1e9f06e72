"""Calls of operators during an export: what is kept, what goes first, what belongs to whom."""

from __future__ import annotations

import pytest
import torch
from onnxscript import opset18 as op
from torch import Tensor, nn

import exporter
from exporter.verification.eager import SEED
from symbolics.capture.operator_calls import origin_of
from symbolics.errors import ExportError
from symbolics.node.attributes import read_attributes, values_of
from symbolics.node.operators import Operator
from tests.support import nodes
from tests.zoo.steep import Steep

LIBRARY = torch.library.Library("operator_calls", "DEF")
HELPED = torch.library.Library("operator_" + "helped", "DEF")
HELPED.define("op(Tensor x) -> Tensor")


@torch.library.custom_op("operator_calls::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, g: g * 5)

LIBRARY.define("steep(Tensor x) -> Tensor")
LIBRARY.impl("steep", lambda x: torch.round(x) * 2, "CompositeExplicitAutograd")
LIBRARY.impl("steep", lambda x: Steep.apply(x), "Autograd")
LIBRARY.define("made(int n) -> Tensor")
LIBRARY.impl("made", lambda n: torch.ones(n), "CompositeExplicitAutograd")
LIBRARY.define("version() -> int")
LIBRARY.impl("version", lambda: 3, "CompositeExplicitAutograd")
LIBRARY.define("over(Tensor x) -> Tensor")
LIBRARY.define("over.scaled(Tensor x, float factor) -> Tensor")
for _name in ("over", "over.scaled"):
    LIBRARY.impl(_name, lambda x, factor=2.0: x * factor, "CompositeExplicitAutograd")


@torch.library.custom_op("operator_calls::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(x + y)  # add_ refuses memory that both have a part of
    return x * y


add_into.register_fake(lambda x, y: torch.empty_like(x))


@torch.library.custom_op("operator_calls::scale_all", mutates_args=("each",))
def scale_all(each: list[Tensor]) -> None:
    for tensor in each:
        tensor.mul_(2)


class AddInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x.copy_(x + y)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, g


class Hidden(AddInto):
    """Returns another tensor, and says nothing of the change."""

    @staticmethod
    def forward(ctx, x, y):
        return x.add_(y) * y


class Call(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.weight = body, nn.Parameter(torch.tensor([0.5, 1.0, -1.5, 2.0]))

    def forward(self, x):
        return self.body(x * self.weight)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(SEED))


def names(program):
    return [read_attributes(values_of(node)).name for node in nodes(program.model, "PythonOp")]


def gradients(model, x=X):
    x = x.clone().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y.sum(), [x, *model.parameters()], allow_unused=True)


def assert_equal(model, program, allow=("operator_calls::*",)):
    torch.testing.assert_close(gradients(exporter.load(program, allow=allow)), gradients(model))


def test_one_node(dynamo):
    for body in (twice, torch.ops.operator_calls.twice, torch.ops.operator_calls.twice.default):
        model = Call(body)
        program = exporter.export(model, (X,), dynamo=dynamo)
        assert names(program) == ["operator_calls::twice.default"]
        (node,) = nodes(program.model, "PythonOp")
        call = read_attributes(values_of(node))
        assert call.operator.module == __name__ and call.operator.schema == "operator_calls::twice(Tensor x) -> Tensor"
        assert call.input_requires_grads == (True,) == call.output_requires_grads
        assert_equal(model, program)


def test_the_overload_that_the_arguments_mean(dynamo):
    program = exporter.export(Call(lambda x: torch.ops.operator_calls.over(torch.ops.operator_calls.over(x, 3.0))), (X,), dynamo=dynamo)
    assert names(program) == ["operator_calls::over.scaled", "operator_calls::over.default"]


def test_a_function_inside_belongs_to_the_operator(dynamo):
    model = Call(torch.ops.operator_calls.steep)
    program = exporter.export(model, (X,), dynamo=dynamo)
    assert names(program) == ["operator_calls::steep.default"]
    assert_equal(model, program)


def test_inlined_it_is_what_it_is_made_of(dynamo):
    program = exporter.export(Call(torch.ops.operator_calls.steep), (X,), dynamo=dynamo, inline=["operator_calls::steep"])
    assert names(program) == [f"{Steep.__module__}:Steep"]
    model = Call(twice)
    program = exporter.export(model, (X,), dynamo=dynamo, inline=["operator_calls::*"])
    assert not names(program) and nodes(program.model, "Add")


def test_an_inline_pattern_that_means_none(dynamo):
    with pytest.raises(ValueError, match="operator_calls::twise.*did you mean operator_calls::twice"):
        exporter.export(Call(twice), (X,), dynamo=dynamo, inline=["operator_calls::twise"])


def test_a_translation_goes_first():
    table = {torch.ops.operator_calls.twice.default: lambda x: op.Mul(x, op.Constant(value_float=2.0))}
    program = exporter.export(Call(twice), (X,), dynamo=True, custom_translation_table=table)
    assert not names(program) and len(nodes(program.model, "Mul")) == 2
    assert names(exporter.export(Call(twice), (X,), dynamo=True)) == ["operator_calls::twice.default"], "the next export has no table"
    torch.onnx.register_custom_op_symbolic("operator_calls::twice", lambda g, x: g.op("Add", x, x), 18)
    try:
        program = exporter.export(Call(twice), (X,), dynamo=False, opset_version=18)
    finally:
        torch.onnx.unregister_custom_op_symbolic("operator_calls::twice", 18)
    assert not names(program) and nodes(program.model, "Add")


def test_what_has_no_tensors_is_a_number_of_the_export(dynamo):
    model = Call(lambda x: x * torch.ops.operator_calls.version())
    program = exporter.export(model, (X,), dynamo=dynamo)
    assert not names(program)
    assert_equal(model, program)


def test_what_takes_no_tensor_is_a_node(dynamo):
    model = Call(lambda x: x + torch.ops.operator_calls.made(4))
    program = exporter.export(model, (X,), dynamo=dynamo)
    assert names(program) == ["operator_calls::made.default"]
    assert_equal(model, program)


def test_no_gradient_under_no_grad(dynamo):
    def body(x):
        with torch.no_grad():
            y = twice(x)
        return y + x

    model = Call(body)
    assert_equal(model, exporter.export(model, (X,), dynamo=dynamo))


def test_under_torch_func(dynamo):
    with pytest.raises(ExportError, match="operator_calls::twice.default, called in module .*torch.func.*inline="):
        exporter.export(Call(torch.func.vmap(twice)), (X,), dynamo=dynamo)


def test_other_threads_and_afterwards():
    with exporter.hook():
        assert torch.equal(twice(X), X + X)
    kinds = [type(torch.ops.operator_calls.twice), type(torch.ops.operator_calls.twice.default)]
    assert all("operator_calls.py" not in kind.__call__.__code__.co_filename for kind in kinds)


def test_verify(dynamo):
    report = exporter.verify(Call(lambda x: twice(x)), (X,), dynamo=dynamo)
    assert report.ok and report.functions == {"operator_calls::twice.default": 1}


def run(change):
    """A body that changes a copy, and returns what depends on it."""

    def body(h):
        base = h.clone()
        result = change(base)
        return base if result is None else result + base

    return body


ONE_MEMORY = {
    "the same": lambda h: add_into(h, h),
    "a part": lambda h: add_into(h, h[0]),
    "of a part": lambda h: add_into(h[0], h[0]).sum(),
    "parts that overlap": lambda h: add_into(h[:2], h[1:]).sum(),
    "detached": lambda h: add_into(h, h.detach()),
    "a list": lambda h: scale_all([h, h]),
    "a list with a part": lambda h: scale_all([h, h[0]]),
    "of a Function": lambda h: AddInto.apply(h, h[0]),
    "of a Function, the same": lambda h: AddInto.apply(h, h),
    "undeclared": lambda h: Hidden.apply(h, h),
}


@pytest.mark.parametrize("change", ONE_MEMORY.values(), ids=ONE_MEMORY)
@pytest.mark.filterwarnings("ignore:.*without ctx.mark_dirty")
def test_what_is_changed_shares_no_memory_with_another_argument(change, dynamo):
    kinds = "argument (x|each) in place, which shares memory with|a tensor in place that it is given (as argument x and as argument y|twice in argument each)"
    place = rf"{__name__}.*:{change.__code__.co_firstlineno}"
    with pytest.raises(ExportError, match=rf"{place}.* changes ({kinds}).*clone"), torch.no_grad():
        exporter.export(Call(run(change)), (X,), dynamo=dynamo)


APART = {
    "copies": lambda h: add_into(h, h.clone()),
    "rows": lambda h: add_into(h[:1], h[1:2]).sum(),
    "columns": lambda h: scale_all([h[:, :1], h[:, 1:]]),
    "read twice": lambda h: add_into(h.clone(), h) + add_into(h * 2, h),
}


@pytest.mark.parametrize("change", APART.values(), ids=APART)
def test_what_is_changed_is_apart_from_the_others(change):
    model = Call(run(change)).requires_grad_(False)
    program = exporter.export(model, (X,), dynamo=True)
    torch.testing.assert_close(exporter.load(program, allow=("operator_calls::*",))(X), model(X))


@torch.library.triton_op("operator_calls::on_triton", mutates_args=())
def on_triton(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize(
    ("overload", "caller", "module"),
    [
        (torch.ops.operator_calls.twice.default, "somebody:1", __name__),
        (torch.ops.operator_calls.steep.default, "somebody:1", __name__),
        (torch.ops.operator_calls.on_triton.default, "somebody:1", __name__),
        # What the source of this module does not name, a helper registered for whoever calls it.
        (getattr(torch.ops, "operator_" + "helped").op.default, "somebody:1", "somebody"),
        (getattr(torch.ops, "operator_" + "helped").op.default, "", __name__),
    ],
)
def test_the_module_that_registers_an_operator(overload, caller, module):
    assert origin_of(Operator.of(overload), caller).module == module
