"""Gradients that are absent in a branch, in an iteration or in a loop that never runs: by a loaded file, against the same code in Python."""

from __future__ import annotations

import random

import onnx
import onnx.helper as oh
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import exporter

FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


class Lonely(torch.autograd.Function):
    """Its backward adds something for each output that has a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 0.5, x * 0.75

    @staticmethod
    def backward(ctx, g, h):
        return (0 if g is None else 0.5 * g + 0.1) + (0 if h is None else 0.75 * h - 0.2)


class Penalty(torch.autograd.Function):
    """Its backward adds something whenever it runs."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.5

    @staticmethod
    def backward(ctx, g):
        return g * 1.5 + 1


class Both(nn.Module):
    def forward(self, x):
        return sum(Lonely.apply(Penalty.apply(x)))


@pytest.fixture(scope="module")
def calls():
    """The nodes of the two calls, by the name of the Function."""
    proto = exporter.export(Both(), (torch.ones(3, requires_grad=True),)).model_proto
    found = [node for node in proto.graph.node if node.op_type == "PythonOp"]
    return {next(a.s.decode() for a in node.attribute if a.name == "name").rpartition(":")[2]: node for node in found}


def call(calls, function, x, *outputs):
    node = onnx.NodeProto()
    node.CopyFrom(calls[function])
    node.input[:], node.output[:] = [x], ["", *outputs]
    return node


STEPS = ("keep", "root", "scale", "call", "other", "gate")


def step(kind, place, values, c):
    """What one line of a body computes in Python."""
    x = values[place]
    if kind in ("call", "other"):
        return Lonely.apply(x)[kind == "other"]
    return {"keep": lambda: x, "root": lambda: torch.sqrt(x - 0.25), "scale": lambda: x * c, "gate": lambda: torch.where(x > 1, x, x - x)}[
        kind
    ]()


def lines(calls, kind, x, y):
    """The same as nodes."""
    if kind in ("call", "other"):
        return [call(calls, "Lonely", x, *([y, f"{y}_b"] if kind == "call" else [f"{y}_a", y]))]
    if kind == "keep":
        return [oh.make_node("Identity", [x], [y])]
    if kind == "scale":
        return [oh.make_node("Mul", [x, "c"], [y])]
    if kind == "root":
        return [oh.make_node("Sub", [x, "quarter"], [f"{y}_d"]), oh.make_node("Sqrt", [f"{y}_d"], [y])]
    return [
        oh.make_node("Greater", [x, "one"], [f"{y}_g"]), oh.make_node("Sub", [x, x], [f"{y}_z"]), oh.make_node("Where", [f"{y}_g", x, f"{y}_z"], [y])
    ]  # fmt: skip


def info(name, kind=FLOAT, dims=(3,)):
    return oh.make_tensor_value_info(name, kind, list(dims))


def loaded(nodes, calls, outputs, inputs):
    front = [
        oh.make_node("Constant", [], ["one"], value_float=1.0),
        oh.make_node("Constant", [], ["quarter"], value_float=0.25),
        call(calls, "Penalty", "x", "h"),
        oh.make_node("Exp", ["x"], ["e"]),
        oh.make_node("Sqrt", ["z"], ["c"]),
    ]
    graph = oh.make_graph([*front, *nodes], "g", [info("x"), info("z"), *inputs], outputs)
    imports = [oh.make_opsetid("", 20), oh.make_opsetid("com.microsoft", 1)]
    return exporter.load(oh.make_model(graph, opset_imports=imports, ir_version=10), allow=[f"{__name__}:*"])


X, Z = torch.tensor([0.25, 0.9, 1.7]), torch.tensor([0.0, 0.5, 1.2])


def compare(module, reference, outputs, *more):
    """Gradients of x and z for some of the outputs, by the file and by Python."""
    found = []
    for function in (reference, module):
        x, z = X.clone().requires_grad_(), Z.clone().requires_grad_()
        results = function(x, z, *more)
        results = results if isinstance(results, tuple) else (results,)
        chosen = [results[i] for i in outputs if results[i].requires_grad]
        if not chosen:
            return
        sum(value.sum() for value in chosen).backward()
        found.append([torch.zeros(3) if v.grad is None else v.grad for v in (x, z)])
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def a_loop(calls, drawn):
    """A loop over states that start as h, e and x, and stacked values of them; its body calls Lonely once at most."""
    kinds = [drawn.choice(STEPS) for _ in range(4)]
    for i in range(1, 4):
        kinds[i] = "keep" if kinds[i] in ("call", "other") and {"call", "other"} & set(kinds[:i]) else kinds[i]
    spec = [(kind, drawn.randrange(3)) for kind in kinds]
    body = [oh.make_node("Identity", ["go_in"], ["go_out"])]
    for number, (kind, place) in enumerate(spec):
        body += lines(calls, kind, f"s{place}", f"t{number}")
    states = [info(f"s{i}") for i in range(3)]
    graph = oh.make_graph(
        body,
        "body",
        [info("i", INT64, ()), info("go_in", BOOL, ()), *states],
        [info("go_out", BOOL, ()), *(info(f"t{i}") for i in range(4))],
    )
    nodes = [oh.make_node("Constant", [], ["go"], value=oh.make_tensor("go", BOOL, [], [1]))]
    nodes.append(oh.make_node("Loop", ["n", "go", "h", "e", "x"], ["a", "b", "d", "all"], body=graph))
    module = loaded(nodes, calls, [info("a"), info("b"), info("d"), info("all", dims=("n", 3))], [info("n", INT64, ())])

    def reference(x, z, n):
        values, stacked, c = [Penalty.apply(x), x.exp(), x], [], z.sqrt()
        for _ in range(int(n)):
            *values, last = [step(kind, place, values, c) for kind, place in spec]
            stacked.append(last)
        return (*values, torch.stack(stacked) if stacked else torch.zeros(0, 3))

    return module, reference, spec


