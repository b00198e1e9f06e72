"""Calls of Functions as ONNX functions: their own backward, who stays a PythonOp and why, sharing, sizes."""

from __future__ import annotations

import copy
import io
import warnings

import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ArgumentError, ExportError, FormatError, PythonopWarning, UnsupportedOperatorError
from symbolics.node.names import OPAQUE_PROPERTY, PORTABLE_DOMAIN
from tests.support import Calls, nodes
from tests.zoo.hiding import Recomputes, Reversible
from tests.zoo.portable import (
    AppliesInBackward,
    AppliesInForward,
    AppliesItself,
    AppliesOnce,
    AppliesUnseen,
    AsksForNone,
    Branches,
    Checks,
    Constant,
    Noise,
    OnceSquare,
    ReadsGlobal,
    Rows,
    SecondAlone,
    Square,
    Surrogate,
)


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def dynamo(request):
    return request.param


def check(model, args, dynamo, *, others=(), **options):
    """Export with portable=True, and compare outputs and gradients with eager; also on other arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(copy.deepcopy(model), args, dynamo=dynamo, portable=True, **options)
    assert not nodes(program.model, "PythonOp")
    onnx.checker.check_model(program.model_proto, full_check=True)
    loaded = exporter.load(program)
    for given in (args, *others):
        ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        y, z = loaded(*ours), model(*theirs)
        torch.testing.assert_close(y, z)
        g = torch.randn_like(z)
        loaded.zero_grad()
        model.zero_grad()
        y.backward(g)
        z.backward(g)
        for a, b in zip((*ours, *loaded.parameters()), (*theirs, *model.parameters()), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                # Sums over pixels and samples, in another order: which one depends on the processor.
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5 * max(1.0, float(b.grad.abs().max())))
    return program


class Net(nn.Module):
    def __init__(self, *slopes):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in slopes)
        self.slopes = slopes

    def forward(self, x):
        for linear, slope in zip(self.linears, self.slopes, strict=True):
            x = Surrogate.apply(linear(x), slope) + x
        return x


def test_equal_calls_share_a_function(dynamo):
    program = check(Net(2.0, 3.0, 2.0, 2.0), (torch.randn(3, 4),), dynamo)
    assert len(program.model.functions) == 4  # two slopes, forward and backward
    assert [call.kind for call in program.portable] == ["function"] * 4
    assert {call.module for call in program.portable} == {""}
    assert all("test_portable" in call.source for call in program.portable)


def test_names_that_would_meet_are_kept_apart(dynamo):
    class Foo(Surrogate):
        pass

    class Foo_2(Surrogate):
        pass

    class Foo_backward(Surrogate):
        pass

    for cls in (Foo, Foo_2, Foo_backward):  # the second Foo, and the backward of the first, would have their names
        cls.__qualname__ = cls.__name__
    calls = [(Foo_2, 2.0), (Foo, 3.0), (Foo, 5.0), (Foo_backward, 7.0), (Foo, 11.0)]

    class Model(nn.Module):
        def forward(self, x):
            for cls, slope in calls:
                x = cls.apply(x * 0.5, slope) + x
            return x

    program = check(Model(), (torch.randn(3, 4),), dynamo)
    assert len(program.model.functions) == 2 * len(calls)


class KeepsConstants(torch.autograd.Function):
    """Numbers that no input decides are kept for backward: saved, and as an attribute."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, torch.tensor(1.3))
        ctx.shift = torch.tensor([0.5])
        return x * 1.3 + ctx.shift

    @staticmethod
    def backward(ctx, g):
        x, slope = ctx.saved_tensors
        return g * slope * x.sign() + ctx.shift


def test_constants_that_are_kept_for_backward(dynamo):
    check(Calls(KeepsConstants.apply), (torch.randn(2, 3),), dynamo)


def test_two_exports_are_byte_for_byte_alike(dynamo):
    torch.manual_seed(0)
    model = Net(2.0, 3.0)
    first, second = (exporter.export(model, (torch.ones(3, 4),), dynamo=dynamo, portable=True) for _ in range(2))
    assert [ir.to_proto(f).SerializeToString(deterministic=True) for f in first.model.functions.values()] == [
        ir.to_proto(f).SerializeToString(deterministic=True) for f in second.model.functions.values()
    ]


