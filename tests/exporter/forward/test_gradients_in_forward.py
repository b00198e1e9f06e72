"""Models that take gradients in their forward: their files give what eager gives, and have eager's gradients, on both exporters."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError
from symbolics.node.names import INNER_DOMAIN
from tests.exporter.training.loop import eager, run
from tests.support import nodes
from tests.trains import assert_same_grads, loaded
from tests.zoo import differentiating as zoo

ALLOW = ["tests.zoo.*", "tests.zoo.differentiating:doubled", "symbolics.capture.gradient_hooks"]
EXACT = 1e-9


def outputs_of(model, args):
    results = model(*args)
    return results if isinstance(results, tuple) else (results,)


def assert_equal(module, model, args, *, gradients=True):
    """Outputs, and the gradients of all parameters and inputs, of a loaded file and of eager."""
    ours, theirs = ([x.clone().requires_grad_() if x.is_floating_point() else x for x in args] for _ in range(2))
    got, want = outputs_of(module, ours), outputs_of(model, theirs)
    for y, z in zip(got, want, strict=True):
        torch.testing.assert_close(y, z, rtol=EXACT, atol=EXACT)
    if not gradients:
        return
    for results in (got, want):
        sum((y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sin().sum() for y in results if y.requires_grad).backward()
    assert_same_grads(module, model, EXACT)
    for x, other in zip(ours, theirs, strict=True):
        assert (x.grad is None) == (other.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, other.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("cls", zoo.MODELS, ids=lambda cls: cls.__name__)
def test_as_in_eager(cls, dynamo):
    model = cls()
    args = model.args()
    module = loaded(model, args, dynamo=dynamo, allow=())
    assert_equal(module, model, args)


@pytest.mark.parametrize("cls", [zoo.CustomEnergy, zoo.Hooked, zoo.BackwardOfInput], ids=lambda cls: cls.__name__)
def test_outputs_as_in_eager(cls, dynamo):
    """A Function in what is differentiated: its backward runs in the forward of the file. (.grad of an input adds up in eager, where a caller's is.)"""
    model = cls()
    args = model.args()
    module = loaded(model, args, dynamo=dynamo, allow=ALLOW)
    assert_equal(module, model, args, gradients=False)


def test_a_function_in_the_energy_runs_everywhere(dynamo):
    """Its context is read in the forward: session and reference evaluator run it, and leave none behind."""
    model = zoo.CustomEnergy()
    args = model.args()
    program = exporter.export(model, args, dynamo=dynamo)
    assert [len(nodes(program.model, kind)) for kind in ("PythonOp", "PythonOpGrad")] == [1, 1]
    want = model(args[0].clone()).detach().numpy()
    feeds = {program.model.graph.inputs[0].name: args[0].numpy()}
    session = exporter.inference_session(program.model_proto, allow=ALLOW)
    evaluator = exporter.reference_evaluator(program.model_proto, allow=ALLOW)
    for _ in range(2):
        for runner in (session, evaluator):
            assert abs(runner.run(None, feeds)[0] - want).max() < EXACT


@pytest.mark.parametrize("cls", [zoo.CustomEnergy, zoo.CustomForces, zoo.CustomHessian], ids=lambda cls: cls.__name__)
def test_a_function_on_the_way_of_forces_trains(cls, dynamo):
    """Its backward runs in the forward, and is differentiated; where the energy is an output, it runs once more."""
    model = cls()
    args = model.args()
    module = loaded(model, args, dynamo=dynamo, allow=ALLOW)
    for _ in range(2):
        module.zero_grad()
        model.zero_grad()
        assert_equal(module, model, args)
    gc.collect()
    assert len(module._onnx.plans.store) == 0


def test_a_portable_function_in_the_energy(dynamo):
    """As an ONNX function it has gradients of every order."""
    model = zoo.CustomForces()
    args = model.args()
    module = loaded(model, args, dynamo=dynamo, allow=(), portable=True)
    assert_equal(module, model, args)


@pytest.mark.parametrize("cls", [zoo.Forces, zoo.Residual, zoo.Pushed], ids=lambda cls: cls.__name__)
def test_a_dynamic_batch(cls, dynamo):
    model = cls()
    args = model.args()
    shapes = tuple({0: torch.export.Dim("batch", min=2)} for _ in args)
    module = loaded(model, args, dynamo=dynamo, allow=(), dynamic_shapes=shapes)
    for batch in (2, 7):
        assert_equal(module, model, [torch.randn(batch, *x.shape[1:], dtype=x.dtype) for x in args])
        model.zero_grad()
        module.zero_grad()


@pytest.mark.parametrize(("cls", "dynamo"), [(zoo.Forces, True), (zoo.CustomEnergy, False)], ids=["forces", "custom"])
def test_in_a_fresh_process(cls, dynamo, quick_verify):
    model = cls()
    report = exporter.verify(model, model.args(), dynamo=dynamo, setup="tests.zoo.differentiating:setup")
    assert report.ok, report


def test_a_training_step_on_forces(dynamo):
    """Three steps of SGD on a loss of energies and forces."""
    batches = [(torch.randn(4, 3, dtype=zoo.F64), torch.randn(4, 3, dtype=zoo.F64)) for _ in range(3)]

    def loss(result, forces):
        energy, found = result
        return (found - forces).square().mean() + 0.01 * energy.square()

    model = zoo.Forces()
    step = exporter.export_training_step(
        model, batches[0][:1], loss=loss, targets=batches[0][1:], optimizer="sgd", hyperparameters={"lr": 0.1}, dynamo=dynamo
    )
    losses, state = run(step, batches)
    want = eager(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert losses == pytest.approx(want, abs=EXACT)
    for name, parameter in model.named_parameters():
        assert abs(state[f"param.{name}"] - parameter.detach().numpy()).max() < EXACT


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = zoo.Net().net

    def forward(self, real, fake):
        return self.critic(real), self.critic(fake)


def test_a_gradient_penalty_in_the_loss(dynamo):
    """WGAN-GP: it is the loss of the training step that takes the gradient."""
    model = Critics()

    def loss(result, mixed):
        real, fake = result
        mixed = mixed.requires_grad_(True)
        score = model.critic(mixed)
        (gradient,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        return fake.mean() - real.mean() + 10 * ((gradient.norm(dim=1) - 1) ** 2).mean()

    batches = [tuple(torch.randn(4, 3, dtype=zoo.F64) for _ in range(3)) for _ in range(3)]
    step = exporter.export_training_step(
        model, batches[0][:2], loss=loss, targets=batches[0][2:], optimizer="sgd", hyperparameters={"lr": 0.1}, dynamo=dynamo
    )
    losses, _ = run(step, batches)
    assert losses == pytest.approx(eager(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batches, arguments=2), abs=EXACT)


class Dropping(zoo.Net):
    """The gradient goes through the mask that this very forward draws."""

    def forward(self, x):
        x.requires_grad_(True)
        y = nn.functional.dropout(x, 0.5, training=True)
        return y, torch.autograd.grad((y * y).sum(), x, create_graph=True)[0]


def test_dropout_in_training_mode(dynamo):
    x = torch.rand(64, 3, dtype=zoo.F64) + 1
    program = exporter.export(Dropping(), (x,), dynamo=dynamo)
    y, gradient = exporter.inference_session(program.model_proto).run(None, {program.model.graph.inputs[0].name: x.numpy()})
    assert 0 < (y == 0).sum() < y.size
    assert abs(gradient - 4 * y).max() < EXACT  # d(y*y) is 2y times the mask, which is 0 or 2: where y is not 0, 2


def test_hook_and_export_give_equal_files(tmp_path, dynamo):
    model = zoo.Forces()
    args = model.args()
    with exporter.hook():
        torch.onnx.export(model, args, tmp_path / "hook.onnx", dynamo=dynamo)
    program = exporter.export(model, args, dynamo=dynamo)
    program.save(tmp_path / "export.onnx")
    assert (tmp_path / "hook.onnx").read_bytes() == (tmp_path / "export.onnx").read_bytes()
    assert all(node.domain != INNER_DOMAIN for node in nodes(program.model))


def test_check_gradients_by_differences():
    """The gradient of what takes a gradient, by finite differences."""
    model = zoo.Residual().float()
    program = exporter.export(model, tuple(x.float() for x in zoo.Residual().args()))
    assert exporter.check_gradients(program, order=1) < 1e-4


class GoesAround(zoo.Net):
    def forward(self, x):
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return self.net(x)
        x.requires_grad_(True)
        y = self.net(x)
        return y + torch.autograd.grad(y.sum(), x)[0].sum()


def test_a_gradient_that_the_export_does_not_take(dynamo):
    model = GoesAround()
    with pytest.raises(
        ExportError, match=r"torch.autograd.grad, called in module <root> at .*test_gradients_in_forward:\d+: eager makes 1 call of it"
    ):
        exporter.export(model, model.args(), dynamo=dynamo)
    exporter.export(model, model.args(), dynamo=dynamo, eager_check=False)


class Steep(torch.autograd.Function):
    """x ** 3, with a backward of its own, in the form that torch.func takes."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 5 * g * ctx.saved_tensors[0] ** 2


class Weighted(nn.Module):
    """What a test writes as a function of a weight and an input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.7, -1.3, 0.4], dtype=zoo.F64))

    def forward(self, x):
        return self.function(self.weight, x)