@pytest.mark.parametrize("seed", range(4))
def test_loops(calls, seed):
    drawn = random.Random(seed)
    module, reference, spec = a_loop(calls, drawn)
    for outputs in ([0], [1], [2], [3], [0, 3]):
        for n in (0, 1, 2, 3):
            try:
                compare(module, reference, outputs, torch.tensor(n))
            except AssertionError as error:
                raise AssertionError(f"{spec}, outputs {outputs}, {n} iterations: {error}") from None


def an_if(calls, drawn):
    """Two Ifs in a row: each branch gives two values of what it captures or of what the first If gave."""
    nodes, specs = [], []
    for number in range(2):
        captured = ["h", "e", "x"] if number == 0 else ["h", "u0_0", "u0_1"]
        branches, spec = {}, []
        for name in ("then_branch", "else_branch"):
            kinds = [drawn.choice(STEPS), drawn.choice(STEPS[:3])]
            if number:
                kinds = [drawn.choice(("keep", "root", "scale", "gate")) for _ in kinds]
            chosen = [(kind, drawn.randrange(3)) for kind in kinds]
            if name == "else_branch" and not number:
                chosen = [("scale" if kind in ("call", "other") else kind, place) for kind, place in chosen]
            made = [f"{name}{number}_{i}" for i in range(2)]
            body = [n for (kind, place), y in zip(chosen, made) for n in lines(calls, kind, captured[place], y)]
            branches[name] = oh.make_graph(body, name, [], [info(y) for y in made])
            spec.append(chosen)
        nodes.append(oh.make_node("If", [f"p{number}"], [f"u{number}_0", f"u{number}_1"], **branches))
        specs.append(spec)
    outputs = [info("u0_0"), info("u1_0"), info("u1_1")]
    module = loaded(nodes, calls, outputs, [info("p0", BOOL, ()), info("p1", BOOL, (1,))])

    def reference(x, z, p0, p1):
        h, c = Penalty.apply(x), z.sqrt()
        first = [step(kind, place, [h, x.exp(), x], c) for kind, place in specs[0][not p0]]
        second = [step(kind, place, [h, *first], c) for kind, place in specs[1][not p1]]
        return (first[0], *second)

    return module, reference, specs


@pytest.mark.parametrize("seed", range(4))
def test_ifs(calls, seed):
    module, reference, specs = an_if(calls, random.Random(seed))
    for outputs in ([0], [1], [2], [0, 2]):
        for p0, p1 in ((p0, p1) for p0 in (False, True) for p1 in (False, True)):
            try:
                compare(module, reference, outputs, torch.tensor(p0), torch.tensor([p1]))
            except AssertionError as error:
                raise AssertionError(f"{specs}, outputs {outputs}, {p0} {p1}: {error}") from None


def cond_call(x):
    return torch.cond(x.sum() > 0, lambda x: Lonely.apply(x), lambda x: (x * 3, x * 1), (x,))[1]


def cond_operand(x):
    return torch.cond(x.sum() > 0, lambda x, h: x * 2, lambda x, h: h * 3, (x, Penalty.apply(x)))


def loop_call(x):
    return while_loop(lambda i, a, b: i < 2, lambda i, a, b: (i + 1, *Lonely.apply(a)), (torch.tensor(0), x * 1, x * 2))[1]


def scan_state(x):
    return scan(lambda c, v: (torch.sqrt(c), c * v), x, torch.ones(2, 3))[1]


@pytest.mark.parametrize("function", [cond_call, cond_operand, loop_call, scan_state])
def test_control_flow_of_torch_takes_zeros(function, tmp_path):
    """In eager mode each is one Function, whose backward gets zeros for what is absent, and hands zeros on."""

    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    exporter.export(Model(), (X,), eager_check=False).save(tmp_path / "m.onnx")
    found = []
    for each in (function, exporter.load(tmp_path / "m.onnx", allow=[f"{__name__}:*"])):
        x = X.clone().requires_grad_()
        each(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


@torch.jit.script
def scripted(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    out = h if bool(x[0] > 1) else x * 3
    for _ in range(x.shape[0] - 1):
        out = out + x
        x = torch.sqrt(x - 0.25)
    return out


def test_scripted_control_flow_hands_on_none():
    class Model(nn.Module):
        def forward(self, x):
            return scripted(x, Penalty.apply(x))

    module = exporter.load(exporter.export(Model(), (X,), dynamo=False, eager_check=False), allow=[f"{__name__}:*"])
    for x in (X, X + 2, X + 0.75):
        found = []
        for each in (Model(), module):
            x = x.detach().requires_grad_()
            each(x).sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0], equal_nan=True)


class Kept(torch.autograd.Function):
    """Its backward reads what forward gave out."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y + g**2 * y


def test_second_derivatives_of_what_is_absent():
    """In the loop a root of a negative number is computed, that nobody reads: neither derivative may see it."""

    class Model(nn.Module):
        def forward(self, x):
            h = Kept.apply(x)
            return scripted(h * h, h) * x

    module = exporter.load(exporter.export(Model(), (X,), dynamo=False, eager_check=False), allow=[f"{__name__}:*"])
    for x in (X, X - 3):
        found = []
        for each in (Model(), module):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            found.append([g.detach(), *torch.autograd.grad(g.sin().sum(), x)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5, equal_nan=True)
