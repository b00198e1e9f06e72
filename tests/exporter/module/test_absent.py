"""Outputs that get no gradient: what eager does not run, a loaded module does not run either. Every set of outputs, against eager."""

import itertools
import threading

import pytest
import torch
from torch import nn

import exporter


class Penalty(torch.autograd.Function):
    """Adds the gradient of a penalty on its way back, whatever comes in."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0.1 * ctx.saved_tensors[0].sign()


class Two(torch.autograd.Function):
    """Its backward gets zeros for the output without a gradient, as eager gives them."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * y + b + 0.3 * x, a * x + b - 0.2 * y


class Lonely(torch.autograd.Function):
    """Its backward wants None for that, and takes another way then."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        if a is None or b is None:
            return 1 + (20 * a if b is None else 30 * b)
        return a * 2 + b * 3


class Net(nn.Module):
    """Functions in a row and beside one another, a slope without end, tied and frozen weights, a normalization that counts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.frozen = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.c.weight = self.b.weight
        self.frozen.requires_grad_(False)
        self.norm, self.conv = nn.BatchNorm1d(3), nn.Conv1d(2, 2, 1)

    def forward(self, x, z):
        h = self.a(self.conv(x.unflatten(0, (-1, 2))).flatten(0, 1))
        p = Penalty.apply(Penalty.apply(h))
        u, v = Two.apply(self.b(h), z)
        one, other = Lonely.apply(self.c(p))
        return self.norm(h), torch.sqrt(torch.relu(h)), u + self.frozen(p), v, one, other


class Smooth(nn.Module):
    """Backwards that are linear in what comes in: what a second derivative adds to a first one, it may add apart."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x, z):
        h = self.a(x)
        return h.sin() * z, torch.sqrt(torch.relu(h)), h.tanh() * x.mean()


def inputs(seed=1):
    torch.manual_seed(seed)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)


def loaded(model, dynamo, training=False, **options):
    program = exporter.export(model, inputs(), dynamo=dynamo)
    return exporter.load(exporter.build_gradient_graph(program) if training else program, allow=[f"{__name__}:*"], **options).train()


def subsets(count):
    return [chosen for size in range(1, count + 1) for chosen in itertools.combinations(range(count), size)]


def gradients(module, names, chosen, *, retain=False):
    """Of the inputs and the parameters; by one backward for all that is chosen, or one for each."""
    given = inputs(2)
    module.zero_grad()
    results = module(*given)
    if retain:
        for place in chosen:
            results[place].sin().sum().backward(retain_graph=True)
    else:
        sum(results[place].sin().sum() for place in chosen).backward()
    return [*(x.grad for x in given), *(module.get_parameter(name).grad for name in names)]


def second(module, names, chosen):
    """The first and the second derivatives, the latter of the first of the former alone, and of all."""
    x, z = inputs(2)
    wanted = [x, z, *map(module.get_parameter, names)]
    results = module(x, z)
    first = torch.autograd.grad([results[place].sin().sum() for place in chosen], wanted, create_graph=True, allow_unused=True)
    found = [g for g in first if g is not None]
    return [
        *first,
        *(g for end in (1, len(found)) for g in torch.autograd.grad([g.sin().sum() for g in found[:end]], wanted, allow_unused=True, retain_graph=True)),
    ]  # fmt: skip


def compare(ours, theirs):
    assert [g is None for g in ours] == [g is None for g in theirs]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs], equal_nan=True, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("dynamo", "training", "options"),
    [(True, False, {}), (False, False, {"recompute": "auto"}), (False, True, {})],
    ids=["dynamo", "torchscript, recomputed", "training file"],
)
def test_sets_of_outputs(dynamo, training, options):
    """Each output alone, some pairs and triples, all but one, all."""
    torch.manual_seed(0)
    model = Net().train()
    module, names = loaded(model, dynamo, training, **options), [name for name, _ in model.named_parameters()]
    for chosen in [*((i,) for i in range(6)), (0, 1), (1, 2, 4), (0, 2, 3, 4, 5), tuple(range(6))]:
        compare(gradients(module, names, chosen), gradients(model, names, chosen))
    compare(gradients(module, names, (0, 2, 4), retain=True), gradients(model, names, (0, 2, 4), retain=True))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_second_derivatives_of_every_set(dynamo):
    torch.manual_seed(0)
    model = Smooth()
    module, names = loaded(model, dynamo), [name for name, _ in model.named_parameters()]
    for chosen in subsets(3):
        compare(second(module, names, chosen), second(model, names, chosen))


def test_one_session_for_each_set_whoever_asks_first():
    """Eight threads ask for the sets of three outputs, each in another order."""
    torch.manual_seed(0)
    model = Smooth()
    module, names = loaded(model, True), ["a.weight", "a.bias"]
    expected = {chosen: second(model, names, chosen) for chosen in subsets(3)}
    failed = []

    def ask(start):
        try:
            for chosen in [*subsets(3)[start:], *subsets(3)[:start]]:
                compare(second(module, names, chosen), expected[chosen])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(i % 7,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    (plan,) = (plan for plan in module._onnx.plans._plans.values() if plan.partition is not None)
    assert len(plan.orders.first) == 7
    assert len(module._onnx.plans.store) == 0
