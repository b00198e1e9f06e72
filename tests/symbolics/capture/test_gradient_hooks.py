"""Hooks on gradients: carried as a Python call in the backward, or refused by name; what changes nothing is warned of."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import exporter
from exporter.files.trust import unregister
from symbolics.capture.gradient_hooks import changes_nothing
from symbolics.errors import ExportError, PythonopWarning, TrustError
from tests.support import nodes
from tests.trains import assert_step_alike


def tenfold(g):
    return g * 10


def plus_one(g):
    return g + 1


def scaled(factor, g):
    return g * factor


def keeps(g):
    return None


HOOKS = [tenfold, plus_one, f"{__name__}:scaled", keeps]


def tenfold_of_module(module, into, *outof):
    return tuple(g if g is None else g * 10 for g in into)


def looks(module, into, *outof):
    print(len(into))


def in_grad(parameter):
    parameter.grad.mul_(10)


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self, x)


def plain(m, x):
    return m.b(m.a(x).sin())


def hooked(*hooks):
    def body(m, x):
        h = m.a(x).sin()
        for hook in hooks:
            h.register_hook(hook)
        return m.b(h) + h * 3

    return body


def before_its_hook(m, x):
    h = m.a(x).sin()
    k = h * 2
    h.register_hook(tenfold)
    return k + h


def around_a_change(m, x):
    h = m.a(x).sin() + 0
    h.register_hook(tenfold)
    h.mul_(3)
    h.register_hook(plus_one)
    return m.b(h)


def on_a_copy(m, x):
    h = m.a(x).sin()
    k = h.clone()
    k.register_hook(tenfold)
    return m.b(h) + k


def on_a_view(m, x):
    h = m.a(x).sin() + 0
    h[:2].register_hook(tenfold)
    part = h[1:]
    part.register_hook(plus_one)
    return m.b(h) + part.sum()


def on_the_output(m, x):
    h = m.a(x)
    h.register_hook(tenfold)
    return h


def on_the_input(m, x):
    k = x * 2
    x.register_hook(tenfold)
    x.register_hook(plus_one)
    return m.a(x) + k


def under_no_grad(m, x):
    h = m.a(x).sin()
    with torch.no_grad():
        h.register_hook(tenfold)
    return m.b(h)


def removed(m, x):
    h = m.a(x).sin()
    h.register_hook(plus_one)
    h.register_hook(tenfold).remove()
    return m.b(h)


BODIES = {
    "one": hooked(tenfold),
    "two, in their order": hooked(tenfold, plus_one),
    "that returns None": hooked(keeps, tenfold),
    "partial": hooked(functools.partial(scaled, 0.5)),
    "of a reader before it": before_its_hook,
    "around a change in place": around_a_change,
    "on a copy": on_a_copy,
    "on a view": on_a_view,
    "on the output": on_the_output,
    "on the input": on_the_input,
    "under no_grad": under_no_grad,
    "removed": removed,
}


TWICE = [BODIES[name] for name in ("two, in their order", "that returns None", "around a change in place", "on a view", "on the input")]


def assert_alike(model, dynamo):
    """A step of the file is a step of this very model: a deep copy would lose the hooks of parameters."""
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(model, (x,), dynamo=dynamo)
    loaded = exporter.load(program, allow=HOOKS)
    assert_step_alike(lambda_of(loaded, x), lambda_of(model, y), ())
    torch.testing.assert_close(x.grad, y.grad)
    return program


def lambda_of(module, x):
    """The module on this very input, which must not be a leaf: the forward may hook it."""

    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self):
            return self.module(x.clone())

    return Bound()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_tensors_hook_is_carried(body, dynamo):
    torch.manual_seed(0)
    program = assert_alike(Net(body), dynamo)
    hooks = [node for node in nodes(program.model, "PythonOp") if "GradientHook" in node.attributes["name"].as_string()]
    assert len(hooks) == (2 if body in TWICE else 1)


def test_hooks_of_parameters_are_carried(dynamo):
    torch.manual_seed(0)
    model = Net(plain)
    for hook in (tenfold, plus_one):
        model.a.weight.register_hook(hook)
    model.b.bias.register_hook(tenfold)
    assert_alike(model, dynamo)


def test_a_hook_passes_the_gate(dynamo):
    program = exporter.export(Net(hooked(tenfold)), (torch.randn(3, 4),), dynamo=dynamo)
    with pytest.raises(TrustError, match="tenfold.*not allowed"):
        exporter.load(program, allow=["mypkg:*"])
    with pytest.raises(TrustError, match="tenfold.*no pattern allows"):
        exporter.load(program, allow=[f"{__name__}:*"])


def test_a_hook_without_a_name_is_refused_until_it_is_registered(dynamo):
    hook = lambda g: g * 7  # noqa: E731
    with pytest.raises(
        ExportError, match=rf"the hook {__name__}:.*<lambda>.*at {__name__}:\d+: a file cannot name it.*exporter.register"
    ) as caught:
        exporter.export(Net(hooked(hook)), (torch.randn(3, 4),), dynamo=dynamo)
    assert len(str(caught.value).splitlines()) <= 6
    exporter.register(hook, "seven")
    try:
        assert_alike(Net(hooked(hook)), dynamo)
    finally:
        unregister("seven")


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def look(self, g):
        self.seen = g

    def forward(self, x):
        h = self.a(x)
        h.register_hook(self.look)
        return h * h


def test_a_hook_that_plainly_changes_nothing_is_warned_of(dynamo):
    with pytest.warns(PythonopWarning, match="Looks.look.*returns nothing"):
        program = exporter.export(Looks(), (torch.randn(3, 4),), dynamo=dynamo)
    assert not nodes(program.model, "PythonOp")


def test_a_hook_that_the_model_leaves_out_while_it_is_traced(dynamo):
    def body(m, x):
        h = m.a(x)
        if not torch.jit.is_tracing() and not torch.compiler.is_exporting():
            h.register_hook(tenfold)
        return m.b(h)

    with pytest.warns(PythonopWarning, match="told that it runs in eager mode"):
        program = exporter.export(Net(body), (torch.randn(3, 4),), dynamo=dynamo)
    assert len(nodes(program.model, "PythonOp")) == 1


REGISTER = {
    "full": (
        lambda m: m.a.register_full_backward_hook(tenfold_of_module),
        r"module a \(Linear\).*tenfold_of_module.*register_full_backward_hook",
    ),
    "pre": (lambda m: m.register_full_backward_pre_hook(tenfold_of_module), r"module <root> \(Net\).*register_full_backward_pre_hook"),
    "old": (lambda m: m.a.register_backward_hook(tenfold_of_module), "register_backward_hook"),
    "post accumulate": (lambda m: m.a.weight.register_post_accumulate_grad_hook(in_grad), "parameter 'a.weight'.*in_grad.*training loop"),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_that_cannot_be_carried_are_refused(kind, dynamo):
    model = Net(plain)
    register, says = REGISTER[kind]
    handle = register(model)
    with pytest.raises(ExportError, match=says) as caught:
        exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo)
    assert len(str(caught.value).splitlines()) <= 6
    handle.remove()
    exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo)


def test_a_modules_hook_that_returns_nothing_is_warned_of_once(dynamo):
    model = Net(plain)
    model.a.register_full_backward_hook(looks)
    with pytest.warns(PythonopWarning, match="module a .*looks.*returns nothing") as caught:
        exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo)
    assert len([w for w in caught if "backward hook" in str(w.message)]) == 1


def on_a_node(m, x):
    h = m.a(x)
    h.grad_fn.register_hook(lambda into, outof: (into[0] * 10,))
    return h


def test_a_hook_on_a_node_of_the_graph_is_refused(dynamo):
    with pytest.raises(ExportError, match="on a node of the autograd graph.*register it on the tensor"):
        exporter.export(Net(on_a_node), (torch.randn(3, 4),), dynamo=dynamo)


def same(tensor):
    return tensor


def doubled(tensor):
    return tensor * 2


@pytest.mark.parametrize("unpack", [same, doubled])
def test_saved_tensors_hooks(unpack, dynamo):
    """Those that give back what they got are as if they were not there; others make gradients that no file has."""

    def body(m, x):
        with torch.autograd.graph.saved_tensors_hooks(same, unpack):
            return m.a(x).square()

    if unpack is same:
        assert_alike(Net(body), dynamo)
        return
    with pytest.raises(ExportError, match=r"saved_tensors_hooks .*same and .*doubled give back other values"):
        exporter.export(Net(body), (torch.randn(3, 4),), dynamo=dynamo)


def in_place(g):
    g *= 2


def by_item(g):
    g[0] = 1


def with_keywords(g):
    print(g.sum(dim=0), end="")


def into_itself(g):
    torch.mul(g, 2, out=g)


def sometimes(g):
    if g.sum() > 0:
        return g
    return None


@pytest.mark.parametrize(
    ("hook", "nothing"),
    [
        (keeps, True),
        (looks, True),
        (with_keywords, True),
        (into_itself, False),
        (in_grad, False),
        (in_place, False),
        (by_item, False),
        (sometimes, False),
        (tenfold, False),
        (print, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_plainly_changes_nothing(hook, nothing):
    assert changes_nothing(hook) is nothing
