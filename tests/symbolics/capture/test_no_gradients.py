"""A backward that gives None for an input that needs a gradient: in a file that input has none either, as in eager mode."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import exporter
from exporter.training.step import export_training_step
from symbolics.errors import RunError
from symbolics.node.attributes import read_attributes, values_of
from symbolics.node.names import GRADIENTS_KEY
from tests.exporter.training.loop import eager, run
from tests.support import nodes
from tests.trains import assert_same_grads, loaded

ALLOW = ["tests.symbolics.capture.test_no_gradients:*", "no_gradients::*"]

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
T = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


class SquareLoss(torch.autograd.Function):
    """A loss that has no gradient for its targets."""

    @staticmethod
    def forward(ctx, x, target):
        ctx.save_for_backward(x - target)
        return (x - target).square().sum()

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0], None


class Quantize(torch.autograd.Function):
    """A quantizer that has none for its scale; its second derivative with respect to the scale is there."""

    @staticmethod
    def forward(ctx, x, bits, scale):
        ctx.save_for_backward(scale)
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx, g):
        (scale,) = ctx.saved_tensors
        return g * g * scale, None, None


class Separate(torch.autograd.Function):
    """The same with forward's defaults, and a setup_context."""

    @staticmethod
    def forward(x, scale, bits=8, more=None):
        return torch.round(x / scale) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        (scale,) = ctx.saved_tensors
        return g * g * scale, None, None, None


class Hard(torch.autograd.Function):
    """Has no gradient at all."""

    @staticmethod
    def forward(ctx, x, scale):
        return torch.sign(x) * scale

    @staticmethod
    def backward(ctx, g):
        return None, None


class Maybe(torch.autograd.Function):
    """Whether there is a gradient for the scale depends on values."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        assert ctx.needs_input_grad[1]  # as in eager mode, whatever the file has
        for_scale = (g * x).sum() if x[0, 0] > 100 else None
        return g * scale, for_scale


class Picky(Maybe):
    """Takes cotangents of one kind only: on random ones it raises."""

    @staticmethod
    def backward(ctx, g):
        if not (g == 1).all():
            raise ValueError("only ones")
        return Maybe.backward(ctx, g)


class Twice(Maybe):
    """Gives None, or not, by the call and not by the values."""

    @staticmethod
    def forward(ctx, x, scale, learned):
        ctx.learned = learned
        return Maybe.forward(ctx, x, scale)

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum() if ctx.learned else None, None


class Stateful(Maybe):
    """Counts in a model, writes a gradient, draws a number."""

    owner = nn.Module()

    @staticmethod
    def backward(ctx, g):
        Stateful.owner.count["backwards"] += 1
        Stateful.owner.scale.grad = torch.ones(())
        return g * torch.rand(()), None


@torch.library.custom_op("no_gradients::scale", mutates_args=())
def scale_by(x: torch.Tensor, many: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    return x * many[0] * many[1] * scale


scale_by.register_fake(lambda x, many, scale: torch.empty_like(x))
scale_by.register_autograd(
    lambda ctx, g: (g * 2, [g.sum() * 3, None], None), setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(True)
)


@torch.library.custom_op("no_gradients::plain", mutates_args=())
def plain_op(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def _no_gradient(ctx, g):
    return None, None


plain_op.register_fake(lambda x, scale: torch.empty_like(x))
plain_op.register_autograd(_no_gradient)


class Net(nn.Module):
    """A layer, a scale, and what is done with both."""

    def __init__(self, body):
        super().__init__()
        self.layer, self.scale, self.body = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.25)), body

    def forward(self, x):
        return self.body(self.layer(x), self.scale)


class WithTargets(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.prototypes = nn.Linear(3, 3), nn.Parameter(torch.ones(4, 3))

    def forward(self, x, target):
        return SquareLoss.apply(self.layer(x), target * self.prototypes)


def quantized(x, scale):
    return Quantize.apply(x, 8, scale)


def first(x, scale):
    """The layer's own input has no other gradient."""
    return Quantize.apply(X, 8, scale) + x


def operator(x, scale):
    return scale_by(x, [scale * 2, scale * 3], scale)


def both_calls(x, scale):
    for learned in (True, False):
        x = Twice.apply(x, scale, learned)
    return x


def calls(program):
    return [read_attributes(values_of(node)) for node in nodes(program.model, "PythonOp")]


def reached(program):
    pairing = json.loads(exporter.build_gradient_graph(program).metadata_props[GRADIENTS_KEY])
    return set(pairing["outputs"]) - set(pairing["unreached"])


BODIES = {
    "a quantizer": quantized,
    "keywords": lambda x, scale: Separate.apply(x, scale=scale),
    "of another call's result": lambda x, scale: Quantize.apply(x, 8, 2 * Maybe.apply(scale * torch.ones(1, 1), scale).sum()),
    "of what needs none": first,
    "no gradient at all": Hard.apply,
    "an operator with a list": operator,
    "an operator without a gradient": lambda x, scale: plain_op(x, scale),
    "None in one of two calls": both_calls,
    "a product besides": lambda x, scale: quantized(x, scale) * scale,
}


