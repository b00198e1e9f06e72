"""torch.func inside a forward that is exported: values as in eager, and what is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch.overrides import TorchFunctionMode

import exporter
from symbolics.errors import ExportError
from tests.symbolics.capture.test_gradients_in_forward import exported, results

F64 = torch.float64
X = torch.tensor([0.5, -1.5, 2.0], dtype=F64)


def cube(x):
    return (x**3).sum()


def with_aux(x):
    return cube(x), x * 7


def pair(x):
    return x**2, x.sin()


class HandsOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(x):
    with HandsOn():
        return torch.func.grad(cube)(x)


CASES = {
    "grad": lambda x: torch.func.grad(cube)(x),
    "grad_of_second": lambda x: torch.func.grad(lambda a, b: (a * b * b).sum(), argnums=1)(x, x),
    "grad_of_both": lambda x: torch.func.grad(lambda a, b: (a * b * b).sum(), argnums=(0, 1))(x, x + 1),
    "grad_of_dict": lambda x: torch.func.grad(lambda d: (d["a"] * d["b"]).sum())({"a": x, "b": 2 * x})["a"],
    "grad_with_aux": lambda x: torch.func.grad(with_aux, has_aux=True)(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(cube)(x),
    "grad_of_constant": lambda x: torch.func.grad(lambda z: x.sum())(x),
    "inner_variable": lambda x: torch.func.grad(lambda a: torch.func.grad(lambda b: (a * b * b).sum())(x).sum())(x),
    "vjp": lambda x: torch.func.vjp(pair, x)[1]((x, x))[0],
    "vjp_with_aux": lambda x: torch.func.vjp(with_aux, x, has_aux=True)[2],
    "jvp": lambda x: torch.func.jvp(pair, (x,), (x,))[1],
    "jvp_of_constant": lambda x: torch.func.jvp(lambda z: torch.ones_like(z), (x,), (x,)),
    "jacrev": lambda x: torch.func.jacrev(pair)(x),
    "jacrev_in_chunks": lambda x: torch.func.jacrev(pair, chunk_size=2)(x)[0],
    "jacfwd": lambda x: torch.func.jacfwd(pair)(x),
    "jacfwd_with_aux": lambda x: torch.func.jacfwd(with_aux, has_aux=True)(x),
    "hessian": lambda x: torch.func.hessian(cube)(x),
    "not_differentiable_input": lambda x: torch.func.grad(lambda z: (z * x).sum())(torch.arange(3, dtype=F64)),
    "under_a_mode": under_a_mode,
}


def _leaves(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("name", CASES)
def test_torchscript_gives_eagers_values(name):
    function = CASES[name]
    got = results(exported(function, X, dynamo=False), X)
    for y, z in zip(got, _leaves(function(X)), strict=True):
        torch.testing.assert_close(torch.from_numpy(y), z, rtol=1e-12, atol=1e-12)


def test_dynamo_gives_eagers_values():
    """Some at once, beside those of `tests.zoo.differentiating`: an export is what takes the time."""
    names = (
        "grad_of_dict",
        "grad_with_aux",
        "grad_of_constant",
        "inner_variable",
        "vjp_with_aux",
        "jvp_of_constant",
        "not_differentiable_input",
        "under_a_mode",
    )

    def forward(x):
        return tuple(leaf for name in names for leaf in _leaves(CASES[name](x)))

    got = results(exported(forward, X), X)
    for y, z in zip(got, forward(X), strict=True):
        torch.testing.assert_close(torch.from_numpy(y), z, rtol=1e-12, atol=1e-12)


def made_before(x):
    return MADE(x)


MADE = torch.func.jacrev(pair)  # before any hook was open


def test_a_transform_that_was_made_before(dynamo):
    got = results(exported(made_before, X, dynamo=dynamo), X)
    for y, z in zip(got, made_before(X), strict=True):
        torch.testing.assert_close(torch.from_numpy(y), z)


REFUSED = {
    "vmap": (lambda x: torch.func.vmap(torch.func.grad(lambda z: z**2))(x), "call it outside vmap, on the sum over the batch", None),
    "no_scalar": (lambda x: torch.func.grad(lambda z: z * 2)(x), "it has to return a scalar tensor", "to return a scalar Tensor"),
    "integers": (lambda x: torch.func.vjp(lambda z: z.long(), x)[0], "it has to return floating point tensors", "must be floating-point"),
    "no_aux": (lambda x: torch.func.grad(cube, has_aux=True)(x), r"has to return a tuple \(output, aux\)", r"a tuple: \(output, aux\)"),
    "structure": (lambda x: torch.func.vjp(pair, x)[1](x), "not in the structure of the outputs", "pytree structure of cotangents"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, dynamo):
    """What eager refuses, too, in eager's words; where nobody asks eager, in ours."""
    function, says, eagers = REFUSED[name]
    if eagers:
        with pytest.raises(ExportError, match=f"(?s)fails in eager mode.*{eagers}.*at test_transforms.py:"):
            exported(function, X, dynamo=dynamo)
    with pytest.raises(ExportError, match=says) as error:
        exported(function, X, dynamo=dynamo, eager_check=not eagers)
    assert re.search(r"called in module .* at tests.symbolics.capture.test_transforms:\d+", str(error.value))


def test_a_jacobian_of_a_dynamic_size(dynamo):
    with pytest.raises(ExportError, match="a dynamic dimension"):
        exported(lambda x: torch.func.jacrev(pair)(x)[0], X, dynamo=dynamo, dynamic_shapes=(({0: torch.export.Dim("n")},),))


class Pushes(torch.autograd.Function):
    """sin(x), with a jvp that is not the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return 5 * tangent * ctx.saved_tensors[0].cos()


OWN_JVP = {
    "jvp": lambda x: torch.func.jvp(Pushes.apply, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda x: torch.func.jacfwd(lambda z: Pushes.apply(z * x))(x),
    "hessian": lambda x: torch.func.hessian(lambda z: Pushes.apply(z).sum())(x),
    "detached": lambda x: torch.func.jvp(lambda z: Pushes.apply(z * 2), (x,), (torch.ones_like(x),))[1].detach() * x,
}


@pytest.mark.parametrize("name", OWN_JVP)
def test_a_function_with_a_jvp_of_its_own(name, dynamo):
    """Eager runs it; a vjp of a vjp would give other numbers."""
    says = r"Pushes, called in module <root> at .*test_transforms:\d+: it has a jvp of its own, which torch.func.jvp"
    with pytest.raises(ExportError, match=says):
        exported(OWN_JVP[name], X, dynamo=dynamo)


def around(x):
    y = Pushes.apply(x)
    return torch.func.jvp(lambda z: z * y * Pushes.apply(x), (x,), (torch.ones_like(x),))[1]


def test_a_jvp_of_its_own_that_no_tangent_reaches(dynamo):
    program = exported(around, X, dynamo=dynamo)
    got = exporter.inference_session(program.model_proto, allow=[f"{__name__}:*"]).run(
        None, {program.model.graph.inputs[0].name: X.numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(got[0]), around(X))


def test_a_jvp_of_its_own_that_is_inlined(dynamo):
    """The derivative of its forward, which was asked for."""
    got = results(exported(OWN_JVP["jvp"], X, dynamo=dynamo, inline=[f"{__name__}:Pushes"]), X)
    torch.testing.assert_close(torch.from_numpy(got[0]), X.cos())