def test_sizes_stay_dynamic(dynamo):
    rows = torch.export.Dim("rows", min=2)
    check(Net(2.0), (torch.randn(3, 4),), dynamo, others=[(torch.randn(9, 4),)], dynamic_shapes=({0: rows},))


def test_code_that_depends_on_a_size_is_no_function(dynamo):
    rows = torch.export.Dim("rows", min=2)
    model, x = Calls(lambda x: Rows.apply(x * 2)), torch.randn(3, 4)
    with pytest.warns(
        PythonopWarning, match=r"Rows in module <root> at .*stays a PythonOp.*depends on a size \(axis 0 of tensor input 0; in \w+ at .*\)"
    ):
        program = exporter.export(model, (x,), dynamo=dynamo, portable=True, dynamic_shapes={"args": ({0: rows},)})
    assert nodes(program.model, "PythonOp")
    check(model, (x,), dynamo)  # of one size, it can be one


@pytest.mark.parametrize("function", [Constant, SecondAlone, AsksForNone])
def test_one_output_of_two(function, dynamo):
    """Eager calls a backward whichever of its gradients flows, with zeros for the others."""
    check(Calls(lambda x: function.apply(x * 2)[0]), (torch.randn(3, 4),), dynamo)


@pytest.mark.parametrize("function", [Constant, SecondAlone])
def test_a_gradient_of_one_output_alone(function, dynamo):
    model, x = Calls(lambda x: function.apply(x * 2)), torch.randn(3, 4)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo, portable=True))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loaded(ours)[0].sum().backward()
    model(theirs)[0].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Branches.apply, "depends on the values of a tensor"),
        (ReadsGlobal.apply, "reads a tensor that is none of its arguments"),
        (Noise.apply, "draws random numbers"),
        (lambda x: torch.stack(AsksForNone.apply(x)), "set_materialize_grads"),
        (AppliesInBackward.apply, "applies the Function tests.zoo.portable:Slope, whose own backward"),
        (AppliesItself.apply, "applies the Function tests.zoo.portable:AppliesItself, whose own backward"),
    ],
    ids=["branch", "global tensor", "random", "asks for None", "Function in backward", "itself in backward"],
)
def test_who_stays_a_PythonOp(function, why, dynamo):
    model, x = Calls(lambda x: function(x * 2)), torch.randn(3, 4)
    with pytest.warns(PythonopWarning, match=f"stays a PythonOp, and the file needs Python: .*{why}"):
        program = exporter.export(model, (x,), dynamo=dynamo, portable=True)
    (call,) = program.portable
    assert call.kind == "PythonOp"
    assert why in call.reason
    (node,) = nodes(program.model, "PythonOp")
    assert why in node.metadata_props[OPAQUE_PROPERTY]
    with pytest.raises(ExportError, match=rf"(?s)called in module <root> at .*no ONNX function can stand for it: .*{why}.*way out"):
        exporter.export(model, (x,), dynamo=dynamo, portable=["tests.zoo.portable:*"])


def test_all_that_cannot_be_portable_are_named_at_once(dynamo):
    model, x = Calls(lambda x: Branches.apply(AppliesItself.apply(x * 2))), torch.randn(3, 4)
    with pytest.raises(
        ExportError, match=r"(?s)no ONNX function can stand for it.*likewise, each for a reason of its own: \S+:Branches\n.*make-a-function"
    ) as caught:
        exporter.export(model, (x,), dynamo=dynamo, portable=["tests.zoo.portable:*"])
    assert len(str(caught.value).splitlines()) <= 6


def test_patterns_choose(dynamo):
    model, x = Calls(lambda x: Square.apply(Surrogate.apply(x * 2, 1.0))), torch.randn(3, 4)
    program = exporter.export(model, (x,), dynamo=dynamo, portable=["Surrogate"])
    assert [call.function.split(":")[1] for call in program.portable] == ["Surrogate"]
    assert [node.attributes["name"].as_string().split(":")[1] for node in nodes(program.model, "PythonOp")] == ["Square"]
    with pytest.raises(ArgumentError, match=r"portable='Surogate' means none.*did you mean .*Surrogate"):
        exporter.export(model, (x,), dynamo=dynamo, portable=["Surogate"])