@pytest.mark.parametrize("body", BODIES)
def test_parameters_and_inputs_have_eagers_gradients(dynamo, body):
    model = Net(BODIES[body])
    module = loaded(model, (X,), dynamo=dynamo, allow=ALLOW)
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    y, z = module(mine), model(theirs)
    torch.testing.assert_close(y, z)
    for value in (y, z):
        (value * T).sum().backward()
    assert_same_grads(module, model)
    assert (mine.grad is None) == (theirs.grad is None)
    if mine.grad is not None:
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_targets_have_no_gradient(dynamo):
    model = WithTargets()
    module = loaded(model, (X, T), dynamo=dynamo, allow=ALLOW)
    results = []
    for each in (module, model):
        x, target = X.clone().requires_grad_(), T.clone().requires_grad_()
        each(x, target).backward()
        assert target.grad is None
        results.append(x.grad)
    torch.testing.assert_close(*results)
    assert_same_grads(module, model)
    assert module.prototypes.grad is None


def test_what_a_call_says(dynamo):
    (call,) = calls(exporter.export(Net(quantized), (X,), dynamo=dynamo))
    assert (call.no_gradient, call.no_gradient_seen) == ((1,), ())  # the code says so
    assert call.input_requires_grads == (True, True)
    (call,) = calls(exporter.export(Net(Maybe.apply), (X,), dynamo=dynamo))
    assert (call.no_gradient, call.no_gradient_seen) == ((), (1,))
    (call,) = calls(exporter.export(Net(operator), (X,), dynamo=dynamo))
    assert (call.no_gradient, call.no_gradient_seen) == ((), (2, 3))
    (call,) = calls(exporter.export(Net(plain_op), (X,), dynamo=dynamo))
    assert call.no_gradient == (0, 1)
    for call in calls(exporter.export(Net(both_calls), (X,), dynamo=dynamo)):
        assert call.no_gradient == () == call.no_gradient_seen  # of one line, and one of them has a gradient


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx.reference"])
@pytest.mark.parametrize("body", [quantized, Maybe.apply])
def test_every_runtime(dynamo, runtime, body):
    """One call whose gradients the native library computes, and one that Python looks at."""
    model = Net(body)
    program = exporter.export(model, (X,), dynamo=dynamo)
    training = exporter.build_gradient_graph(program)
    assert reached(program) == {"layer.weight", "layer.bias", training.graph.inputs[0].name}
    run_of = exporter.inference_session if runtime == "onnxruntime" else exporter.reference_evaluator
    made = run_of(training, allow=ALLOW)
    pairing = json.loads(training.metadata_props[GRADIENTS_KEY])
    (seed,) = pairing["inputs"].values()
    feeds = {training.graph.inputs[0].name: X.numpy(), seed: T.numpy()}
    (found,) = made.run([pairing["outputs"]["layer.weight"]], feeds)
    (model(X) * T).sum().backward()
    torch.testing.assert_close(torch.from_numpy(found), model.layer.weight.grad)
    if body is not quantized:
        feeds[training.graph.inputs[0].name] = X.numpy() * 0 + 1e4 * model.layer.weight[0].sign().detach().numpy()
        with pytest.raises(
            RunError if runtime == "onnx.reference" else Exception, match=r"(?s)Maybe.*gradient for input 1 .*way out: export"
        ) as raised:
            made.run([pairing["outputs"]["layer.weight"]], feeds)
        assert "gave None when the model was exported" in str(raised.value)


def test_a_gradient_that_comes_all_the_same_is_told_of_in_second_derivatives_too(dynamo):
    model = Net(Maybe.apply)
    module = loaded(model, (X,), dynamo=dynamo, allow=ALLOW)
    large = (1e4 * model.layer.weight[0].sign().detach()).repeat(4, 1)
    for x, fails in ((X, False), (large, True)):
        results = []
        for each in (model, module):
            given = x.clone().requires_grad_()
            try:
                (g,) = torch.autograd.grad(each(given).square().sum(), given, create_graph=True)
                results.append(torch.autograd.grad(g.square().sum(), each.scale)[0])
            except RunError as error:
                assert fails and each is module
                assert "Maybe" in str(error) and "gave None when the model was exported" in str(error)
                return
        assert not fails
        torch.testing.assert_close(*results)
    pytest.fail("the gradient was lost")


def test_a_value_dependent_none_is_zeros_where_backward_would_not_run_at_all(dynamo):
    """Nobody would see the gradient that comes: so it stays in the file."""

    class Data(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.25))

        def forward(self, x):
            return Maybe.apply(x, self.scale)

    model = Data()
    program = exporter.export(model, (X,), dynamo=dynamo)
    training = exporter.build_gradient_graph(program, wrt=["scale"])
    pairing = json.loads(training.metadata_props[GRADIENTS_KEY])
    session = exporter.inference_session(training, allow=ALLOW)
    (seed,) = pairing["inputs"].values()
    for x in (X, X + 1000):
        model.scale.grad = None
        model(x).sum().backward()
        (found,) = session.run([pairing["outputs"]["scale"]], {training.graph.inputs[0].name: x.numpy(), seed: torch.ones(4, 3).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), torch.zeros(()) if model.scale.grad is None else model.scale.grad)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(
    "body", [quantized, lambda x, scale: quantized(quantized(x, scale), scale)], ids=["one", "a chain that runs as one"]
)
def test_second_derivatives_reach_what_has_no_first(dynamo, portable, body):
    model = Net(body)
    module = loaded(model, (X,), dynamo=dynamo, allow=ALLOW, portable=portable)
    results = []
    for each in (model, module):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad((each(x) * T).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), [each.scale, *each.layer.parameters()], materialize_grads=True))
    torch.testing.assert_close(*results)
    assert results[0][0] != 0


