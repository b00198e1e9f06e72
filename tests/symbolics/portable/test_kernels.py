"""Operators of torch.library as ONNX functions: what a tracer sees of them, and which stay PythonOps and why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import exporter
from symbolics.errors import ExportError, PythonopWarning, UnsupportedOperatorError
from tests.support import nodes

LIBRARY = torch.library.Library("portable_kernels", "DEF")


def operator(name, function, formula=None, setup_context=None):
    """An operator of a Python function, its fake kernel that says nothing of values, and perhaps a backward."""
    arguments = "Tensor x, Tensor g" if function.__code__.co_argcount == 2 else "Tensor x"
    made = torch.library.custom_op(f"portable_kernels::{name}", function, mutates_args=(), schema=f"({arguments}) -> Tensor")
    made.register_fake(lambda x, *rest: torch.empty_like(x))
    if formula is not None:
        made.register_autograd(formula, setup_context=setup_context)
    return made


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _cube(x: Tensor) -> Tensor:
    return x**3


def _cube_backward(ctx, g):
    x, y = ctx.saved_tensors
    return g * (7 * x + y)


cube = operator("cube", _cube, _cube_backward, _keep)


def _through(x: Tensor) -> Tensor:
    return cube(x) + 1


through = operator("through", _through, lambda ctx, g: 5 * g)


def _slope(x: Tensor, g: Tensor) -> Tensor:
    return 3 * g * x


slope = operator("slope", _slope)
bent_slope = operator("bent_slope", _slope, lambda ctx, g: (g, g))


def _square(x: Tensor) -> Tensor:
    return x * x


square = operator("square", _square, lambda ctx, g: slope(ctx.saved_tensors[0], g), _keep)
bent_square = operator("bent_square", _square, lambda ctx, g: bent_slope(ctx.saved_tensors[0], g), _keep)
once_square = operator("once_square", _square, once_differentiable(lambda ctx, g: 3 * g * ctx.saved_tensors[0]), _keep)
unknown = operator("unknown", _square)


def _tripled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 3)


on_numpy = operator("on_numpy", _tripled, lambda ctx, g: 5 * g)


@torch.library.custom_op("portable_kernels::grow", mutates_args=("x",))
def grow(x: Tensor) -> None:
    x.mul_(2)


class Tenfold(Function):
    @staticmethod
    def forward(ctx, x):
        return cube(x)

    @staticmethod
    def backward(ctx, g):
        return 10 * g


class Squares(Function):
    """Its backward calls an operator that has no backward."""

    slope = slope

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @classmethod
    def backward(cls, ctx, g):
        return cls.slope(ctx.saved_tensors[0], g)


class BentSquares(Squares):
    slope = bent_slope


GLOBAL = torch.tensor(3.0)
with_global = operator("with_global", lambda x: x * GLOBAL, lambda ctx, g: 5 * g)
noisy = operator("noisy", lambda x: x + torch.rand_like(x), lambda ctx, g: 5 * g)
branching = operator("branching", lambda x: x * 2 if x.sum() > 0 else x * 3, lambda ctx, g: 5 * g)

for _name in ("of_library", "plain", "around"):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: x * x, "CompositeExplicitAutograd")
torch.library.register_autograd("portable_kernels::of_library", lambda ctx, g: 5 * g, lib=LIBRARY)
LIBRARY.impl("around", lambda x: Tenfold.apply(x) * x, "Autograd")
LIBRARY.define("of_function(Tensor x) -> Tensor")
LIBRARY.impl("of_function", lambda x: x * x, "CPU")
LIBRARY.impl("of_function", lambda x: Tenfold.apply(x), "Autograd")
LIBRARY.define("ones(int n) -> Tensor")
LIBRARY.impl("ones", lambda n: torch.ones(n) * 2, "CompositeExplicitAutograd")


class Call(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.weight = body, nn.Parameter(torch.tensor([0.5, 1.0, -1.5, 2.0]))

    def forward(self, x):
        return self.body(x * self.weight)


X = torch.linspace(-2, 2, 12).reshape(3, 4)


def grown(x):
    y = x.detach() * 1
    grow(y)
    return y + x


def in_cpp(x):
    rows = torch.ops.quantized.embedding_bag_byte_unpack(torch.cat([x.detach().abs()] * 3, 1).to(torch.uint8))
    return x * (rows[:, :1] > 1)


def gradients(model, x, order):
    """The outputs, and the gradients of order 1 (and 2) of the input and the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    wanted = [x, *model.parameters()]
    first = torch.autograd.grad((y * y).sum(), wanted, create_graph=order > 1)
    return y, *first, *(torch.autograd.grad(sum((g * g).sum() for g in first), wanted) if order > 1 else ())