HERE = [*ALLOW, __name__, f"{__name__}:sloped", f"{__name__}:*", "tests.exporter.forward.*"]
POINT = torch.tensor([0.5, -1.5, 2.0], dtype=zoo.F64)

TRANSFORMED = {
    "grad": lambda w, x: torch.func.grad(lambda z: Steep.apply(z * w).square().sum())(x),
    "twice": lambda w, x: torch.func.grad(lambda z: torch.func.grad(lambda y: Steep.apply(y * w).square().sum())(z).sum())(x),
    "vjp": lambda w, x: torch.func.vjp(lambda z: Steep.apply(z * w).square(), x)[1](x)[0],
    "jacrev": lambda w, x: torch.func.jacrev(lambda z: Steep.apply(z * w).square())(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_function_under_torch_func(name, dynamo):
    """Gradients flow through what it returns, which is what the check of the export asks."""
    model = Weighted(TRANSFORMED[name])
    module = loaded(model, (POINT,), dynamo=dynamo, allow=HERE)
    assert_equal(module, model, (POINT,))


RUNS: list[torch.Tensor] = []  # what a forward closes over is put back after an eager run


def test_a_function_under_torch_func_that_the_export_loses(dynamo):
    RUNS.clear()

    def forward(w, x):
        RUNS.append(x)
        apply = Steep.apply if len(RUNS) == 1 else lambda z: z**3  # only the run in eager mode makes the call
        return torch.func.grad(lambda z: apply(z * w).square().sum())(x)

    with pytest.raises(ExportError, match=r"Steep, called in module <root> at .*test_gradients_in_forward:\d+: eager makes 1 call of it"):
        exporter.export(Weighted(forward), (POINT,), dynamo=dynamo)


class Slope(torch.autograd.Function):
    """The backward of `Chained`, with one of its own."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx, h):
        x, g = ctx.saved_tensors
        return 9 * x * g * h, 3 * x**2 * h


class Chained(torch.autograd.Function):
    """x ** 3; its backward applies a Function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return Slope.apply(ctx.saved_tensors[0], g)


class Relaying(torch.autograd.Function):
    """x ** 3; its backward takes a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            (found,) = torch.autograd.grad(2 * x**3, x, g, create_graph=True)
        return found


@torch.library.custom_op("gradients_in_forward::slope", mutates_args=())
def slope(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return 3 * x**2 * g


slope.register_fake(lambda x, g: torch.empty_like(x))
slope.register_autograd(
    lambda ctx, h: (9 * ctx.saved_tensors[0] * ctx.saved_tensors[1] * h, 3 * ctx.saved_tensors[0] ** 2 * h),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("gradients_in_forward::outer", mutates_args=())
def outer(x: torch.Tensor) -> torch.Tensor:
    return x**3


outer.register_fake(lambda x: torch.empty_like(x))
outer.register_autograd(
    lambda ctx, g: slope(ctx.saved_tensors[0], g), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def of_operator(x):
    return outer(x)


def sloped(g):
    return slope(g, g)


def hooked(x):
    y = x * 2
    y.register_hook(sloped)
    return y.square()


CALLING = {"function": Chained.apply, "operator": of_operator, "hook": hooked, "gradient": Relaying.apply}


def gradient_of(function, w, x):
    x.requires_grad_(True)
    return torch.autograd.grad(function(x * w).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("name", CALLING)
def test_what_a_backward_calls_belongs_to_it(name, dynamo):
    """In the file it is inside of the outer one's backward, and no call of the forward."""
    model = Weighted(functools.partial(gradient_of, CALLING[name]))
    module = loaded(model, (POINT,), dynamo=dynamo, allow=[*HERE, "gradients_in_forward::*"])
    assert_equal(module, model, (POINT,))


def test_a_function_that_only_a_gradient_hangs_on_and_the_export_loses(dynamo):
    RUNS.clear()

    def forward(w, x):
        RUNS.append(x)
        return gradient_of(Chained.apply if len(RUNS) == 1 else lambda z: z**3, w, x)

    with pytest.raises(ExportError, match=r"Chained, called in module <root> at .*test_gradients_in_forward:\d+: eager makes 1 call of it"):
        exporter.export(Weighted(forward), (POINT,), dynamo=dynamo)


LEAVES = {
    "linspace": lambda: torch.linspace(0, 1, 3, dtype=zoo.F64).requires_grad_(True),
    "ones": lambda: torch.ones(3, dtype=zoo.F64, requires_grad=True),
    "arange": lambda: torch.arange(3, dtype=zoo.F64).requires_grad_(True),
    "full": lambda: torch.full((3,), 2.0, dtype=zoo.F64).requires_grad_(True),
    "parameter": lambda: nn.Parameter(torch.ones(3, dtype=zoo.F64)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_the_forward_makes_of_constants(name, dynamo):
    """Read more than once: what is computed from it alone is no constant."""
    make = LEAVES[name]

    def forward(w, x):
        u = make()
        return torch.autograd.grad((x * u**2 * w).sum(), u, create_graph=True)[0] * u.sin()

    model = Weighted(forward)
    assert_equal(loaded(model, (POINT,), dynamo=dynamo, allow=()), model, (POINT,))


def test_torch_func_with_respect_to_constants(dynamo):
    model = Weighted(lambda w, x: torch.func.grad(lambda u: (x * u**2 * w).sum())(torch.arange(1, 4, dtype=zoo.F64)))
    assert_equal(loaded(model, (POINT,), dynamo=dynamo, allow=()), model, (POINT,))
