"""Rows that work and have something to say: the warning names Function, module and remedy."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import Function

from tests.end_to_end.functions.calls import Sneaky
from tests.end_to_end.functions.case import case


def forward_with(table):
    def forward(ctx, x):
        return x * table

    return forward


class Closes(Function):
    forward = staticmethod(forward_with(torch.tensor([1.0, 2.0, 3.0, 4.0])))

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def tensor_closed_over(m, x):
    return Closes.apply(x * m.weight)


class SneakyNumpy(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        x.detach().numpy()[...] = -1
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def undeclared_mutation_through_numpy(m, x):
    return SneakyNumpy.apply(x * m.weight)


@case()
def undeclared_mutation_that_is_read(m, x):
    h = x * m.weight
    return Sneaky.apply(h) + h


class Rows(Function):
    @staticmethod
    def forward(ctx, x, rows):
        return x * rows

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


@case()
def size_frozen_as_int(m, x):
    return Rows.apply(x * m.weight, int(x.shape[0]))


@case(dynamic=True)
def size_frozen_as_int_of_a_dynamic_dimension(m, x):
    return Rows.apply(x * m.weight, int(x.shape[0]))


class Counts(Function):
    """Its scale moves with each call, as the statistics of a quantizer do."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counts.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def state_on_the_class(m, x):
    return Counts.apply(x * m.weight)


class State:
    """bitsandbytes' MatmulLtState: an argument that remembers."""

    def __init__(self):
        self.seen = None


class Remembers(Function):
    @staticmethod
    def forward(ctx, x, state):
        state["calls"] = state.get("calls", 0) + 1
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


MEMORY: dict = {}


@case()
def state_in_an_argument(m, x):
    return Remembers.apply(x * m.weight, MEMORY)


class NumpyDraws(Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.from_numpy((np.random.rand(*x.shape) < 0.5).astype(np.float32))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 3


@case()
def randomness_of_numpy(m, x):
    return NumpyDraws.apply(x * m.weight)