ops = torch.ops.portable_kernels
PORTABLE = {
    "custom_op": (cube, 2),
    "it calls another": (through, 2),
    "its backward calls another": (square, 1),
    "once_differentiable": (once_square, 1),
    "of a Library": (ops.of_library, 2),
    "a Function on the Autograd key": (ops.of_function, 2),
    "in a Function": (Tenfold.apply, 2),
    "in the backward of a Function": (Squares.apply, 1),
    "without a gradient": (lambda x: unknown(x.detach()) + x, 2),
    "without a tensor": (lambda x: x * ops.ones(4), 2),
}


@pytest.mark.parametrize(("body", "order"), PORTABLE.values(), ids=PORTABLE)
def test_a_function_with_the_backward_of_the_operator(body, order, dynamo):
    model = Call(body)
    rows = {"dynamic_shapes": ({0: torch.export.Dim("rows", min=2)},)} if body is cube else {}
    program = exporter.export(model, (X,), dynamo=dynamo, portable=True, **rows)
    assert not nodes(program.model, "PythonOp") and [call.kind for call in program.portable] == ["function"]
    for x in (X, X[:2] / 3) if rows else (X,):
        torch.testing.assert_close(gradients(exporter.load(program), x, order), gradients(model, x, order))
    session = exporter.inference_session(program)
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0], model(X).detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "body", [square, once_square, Squares.apply], ids=["a backward without a backward", "once_differentiable", "of a Function"]
)
def test_where_eager_has_no_second_derivative_the_file_has_none(body):
    model = Call(body)
    (first,) = torch.autograd.grad((model(X) ** 2).sum(), [model.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula|once_differentiable"):
        first.sum().backward()
    program = exporter.export(model, (X,), dynamo=False, portable=True)
    with pytest.raises(UnsupportedOperatorError, match="once_differentiable"):
        exporter.build_gradient_graph(exporter.build_gradient_graph(program))


OPAQUE = {
    "in place": (grown, "changes an argument in place"),
    "no backward": (unknown, "no autograd formula was registered"),
    "numpy": (on_numpy, r"\.numpy\(\)"),
    "a second derivative of another": (bent_square, "its backward calls an operator .*whose own backward"),
    "a global tensor": (with_global, "reads a tensor that is none of its arguments"),
    "random": (noisy, "draws random numbers"),
    "a branch": (branching, "depends on the values of a tensor"),
    "C++": (in_cpp, "no Python function"),
    "differentiated inside": (ops.plain, "no single backward.*inline="),
    "around a Function": (ops.around, "no single backward.*inline="),
}


@pytest.mark.parametrize(("body", "why"), OPAQUE.values(), ids=OPAQUE)
def test_who_stays_a_PythonOp(body, why, dynamo):
    model = Call(body)
    with pytest.warns(PythonopWarning, match=f"(portable_kernels|quantized)::.* stays a PythonOp, and the file needs Python: .*{why}"):
        program = exporter.export(model, (X,), dynamo=dynamo, portable=True)
    assert len(nodes(program.model, "PythonOp")) == 1
    assert [call.kind for call in program.portable] == ["PythonOp"]
    with pytest.raises(
        ExportError, match=rf"(?s)(portable_kernels|quantized)::.*called in module .*no ONNX function can stand for it.*{why}.*way out"
    ):
        exporter.export(model, (X,), dynamo=dynamo, portable=["portable_kernels::*", "quantized::*"])


def test_a_Function_whose_backward_calls_an_operator_with_another_backward():
    with pytest.warns(PythonopWarning, match="BentSquares.* stays a PythonOp.*its backward calls an operator .*whose own backward"):
        exporter.export(Call(BentSquares.apply), (X,), dynamo=False, portable=True)


def test_patterns_choose(dynamo):
    program = exporter.export(Call(lambda x: square(cube(x))), (X,), dynamo=dynamo, portable=["portable_kernels::cube"])
    assert [call.function for call in program.portable] == ["portable_kernels::cube.default"]
    assert [node.attributes["name"].as_string() for node in nodes(program.model, "PythonOp")] == ["portable_kernels::square.default"]
