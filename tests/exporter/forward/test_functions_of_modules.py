"""Modules whose calls are calls of ONNX functions: the same numbers and gradients as without, and a file that says what the model is made of."""

from __future__ import annotations

import copy
import warnings

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import exporter
from exporter.files.inspect import inspect_model
from symbolics.errors import ArgumentError, ExportError
from symbolics.graph.walk import walk
from symbolics.node.names import CLASS_KEY, MARK_OP

HERE = __name__
ALLOW = [f"{HERE}:*"]
BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] * g * ctx.factor, None


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width=4, heads=2, factor=0.5):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.factor = heads, factor

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d)
        return x + Scaled.apply(self.out(y), self.factor)


class Conv(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, size, padding=size // 2), nn.BatchNorm2d(2)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))) + x


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Inner(), Inner()

    def forward(self, x):
        return self.b(self.a(x)) * 2 + x


class Model(nn.Module):
    """Some modules, and what is done with them."""

    def __init__(self, parts, call):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.call = call

    def forward(self, x):
        return self.call(self.parts, x)


def in_a_row(parts, x):
    for part in parts:
        x = part(x)
    return x


class Answers(Inner):
    def forward(self, x, scale=2.0, *, more=None, shifted=False):
        y = self.linear(x) * scale + shifted
        if more is not None:
            y = y + more["a"] * more["b"][0]
        return {"y": y, "z": (y.sum(-1), None, 3), "w": [y * 0.5]}


def asks(parts, x):
    one = parts[0](x)
    two = parts[1](one["y"], 3.0, more={"a": x, "b": (one["w"][0],)}, shifted=True)
    return parts[2](two["y"])["y"] + two["z"][0][:, None]


class Leaks(Inner):
    def forward(self, x):
        h = self.linear(x)
        self.aux = h.pow(2).mean()
        return h.relu() * self.outside


def leaks(parts, x):
    for part in parts:
        part.outside = torch.sigmoid(x.sum(-1, keepdim=True))
    return parts[1](parts[0](x)) + parts[0].aux + parts[1].aux


class Changes(Inner):
    def forward(self, x, cache):
        cache.add_(self.linear(x))
        return cache * 2


def changes(parts, x):
    cache = x * 0.0
    return parts[0](x, cache) + parts[1](x, cache) + cache


def stopped(parts, x):
    with torch.no_grad():
        y = parts[0](x)
    return parts[1](x).detach() + parts[2](x) * y


def unused(parts, x):
    parts[1](x)
    return parts[0](x)


def tied():
    one, two = Inner(), Inner()
    two.linear.weight = one.linear.weight
    return [one, two]


def hooked():
    one, two = Inner(), Inner()
    one.register_forward_hook(lambda module, args, output: output * 3)
    two.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return [one, two]


def weights_normed():
    return [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)]


def forces(parts, x):
    e = in_a_row(parts, x).pow(2).sum()
    return torch.autograd.grad(e, x, create_graph=True)[0]


ROWS, TOKENS, IMAGE = (3, 4), (2, 3, 4), (2, 2, 5, 5)
#: parts, what is done with them, the shape of x, functions=, the functions that the calls of the model itself are of
CASES = {
    "four blocks": (lambda: [Block() for _ in range(4)], in_a_row, TOKENS, [Block], ["Block"] * 4),
    "other numbers": (lambda: [Block(), Block(factor=0.25), Block(heads=1), Block()], in_a_row, TOKENS, ["Block"], ["Block", "Block_2", "Block_3", "Block"]),
    "convolutions": (lambda: [Conv(), Conv(), Conv(1)], in_a_row, IMAGE, [f"{HERE}:Conv"], ["Conv", "Conv", "Conv_2"]),
    "nested": (lambda: [Stage(), Inner(), Stage()], in_a_row, ROWS, [Stage, Inner], ["Stage", "Inner", "Stage"]),
    "twice": (lambda: [Inner()], lambda parts, x: parts[0](parts[0](x)) + parts[0](x) * parts[0](x), ROWS, [f"{HERE}.Inner"], ["Inner"] * 4),
    "tied": (tied, in_a_row, ROWS, [Inner], ["Inner"] * 2),
    "unused": (lambda: [Inner(), Inner()], unused, ROWS, [Inner], ["Inner"]),
    "containers and numbers": (lambda: [Answers(), Answers(), Answers()], asks, ROWS, [Answers], ["Answers", "Answers_2", "Answers_3"]),
    "by closure and attribute": (lambda: [Leaks(), Leaks()], leaks, ROWS, [Leaks], ["Leaks"] * 2),
    "an argument changed in place": (lambda: [Changes(), Changes()], changes, ROWS, [Changes], ["Changes"] * 2),
    "no_grad and detach": (lambda: [Inner(), Inner(), Inner()], stopped, ROWS, [Inner], ["Inner", "Inner_2", "Inner_2"]),
    "hooks": (hooked, in_a_row, ROWS, [Inner], ["Inner"] * 2),
    "weights that are computed": (weights_normed, in_a_row, ROWS, ["*:ParametrizedLinear"], ["ParametrizedLinear"] * 2),
    "gradients in the forward": (lambda: [Inner(), Inner()], forces, ROWS, [Inner], ["Inner", "Inner", "Inner_gradient", "Inner_gradient"]),
}  # fmt: skip


