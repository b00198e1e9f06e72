"""Shifts and bits of every type of integers with each other and with numbers, on both exporters, in portable Functions and in training steps."""

from __future__ import annotations

import operator

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from tests.support import Calls

TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
VALUES = [200, 7, -6, 5, 127, -128, -1, 0, 255, 3]
COUNTS = [0, 1, 7, 3, 2, 5, 4, 6, 1, 2]
OUT_OF_RANGE = [0, 8, 31, 63, 64, -1, 15, 33, 7, 100]
SHIFTS = (operator.lshift, operator.rshift, torch.bitwise_left_shift, torch.bitwise_right_shift)
IN_PLACE = tuple(
    lambda a, b, f=f: f(a.clone(), b)
    for f in (operator.ilshift, operator.irshift, torch.Tensor.bitwise_right_shift_, operator.ior, operator.iand, operator.ixor)
)
BITS = (operator.and_, operator.or_, operator.xor, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)


def _calls(dtype, dynamo):
    """Each call that eager mode takes, of the values, the counts, counts out of range, and both in each type."""
    numbers = torch.tensor(VALUES).to(dtype), torch.tensor(COUNTS).to(dtype), torch.tensor(OUT_OF_RANGE).to(dtype)
    args = (*numbers, *(torch.tensor(COUNTS).to(other) for other in TYPES), torch.tensor([True, False] * 5))
    found = []
    for f in (*SHIFTS, *IN_PLACE[:3]):
        found += [lambda *xs, f=f, i=i: f(xs[0], xs[i]) for i in ((1, 2) if dynamo else (1,))]
        found += [lambda *xs, f=f, i=i: f(xs[0], xs[i]) for i in range(3, 3 + len(TYPES))]
        found += [lambda *xs, f=f, n=n: f(xs[0], n) for n in ((0, 1, 4, 7, 15, 31, 63, 64, -1, True) if dynamo else (0, 1, 4, True))]
        found += [lambda *xs, f=f, n=n: f(n, xs[1]) for n in (1, 5)]
    for f in (*BITS, *IN_PLACE[3:]):
        found += [lambda *xs, f=f, i=i: f(xs[0], xs[i]) for i in (1, *range(3, 4 + len(TYPES)))]
        found += [lambda *xs, f=f, i=i: f(xs[i], xs[0]) for i in range(3, 4 + len(TYPES))]
        found += [lambda *xs, f=f, n=n: f(xs[0], n) for n in (0, 15, 240, 255, -3, True)]
        found += [lambda *xs, f=f, n=n: f(n, xs[0]) for n in (15, -3)]
    found += [lambda *xs: ~xs[0], lambda *xs: xs[0] << xs[1].max(), lambda *xs: xs[1].max() | xs[0]]
    return [call for call in found if _works(call, *args)], args


def _works(call, *args):
    try:
        call(*args)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equal_eager(dtype, dynamo):
    calls, args = _calls(dtype, dynamo)
    assert len(calls) > 150
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )  # hundreds of small operators: to open them is the test
    program = exporter.export(Calls(lambda *xs: tuple(call(*xs) for call in calls)), args, dynamo=dynamo)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    feeds = dict(zip((f"{value.name}" for value in session.get_inputs()), (x.numpy() for x in args)))
    for i, (mine, call) in enumerate(zip(session.run(None, feeds), calls, strict=True)):
        its = call(*args).numpy()
        assert mine.dtype == its.dtype, i
        np.testing.assert_array_equal(mine, its, err_msg=str(i))


class Pack(torch.autograd.Function):
    """Two numbers of four bits in a byte, kept for backward, as ActNN and QLoRA keep them."""

    @staticmethod
    def forward(ctx, x, packed):
        q = ((x + 4) * 1.5).round().to(torch.uint8)
        ctx.save_for_backward((q[:, 0::2] << 4) | q[:, 1::2])
        return x * (torch.stack([packed >> 4, packed & 15], -1).flatten(1).to(x.dtype) - 7.5)

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        return grad * torch.stack([p >> 4, p & 15], -1).flatten(1).to(grad.dtype), None


class Packs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("packed", torch.randint(0, 256, (4, 4), dtype=torch.uint8))

    def forward(self, x):
        return Pack.apply(self.layer(x).clamp(-2, 2), self.packed)


@pytest.mark.parametrize("portable", [False, True])
def test_packed_numbers(portable, dynamo):
    model, x = Packs(), torch.randn(4, 8)
    loaded = exporter.load(exporter.export(model, (x,), portable=portable, dynamo=dynamo), allow=(Pack,))
    given, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(loaded(given), model(mine))
    loaded(given).sum().backward()
    model(mine).sum().backward()
    torch.testing.assert_close(given.grad, mine.grad)
    step = exporter.export_training_step(model, (x,), loss=lambda y: y.square().mean(), portable=portable, dynamo=dynamo, optimizer="sgd")
    before = model(x).square().mean().item()
    assert abs(float(exporter.Trainer(step, allow=(Pack,)).step({"x": x})) - before) < 1e-4
