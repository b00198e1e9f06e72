"""200 steps of AdamW, eager and loaded file, same data: one curve."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import exporter
from tests.models import zoo

pytestmark = pytest.mark.slow
STEPS = 200


def _bloom():
    entry = zoo.bloom()
    ids, mask = entry.args
    return entry.model, entry.args, entry.allow, lambda logits: torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), 3e-3


class SpikingNet(zoo.SpikingNet):
    """snntorch's spikes are float32 whatever goes in: a network of another type has to convert them."""

    def forward(self, x):
        membrane, potential = self.leaky.init_leaky(), self.output.init_leaky()
        spikes, potentials = [], []
        for step in range(4):
            spike, membrane = self.leaky(self.first(x[step]), membrane)
            spike, potential = self.output(self.second(spike.to(x.dtype)), potential)
            spikes.append(spike.to(x.dtype))
            potentials.append(potential)
        return torch.stack(spikes), torch.stack(potentials)


def _snn():
    entry = zoo.snn()
    torch.manual_seed(0)
    entry.model = SpikingNet()
    torch.manual_seed(3)
    target = torch.randn(4, 2, 4)
    return entry.model, entry.args, entry.allow, lambda out: (out[1] - target).square().mean() + 0.1 * (out[0].mean(0) - 0.5).square().mean(), 1e-2


CASES = {"bloom": _bloom, "snn": _snn}


def curve(model, args, loss_of, rate, steps=STEPS):
    """The loss of each step, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, first = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(*args))
        loss.backward()
        if not step:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


def _pair(name, kind, dynamo=True):
    model, args, allow, loss_of, rate = CASES[name]()
    model = model.to(kind)
    args = tuple(a.to(kind) if a.is_floating_point() else a for a in args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = exporter.load(exporter.export(copy.deepcopy(model), args, dynamo=dynamo), allow=allow)
    return model, module, args, loss_of, rate


@pytest.mark.parametrize("name", CASES)
def test_in_float64_the_curves_are_one(name, dynamo):
    model, module, args, loss_of, rate = _pair(name, torch.float64, dynamo)
    expected, _ = curve(model, args, loss_of, rate)
    found, _ = curve(module, args, loss_of, rate)
    assert expected[-1] < expected[0] / 2, "the learning rate must teach something"
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_first_gradients_in_float32(name):
    model, module, args, loss_of, rate = _pair(name, torch.float32)
    _, expected = curve(model, args, loss_of, rate, 1)
    _, found = curve(module, args, loss_of, rate, 1)
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in expected.items():
        assert float((found[key] - gradient).abs().max()) < 1e-5 * max(float(gradient.abs().max()), 0.01 * largest), key


@pytest.mark.parametrize("name", CASES)
def test_in_float32_the_curve_is_inside_twice_eagers_envelope(name):
    """Eager against eager with inputs or parameters moved by one ulp and with another thread count: five runs."""
    model, module, args, loss_of, rate = _pair(name, torch.float32)
    start = copy.deepcopy(model)
    expected, _ = curve(model, args, loss_of, rate)
    found, _ = curve(module, args, loss_of, rate)
    envelope = [0.0] * STEPS
    for run in range(5):
        other = copy.deepcopy(start)
        generator = torch.Generator().manual_seed(run)
        if run < 4:
            with torch.no_grad():
                for p in other.parameters():
                    up = torch.rand(p.shape, generator=generator) < 0.5
                    p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf)))
        else:
            torch.set_num_threads(2)
        try:
            losses, _ = curve(other, args, loss_of, rate)
        finally:
            torch.set_num_threads(1)
        envelope = [max(e, abs(a - b)) for e, a, b in zip(envelope, losses, expected, strict=True)]
    widest = 0.0
    for step, (a, b, e) in enumerate(zip(found, expected, envelope, strict=True)):
        widest = max(widest, e)  # chaos grows: what has been seen before a step may be seen at it
        assert abs(a - b) <= 2 * widest + 1e-6 * abs(b), f"step {step}: {a} against {b}, envelope {widest}"