def test_torch_func(dynamo):
    """Its gradients have no None: they are zeros, as in eager mode."""
    model = Net(Separate.apply)
    module = loaded(model, (X,), dynamo=dynamo, allow=ALLOW)
    results = []
    for each in (model, module):
        parameters = {name: value.detach() for name, value in each.named_parameters()}
        results.append(torch.func.grad(lambda p, each=each: (torch.func.functional_call(each, p, (X,)) * T).sum())(parameters))
    torch.testing.assert_close(*results)
    assert results[0]["scale"] == 0


@pytest.mark.parametrize("portable", [False, True])
def test_what_is_used_and_what_is_not(dynamo, portable):
    """autograd knows the way to a scale that has no gradient, and none to a parameter that nothing uses."""
    model = Net(quantized)
    model.spare = nn.Parameter(torch.ones(2))
    module = loaded(model, (X,), dynamo=dynamo, allow=ALLOW, portable=portable)
    for each in (model, module):
        y = each(X.clone().requires_grad_())
        assert torch.autograd.grad(y.sum(), each.scale, retain_graph=True, allow_unused=True) == (None,)
        y.sum().backward()
        assert each.scale.grad is None and each.spare.grad is None and each.layer.weight.grad is not None


def test_a_backward_that_cannot_be_asked(dynamo):
    """Nothing is known of it, and the export goes on."""
    (call,) = calls(exporter.export(Net(Picky.apply), (X,), dynamo=dynamo))
    assert call.no_gradient == () == call.no_gradient_seen
    module = loaded(Net(Picky.apply), (X,), dynamo=dynamo, allow=ALLOW)
    module(X).sum().backward()
    assert torch.equal(module.scale.grad, torch.zeros(()))


def test_asking_changes_nothing(dynamo):
    model = Stateful.owner = Net(Stateful.apply)
    model.count = {"backwards": 0}
    drawn = torch.get_rng_state()
    (call,) = calls(exporter.export(model, (X,), dynamo=dynamo))
    assert call.no_gradient == (1,)  # it was asked
    assert model.count == {"backwards": 0} and model.scale.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_training_step_leaves_the_parameter(dynamo):
    model = Net(quantized).double()
    batches = [(X.double() + i, T.double() - i) for i in range(3)]
    step = export_training_step(
        model, batches[0][:1], loss=SquareLoss.apply, targets=batches[0][1:], optimizer="adamw",
        hyperparameters={"lr": 0.1, "weight_decay": 0.5}, dynamo=dynamo,
    )  # fmt: skip
    assert step.layout.untrained == ("scale",)
    losses, state = run(step, batches, allow=ALLOW)
    twin = copy.deepcopy(model)
    expected = eager(twin, SquareLoss.apply, torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5), batches)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), check_dtype=False)
    for key, name in step.layout.parameters.items():
        torch.testing.assert_close(torch.from_numpy(state[name]), twin.get_parameter(key).detach())
    assert twin.scale.item() == 0.25


@pytest.mark.parametrize("portable", [False, True])
def test_a_portable_file_and_an_opaque_one_say_the_same(dynamo, portable):
    program = exporter.export(Net(lambda x, scale: SquareLoss.apply(x, scale * T)), (X,), dynamo=dynamo, portable=portable)
    assert len(calls(program)) == (not portable)
    assert reached(program) == {"layer.weight", "layer.bias", program.model.graph.inputs[0].name}


def test_a_gradient_that_forward_takes(dynamo):
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, target):
            y = self.layer(x)
            loss = SquareLoss.apply(y, target)
            given, nothing = torch.autograd.grad(loss, (y, target), create_graph=True, allow_unused=True)
            return given if nothing is None else nothing

    model = Taking()
    module = loaded(model, (X, T), dynamo=dynamo, allow=ALLOW)
    results = []
    for each in (module, model):
        x, target = X.clone().requires_grad_(), T.clone().requires_grad_()
        results.append(each(x, target))
    torch.testing.assert_close(*results)


class TestVerify:
    pytestmark = pytest.mark.usefixtures("quick_verify")

    @pytest.mark.parametrize("model", [WithTargets(), Net(quantized), Net(Hard.apply)], ids=["targets", "a scale", "none at all"])
    def test_is_right(self, dynamo, model):
        args = (X, T) if isinstance(model, WithTargets) else (X,)
        report = exporter.verify(model, args, dynamo=dynamo, allow=ALLOW)
        assert report.ok, report