def test_a_check_that_only_raises_is_passed_with_a_warning(dynamo):
    model, x = Calls(lambda x: Checks.apply(x * 2)), torch.randn(3, 4)
    with pytest.warns(PythonopWarning, match="a check in module <root> at .*depends on the values of a tensor"):
        program = exporter.export(model, (x,), dynamo=dynamo, portable=True)
    assert not nodes(program.model, "PythonOp")


def test_a_second_derivative_is_that_of_eager(dynamo):
    model, x = Calls(lambda x: Square.apply(x * 2)), torch.linspace(0.5, 1.5, 4).requires_grad_()
    program = check(model, (x.detach(),), dynamo)
    training = exporter.build_gradient_graph(exporter.build_gradient_graph(program))
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    session = exporter.inference_session(training)
    names = [value.name for value in session.get_inputs()]
    feeds = dict.fromkeys(names, torch.zeros(4).numpy()) | {names[0]: x.detach().numpy(), names[1]: torch.ones(4).numpy()}
    # The gradient of x_grad in the direction of ones: its cotangent is the last input.
    of_gradient = next(name for name in names[2:] if name.startswith(session.get_outputs()[1].name.removesuffix("_out")))
    feeds[of_gradient] = torch.ones(4).numpy()
    found = dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))
    assert any(torch.allclose(torch.from_numpy(value), second) for name, value in found.items() if "grad" in name), (found, second)


@pytest.mark.parametrize("function", [AppliesInForward, AppliesOnce, AppliesUnseen])
def test_a_Function_inside_that_no_second_derivative_goes_through(function, dynamo):
    program = check(Calls(lambda x: function.apply(x * 2)), (torch.linspace(0.5, 1.5, 4),), dynamo)
    assert [call.kind for call in program.portable] == ["function"]


def test_once_differentiable_stays_so(dynamo):
    program = check(Calls(lambda x: OnceSquare.apply(x * 2)), (torch.randn(4),), dynamo)
    with pytest.raises(UnsupportedOperatorError, match="once_differentiable"):
        exporter.build_gradient_graph(exporter.build_gradient_graph(program))


def test_functions_that_somebody_inlined_are_missed(dynamo):
    program = exporter.export(Net(2.0), (torch.randn(3, 4),), dynamo=dynamo, portable=True)
    flat = onnx.inliner.inline_local_functions(program.model_proto)
    with pytest.raises(FormatError, match="written with 1 functions that have a backward of their own and has 0"):
        exporter.build_gradient_graph(flat)
    exporter.inference_session(flat).run(None, {flat.graph.input[0].name: torch.ones(3, 4).numpy()})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.GELU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4)),
            (2, 2, 9, 9),
        ),
        (lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2), nn.SiLU(), nn.AvgPool2d((1, 3))), (1, 2, 6)),
        (Attention, (2, 5, 8)),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.RMSNorm(6), nn.Linear(6, 4)), (3, 4)),
    ],
    ids=["convolutions", "transposed", "attention", "norms"],
)
def test_the_backward_of_a_hidden_module(module, shape, dynamo):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module()

        def forward(self, x):
            return Recomputes.apply(x * 2, self.inner)

    torch.manual_seed(0)
    check(Model(), (torch.randn(*shape),), dynamo)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(x)


def test_a_module_that_changes_a_buffer_stays_inlined(dynamo):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = Buffered(), nn.Linear(2, 2)

        def forward(self, x):
            return Reversible.apply(x, self.f, self.g)

    with pytest.warns(
        PythonopWarning, match=r"Reversible in module <root>: inlined.*No function of the file can stand for it: .*changes 'norm"
    ):
        program = exporter.export(Model(), (torch.randn(3, 4),), dynamo=dynamo, portable=True)
    assert not program.model.functions.get((PORTABLE_DOMAIN, "tests_zoo_hiding_Reversible", ""))
    assert "tests.zoo.hiding:Reversible" in program.inlined


def test_the_hook_takes_it_too(dynamo):
    model, x = Net(2.0), torch.randn(3, 4)
    with exporter.hook(portable=True) as handle:
        torch.onnx.export(model, (x,), None if dynamo else io.BytesIO(), dynamo=dynamo)
    assert not nodes(handle.program.model, "PythonOp")
    assert handle.program.model.functions