#: Behind a PythonOp, TorchScript knows other sizes than before one: there, the first call may be of another function than the next.
BY_PYTHON = ("four blocks", "other numbers")
#: tests/exporter/forward/test_functions_of_every_module.py has the others.
SOME = ("four blocks", "convolutions", "nested", "by closure and attribute")


def exported(case, dynamo, train=False, functions=None):
    parts, call, shape, named, _ = CASES[case]
    torch.manual_seed(0)
    model = Model(parts(), call).train(train)
    x = torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(
            model,
            (x,),
            dynamo=dynamo,
            functions=named if functions is None else functions,
            dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}},
        )
    return model, program


def calls_in(model):
    return [node.op_type for node in model.graph if node.op_identifier() in model.functions and node.op_type != MARK_OP]


def run(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


def check(case, dynamo, tmp_path):
    """Outputs and every gradient of the file, at two sizes, and of its gradient graph, are eager's; both have a call for each call."""
    model, program = exported(case, dynamo, train=case == "convolutions")
    found = calls_in(program.model)
    if dynamo or case not in BY_PYTHON:
        assert found == CASES[case][4]
    assert len(found) == len(CASES[case][4])
    assert set(dict(model.named_parameters())) <= set(program.model.graph.initializers) or case == "tied"
    program.save(tmp_path / "model.onnx")
    training = exporter.build_gradient_graph(tmp_path / "model.onnx")
    onnx.checker.check_model(ir.to_proto(training), full_check=True)
    assert len([name for name in calls_in(training) if name.startswith(CASES[case][4][0])]) > len(CASES[case][4])
    loaded, again, model = exporter.load(tmp_path / "model.onnx", allow=ALLOW), exporter.load(training, allow=ALLOW), copy.deepcopy(model)
    loaded.train(model.training)
    again.train(model.training)
    for size in (CASES[case][2][0], 4):
        x = torch.randn(size, *CASES[case][2][1:])
        torch.testing.assert_close(expected := run(model, x), run(loaded, x), rtol=1e-4, atol=1e-4)
        if size == 4:
            torch.testing.assert_close(run(again, x)[:3], expected[:3], rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.parametrize("case", SOME)
def test_as_in_eager(case, dynamo, tmp_path):
    check(case, dynamo, tmp_path)


@BOTH
def test_what_a_function_says(dynamo):
    """Its inputs are those of forward and the names in the state of the module; nodes know their place in it."""
    _, program = exported("four blocks", dynamo)
    function = program.model.functions[HERE, "Block", ""]
    assert (function.domain, function.metadata_props[CLASS_KEY]) == (HERE, f"{HERE}:Block")
    state = ["norm.weight", "norm.bias", "qkv.weight", "qkv.bias", "out.weight", "out.bias"]
    assert [value.name for value in function.inputs][:7] == ["x", *state] and [value.name for value in function.outputs] == ["output"]
    calls = [node for node in program.model.graph if node.domain == HERE]
    assert [value.name for value in calls[1].inputs[1:7]] == [f"parts.1.{name}" for name in state]
    assert [node.metadata_props["pythonop.module"] for node in calls] == [f"parts.{i}" for i in range(4)]
    assert "out" in {node.metadata_props.get("pythonop.module") for node in walk(function)}
    assert len(inspect_model(program.model).rows) == len(program.model.functions)
    assert exporter.load(program, allow=ALLOW)._onnx.plans.model.graph.num_nodes() > 60


def test_without_python():
    """With portable=, the Functions are functions inside of the modules'."""
    torch.manual_seed(0)
    model, x = Model([Block(), Block()], in_a_row), torch.randn(TOKENS)
    program = exporter.export(model, (x,), functions=[Block], portable=True)
    assert not program.opaque and calls_in(program.model) == ["Block", "Block"]
    torch.testing.assert_close(run(exporter.load(program), x), run(model, x), rtol=1e-4, atol=1e-4)


def test_training_steps_keep_the_calls():
    """The masks of dropout are of a number of their own each; the blocks share a function nevertheless."""
    losses = {}
    for functions in ((), [Block]):
        torch.manual_seed(0)
        model = Model([nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(3)], in_a_row)
        x = torch.randn(TOKENS)
        step = exporter.export_training_step(
            model, (x,), loss=F.mse_loss, targets=(x * 2,), dynamo=False, functions=functions and [nn.Sequential]
        )
        trainer = exporter.Trainer(step, allow=ALLOW)
        losses[bool(functions)] = [float(trainer.step({"x": x, "target": x * 2})) for _ in range(3)]
        calls = calls_in(step.model)
        assert len(calls) == 6 * bool(functions)
        if functions:  # the first has no gradient of the input
            assert calls == [
                "Sequential",
                "Sequential_2",
                "Sequential_2",
                "Sequential_gradient_2",
                "Sequential_gradient_2",
                "Sequential_gradient",
            ]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_two_exports_are_alike():
    one, two = (ir.to_proto(exported("nested", True)[1].model).SerializeToString(deterministic=True) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("functions", "error", "text"),
    [
        (["nothing:Here"], ArgumentError, "functions='nothing:Here' means none of the modules"),
        ([3], TypeError, "functions= takes modules, classes of them"),
    ],
)
def test_what_means_nothing(functions, error, text):
    with pytest.raises(error, match=text):
        exporter.export(Stage(), (torch.randn(ROWS),), functions=functions)


def test_opaque_and_a_function():
    with pytest.raises(ExportError, match="which opaque= means as well"):
        exporter.export(Stage(), (torch.randn(ROWS),), functions=[Inner], opaque=[Inner])
