"""Modules whose forward writes buffers: what it reads before it writes it is state, the rest is none."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["BATCH", "STATE", "WRITTEN", "Written"]

BATCH = (3, 4)


class Saves(torch.autograd.Function):
    """Reads its second argument in the backward alone."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (scale,) = ctx.saved_tensors
        return g * (1 + scale), None


class Writes(nn.Module):
    """A buffer ``b``, and what ``step`` makes of it and of the input."""

    def __init__(self, step, value=None, persistent=True):
        super().__init__()
        self.step = step
        self.register_buffer("b", torch.full((4,), 0.5) if value is None else value, persistent=persistent)

    def forward(self, x):
        return self.step(self, x)


def mean(x):
    return x.detach().abs().mean(0)


# ------------------------------------------------------------------------------------------------------------ only written


def assigned(self, x):
    self.b = mean(x)
    return x


def copied_then_read(self, x):
    self.b.copy_(mean(x))
    return x / (1 + self.b)


def through_data(self, x):
    self.b.data = mean(x)
    return x


def all_of_a_slice(self, x):
    self.b[:] = mean(x)
    return x * self.b.shape[0]


def filled_then_added(self, x):
    self.b.zero_().add_(mean(x))
    return x + torch.zeros_like(self.b)


def by_out(self, x):
    torch.amax(x.detach(), 0, out=self.b)
    return x + self.b.view(2, 2).reshape(4)


def another_shape(self, x):
    self.b = mean(x).sum()
    return x + self.b


def written_in_both_calls(self, x):
    for each in (x, 2 * x):
        self.b = mean(each)
        x = x + self.b
    return x


# --------------------------------------------------------------------------------------------------- read before it is written


def read_first(self, x):
    y = x + self.b
    self.b = mean(x)
    return y


def read_through_a_view(self, x):
    old = self.b.view(2, 2)
    y = x + old.t().reshape(4)
    self.b.copy_(mean(x))
    return y


def average_in_place(self, x):
    self.b.mul_(0.9).add_(mean(x), alpha=0.1)
    return x


def average_by_functions(self, x):
    def faded(old, new):
        return 0.9 * old + 0.1 * new

    self.b = faded(self.b, mean(x))
    return x


def counted(self, x):
    self.b += 1
    return x


def one_element(self, x):
    self.b[1] = x.detach().mean()
    return x


def part_of_it(self, x):
    self.b[1:3].copy_(mean(x)[1:3])
    return x + self.b.sum()


def where_it_is_small(self, x):
    self.b = torch.where(mean(x) < self.b, mean(x), self.b)
    return x


def under_a_mask(self, x):
    self.b.masked_fill_(mean(x) < 0.5, 0.25)
    return x


def read_in_the_backward(self, x):
    y = Saves.apply(x, self.b)
    self.b = mean(x)
    return y


def read_in_evaluation(self, x):
    if self.training:
        self.b.copy_(mean(x))
        return x / (1 + mean(x))
    return x / (1 + self.b)


def read_in_the_second_call(self, x):
    for each in (x, 2 * x):
        x = x + self.b
        self.b = mean(each)
    return x


#: name -> a module; of the first the buffer is no state, of the second it is.
WRITTEN = (assigned, copied_then_read, through_data, all_of_a_slice, filled_then_added, by_out, another_shape, written_in_both_calls)
STATE = (
    read_first, read_through_a_view, average_in_place, average_by_functions, counted, one_element, part_of_it, where_it_is_small, under_a_mask,
    read_in_the_backward, read_in_evaluation, read_in_the_second_call,
)  # fmt: skip


class Written(nn.Module):
    """All of them, behind one another, and notes that are no buffers; some notes differ in each call, whatever the generators say."""

    def __init__(self, steps=(*WRITTEN, *STATE)):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({step.__name__: Writes(step, persistent=step is not counted) for step in steps})
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.seed, self.notes = None, {"mean": torch.zeros(4)}

    def forward(self, x):
        self.seed = torch.Generator().seed()
        self.notes["mean"] = mean(x)
        self.last = x.detach()
        with torch.no_grad():
            self.fixed.copy_(mean(x))
        for part in self.parts.values():
            x = part(self.head(x))
        return x * self.fixed
