"""PythonOps that feed one another are joined in memory: the same results as eager and as apart, and never where it would matter."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from exporter.runtime.library import binding_of
from exporter.runtime.link import LINKED, could_link, link
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import Session, inference_session, session_options
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, RunError
from symbolics.node.attributes import python_op_grad
from symbolics.node.names import PYTHON_OP, PYTHON_OP_GRAD
from tests.exporter.runtime.build import finish, python_op, record, training, value, with_id
from tests.zoo import functions as F

ALLOW = ["tests.exporter.runtime.*:*", "tests.zoo.functions:*"]


def leaf(*shape):
    return torch.linspace(-0.9, 1.1, int(np.prod(shape))).reshape(shape).requires_grad_()


def joined(model):
    """How many calls the model loses."""
    return link(ir.from_proto(model))


def run(model, feeds, make=inference_session, times=3, **options):
    session = make(model, ALLOW, **options)
    for _ in range(times):
        found = session.run(None, {name: tensor.detach().numpy() for name, tensor in feeds.items()})
    assert len(session.store) == 0
    return [torch.from_numpy(array) for array in found]


_CHAINED = (F.SavesInput, F.SavesOutput, F.SavesIntermediate, F.SavesNothing, F.KeepsInputOnCtx, F.ReturnsInput, F.ReturnsView, F.Once)
_CHAINED += (F.TrailingNone, F.ChangesGradient, F.SetupContext, F.Copies, F.Raises)


@pytest.mark.parametrize("shape", [(2, 4), (300, 400)], ids=["small", "large"])
@pytest.mark.parametrize("cls", _CHAINED, ids=lambda cls: cls.__name__)
def test_a_chain_is_eagers(cls, shape, monkeypatch):
    monkeypatch.setattr(F.Raises, "armed", False)
    x = leaf(*shape)
    model = training(record(cls, x), repeat=4)
    assert joined(model) == 3
    y = x
    for _ in range(4):
        y = cls.apply(y)
    seed = torch.randn(y.shape)
    (expected,) = torch.autograd.grad(y, x, seed.clone())  # one of them changes the gradient that it is given
    for make in (inference_session, reference_evaluator):  # the reference joins nothing
        found, gradient = run(model, {"x0": x, "g0": seed}, make)
        assert torch.equal(found, y.detach())
        assert torch.equal(gradient, expected)


def tree(*, read_outside=(), shared=False, apart=False):
    """TwoInputs(a, b) -> (p, q); TwoInputs(p, q) -> (r, s): all four gradients; and the same with something in between."""
    a, b = leaf(3), leaf(3)
    call = record(F.TwoInputs, a, b, 0.5)
    inputs = [value("a", 1, 1), value("b", 1, 1)]
    first = python_op(with_id(call, 0), inputs, "first", context=True)
    middle = list(first.outputs[1:])
    nodes = [first]
    if apart:
        nodes.append(ir.Node("", "Identity", [middle[0]], name="between"))
        nodes[-1].outputs[0].name = "between"
        middle[0] = nodes[-1].outputs[0]
    if shared:
        middle[1] = middle[0]
    second = python_op(with_id(call, 1), middle, "second", context=True)
    seeds = [value("g0", 1, 1), value("g1", 1, 1)]
    grad = python_op_grad(second, second.outputs[0], seeds)
    grad.outputs[0].name, grad.outputs[1].name = "p_grad", "q_grad"
    nodes += [second, grad]
    given = list(grad.outputs)
    if shared:
        nodes.append(ir.Node("", "Add", given, name="sum"))
        nodes[-1].outputs[0].name = "sum"
        given = [nodes[-1].outputs[0], None]
    last = python_op_grad(first, first.outputs[0], given)
    last.outputs[0].name, last.outputs[1].name = "a_grad", "b_grad"
    nodes.append(last)
    by_name = {v.name: v for node in nodes for v in node.outputs}
    outputs = [*second.outputs[1:], *last.outputs, *(by_name[name] for name in read_outside)]
    return finish([*inputs, *seeds], outputs, nodes)


def test_two_links_between_two_calls():
    a, b = leaf(3), leaf(3)
    g0, g1 = torch.randn(3), torch.randn(3)
    p, q = F.TwoInputs.apply(a, b, 0.5)
    r, s = F.TwoInputs.apply(p, q, 0.5)
    expected = [r, s, *torch.autograd.grad([r, s], [a, b], [g0, g1])]
    assert joined(tree()) == 1
    for found, want in zip(run(tree(), {"a": a, "b": b, "g0": g0, "g1": g1}), expected, strict=True):
        assert torch.equal(found, want.detach())


@pytest.mark.parametrize(
    "options",
    [
        {"read_outside": ["first_0"]},
        {"read_outside": ["p_grad"]},
        {"read_outside": ["first_context"]},
        {"read_outside": ["second_context"]},
        {"shared": True},
        {"apart": True},
    ],
    ids=str,
)
def test_what_somebody_else_reads_stays_apart(options):
    model = tree(**options)
    assert joined(model) == 0
    a, b, g0, g1 = leaf(3), leaf(3), torch.randn(3), torch.randn(3)
    p, q = F.TwoInputs.apply(a, b, 0.5)
    r, s = F.TwoInputs.apply(p, p if options.get("shared") else q, 0.5)
    expected = [r, s, *torch.autograd.grad([r, s], [a, b], [g0, g1])]
    session = inference_session(model, ALLOW)
    found = session.run(None, {name: tensor.detach().numpy() for name, tensor in {"a": a, "b": b, "g0": g0, "g1": g1}.items()})
    for array, want in zip(found, expected, strict=False):
        torch.testing.assert_close(torch.from_numpy(array), want.detach())


def test_a_value_read_inside_a_body_stays_apart():
    model = tree()
    body = onnx.parser.parse_graph("then () => (float[N] t) { t = Neg(first_1) }")
    other = onnx.parser.parse_graph("other () => (float[N] e) { e = Identity(first_1) }")
    node = onnx.helper.make_node("If", ["c"], ["chosen"], then_branch=body, else_branch=other)
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    model.graph.output.append(onnx.helper.make_tensor_value_info("chosen", 1, None))
    model.graph.node.insert(1, node)
    assert joined(model) == 0


def test_a_gradient_that_stops_between_two_calls_stays_apart():
    # The second call's flag says that no gradient goes to the first; autograd, left alone, would send one.
    model = training(record(F.SavesInput, leaf(3)), repeat=2)
    second = next(node for node in model.graph.node if node.name == "op1")
    next(a for a in second.attribute if a.name == "input_requires_grads").ints[:] = [0]
    assert joined(model) == 0


@pytest.mark.parametrize("cls", [F.AutocastMatmul, F.Dirty, F.Arguments], ids=lambda cls: cls.__name__)
def test_unusual_calls_stay_apart(cls):
    x = leaf(2, 2)
    fields, args = {}, (x,)
    if cls is F.AutocastMatmul:
        from symbolics.node.call import Autocast

        fields, args = {"autocast": Autocast({"cpu": "bfloat16"}, True)}, (x, leaf(2, 2))
    if cls is F.Dirty:
        fields = {"inplace": True}
    if cls is F.Arguments:
        args = (x, {"a": leaf(2, 2).detach(), "b": leaf(2, 2).detach()}, F.Mode.DOWN, [5, 6], torch.float16, None, "x")
    assert joined(training(record(cls, *args, **fields), repeat=2)) == 0


class MaybeRaises(torch.autograd.Function):
    """Not the Function next to it: a message has to name this one."""

    @staticmethod
    def forward(ctx, x):
        if x.max() > 100:
            raise F.CustomError("too large", 1)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        if g.max() > 100:
            raise F.CustomError("too steep", 2)
        return g


def mixed(*classes):
    """A chain of different Functions."""
    x = leaf(2, 4)
    inputs = [value("x0", 1, 2)]
    nodes, current = [], inputs
    for i, cls in enumerate(classes):
        nodes.append(python_op(record(cls, x, id=str(i)), current, f"node{i}", context=True))
        current = [nodes[-1].outputs[1]]
    gradient = seed = value("g0", 1, 2)
    for i, node in enumerate(reversed(list(nodes))):
        nodes.append(python_op_grad(node, node.outputs[0], [gradient]))
        gradient = nodes[-1].outputs[0]
        gradient.name = f"gradient{i}"
    gradient.name = "x0_grad"
    return finish([*inputs, seed], [current[0], gradient], nodes)


def test_an_exception_names_its_own_function_and_leaves_no_context():
    model = mixed(F.SavesInput, F.SavesOutput, MaybeRaises, F.SavesNothing)
    assert joined(model) == 3
    session = inference_session(model, ALLOW)
    titles = []
    failed = session._binding.failed
    session._binding.failed = lambda kernel, error: titles.append(failed(kernel, error)) or titles[-1]
    x, good = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    with pytest.raises(F.CustomError, match="too steep"):
        session.run(None, {"x0": x, "g0": good * 1000})
    assert titles[0].startswith("PythonOpGrad 'node2' (tests.exporter.runtime.test_link:MaybeRaises)")
    assert len(session.store) == 0
    _, gradient = session.run(None, {"x0": x, "g0": good})
    assert gradient.shape == (2, 4)

    forward_fails = inference_session(mixed(F.SavesNothing, MaybeRaises), ALLOW)
    failed, titles[:] = forward_fails._binding.failed, []
    forward_fails._binding.failed = lambda kernel, error: titles.append(failed(kernel, error)) or titles[-1]
    with pytest.raises(F.CustomError, match="too large"):
        forward_fails.run(None, {"x0": good * 1000, "g0": good})
    assert titles[0].startswith("PythonOp 'node1' (tests.exporter.runtime.test_link:MaybeRaises)")
    assert len(forward_fails.store) == 0


class Reshapes(torch.autograd.Function):
    grows = False

    @staticmethod
    def forward(ctx, x):
        return x.double() if Reshapes.grows else x * 1

    @staticmethod
    def backward(ctx, g):
        return g.float()


def test_a_value_between_two_calls_is_what_the_file_says(monkeypatch):
    session = inference_session(mixed(Reshapes, F.SavesNothing), ALLOW)
    feeds = {"x0": np.ones((2, 4), np.float32), "g0": np.ones((2, 4), np.float32)}
    session.run(None, feeds)
    monkeypatch.setattr(Reshapes, "grows", True)
    with pytest.raises(RunError, match=r"PythonOp 'node0'.*output 0 has dtype torch.float64, the file says torch.float32"):
        session.run(None, feeds)


@pytest.mark.parametrize("cls", [F.ChangesInput, F.ChangesInputThroughNumpy], ids=lambda cls: cls.__name__)
def test_an_undeclared_change_does_not_reach_what_the_call_before_saved(cls):
    x, seed = leaf(2, 4), torch.randn(2, 4)
    model = mixed(F.SavesOutput, cls)
    assert joined(model) == 1
    y = x.detach().tanh()
    for found, want in zip(run(model, {"x0": x, "g0": seed}, times=4), [y * 2, seed * 2 * (1 - y * y)], strict=True):
        torch.testing.assert_close(found, want)


def test_a_change_that_comes_later_is_an_error_once():
    x, seed = leaf(2, 4), torch.randn(2, 4)
    model = mixed(F.SavesOutput, F.ChangesLater)
    F.ChangesLater.runs = 0
    session = inference_session(model, ALLOW)
    feeds = {"x0": x.detach().numpy(), "g0": seed.numpy()}
    first = session.run(None, feeds)
    session.run(None, feeds)
    with pytest.raises(RunError, match="'node1'.*ChangesLater.*changed an input in place"):
        session.run(None, feeds)
    assert len(session.store) == 0
    for again, once in zip(session.run(None, feeds), first, strict=True):
        assert np.array_equal(again, once)


def test_retained_contexts_and_a_second_backward():
    x = leaf(2, 4)
    store = ContextStore(retain=True)
    session = inference_session(training(record(F.SavesInput, x), repeat=3), ALLOW, store=store)
    feeds = {"x0": x.detach().numpy(), "g0": np.ones((2, 4), np.float32)}
    one, two = session.run(None, feeds), session.run(None, feeds)
    assert np.array_equal(one[1], two[1])
    store.clear()


def test_inference_mode_and_a_missing_gradient_of_the_reader():
    x = leaf(2, 4)
    y = F.SavesInput.apply(x)
    with torch.inference_mode():
        found, gradient = run(mixed(F.SavesInput, F.SavesNothing), {"x0": x, "g0": torch.ones(2, 4)})
    torch.testing.assert_close(found, 2 * y.detach())
    torch.testing.assert_close(gradient, 2 * x.detach().cos())


def test_a_loaded_module_joins_before_it_is_split():
    from torch import nn

    import exporter

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return F.SavesNothing.apply(F.SavesOutput.apply(F.SavesInput.apply(self.linear(x)))) + 1

    net, x = Net(), torch.randn(3, 4)
    module = exporter.load(exporter.export(net, (x,)), allow=ALLOW)
    for _ in range(2):
        expected, found = net(x), module(x)
        assert len(module._onnx.plans.store) == 1
        torch.testing.assert_close(found, expected)
        net.zero_grad()
        module.zero_grad()
        expected.square().sum().backward()
        found.square().sum().backward()
        for one, two in zip(net.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
    assert len(module._onnx.plans.store) == 0


def test_a_file_is_left_alone_and_a_damaged_join_is_refused():
    model = training(record(F.SavesInput, leaf(2)), repeat=2)
    before = model.SerializeToString()
    inference_session(model, ALLOW)
    assert model.SerializeToString() == before
    assert could_link(model)
    assert not could_link(training(record(F.SavesInput, leaf(2))))
    fused = ir.from_proto(model)
    link(fused)
    assert [node.op_type for node in fused.graph] == [PYTHON_OP, PYTHON_OP_GRAD]
    proto = ir.to_proto(fused)
    attribute = next(a for a in proto.graph.node[0].attribute if a.name == LINKED)
    lines = attribute.s.decode().split("\n")
    for damaged in (
        "[" * 100_000,
        "{}",
        "[]",
        json.dumps({**json.loads(lines[1]), "places": [7]}),
        json.dumps({**json.loads(lines[1]), "places": 1}),
    ):
        attribute.s = "\n".join([lines[0], damaged]).encode()
        with pytest.raises(FormatError, match="call"):
            Session(proto.SerializeToString(), *_bound(session_options(ALLOW)))


def _bound(options):
    return options, binding_of(options)
