"""Rows: arguments that are objects: callables, modules, process groups, ctx itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function

import exporter
from tests.end_to_end.functions.arguments import Product
from tests.end_to_end.functions.case import case
from tests.support import process_group_of_one


class Calls(Function):
    """Takes something to call."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        return function(x) * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x, None


def my_activation(x):
    return x.sin()


@case()
def callables(m, x):
    return Calls.apply(x * m.weight, my_activation) + Calls.apply(x, torch.tanh)


class Activation:
    @classmethod
    def cosine(cls, x):
        return x.cos()


@case()
def bound_methods_of_a_class(m, x):
    return Calls.apply(x * m.weight, Activation.cosine)


class RunsModule(Function):
    """A checkpoint as people write it: forward without a graph, backward with one; parameters get .grad on the side."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(leaf), g)
        return None, leaf.grad


class RunsModuleWithoutGrad(RunsModule):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x.detach())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def run(self, x):
        return torch.tanh(self.inner(x))

    def forward(self, x):
        return self.run(x)


@case(state=lambda: {"block": Block()})
def bound_methods_of_a_module(m, x):
    return RunsModule.apply(m.block.run, x * m.weight)


@case(state=lambda: {"block": Block()})
def lambdas_around_a_module(m, x):
    block = m.block
    return RunsModule.apply(lambda h: block(h) * 2, x * m.weight)


@case(state=lambda: {"block": Block()})
def modules(m, x):
    return RunsModule.apply(m.block, x * m.weight)


@case(state=lambda: {"block": Block()})
def modules_run_under_no_grad(m, x):
    return RunsModuleWithoutGrad.apply(m.block, x * m.weight)


class RunsList(Function):
    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        ctx.save_for_backward(x)
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = y = x.detach().requires_grad_()
            for block in ctx.blocks:
                y = block(y)
            torch.autograd.backward(y, g)
        return leaf.grad, None


@case(state=lambda: {"blocks": nn.ModuleList([Block(), Block()])})
def module_lists(m, x):
    return RunsList.apply(x * m.weight, m.blocks)


class AllReduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        assert isinstance(group, torch.distributed.ProcessGroup)
        ctx.group = group
        y = x.clone()
        torch.distributed.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        torch.distributed.all_reduce(g, group=ctx.group)
        return g * 3, None


@case(setup=process_group_of_one)
def process_group(m, x):
    return AllReduce.apply(x * m.weight, torch.distributed.group.WORLD)


class Table:
    """An object that only its own process can make."""

    def __init__(self, scale):
        self.scale = scale

    def forward(self, x):
        return x * self.scale


TABLE = Table(3.0)


class UsesTable(Function):
    @staticmethod
    def forward(ctx, x, table):
        ctx.scale = table.scale
        return x * table.scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale * 5, None


@case(register=lambda: exporter.register(TABLE, "the table"))
def registered_object(m, x):
    return UsesTable.apply(x * m.weight, TABLE)


class TakesCtx(Function):
    """Hands its ctx to another Function's forward and backward."""

    @staticmethod
    def forward(ctx, x, w):
        return Product.forward(ctx, x, w, 4.0)

    @staticmethod
    def backward(ctx, g):
        return Product.backward(ctx, g)[:2]


@case()
def ctx_handed_on(m, x):
    return TakesCtx.apply(x, m.weight)


class Inner(Function):
    @staticmethod
    def forward(ctx, outer, x):
        outer.factor = 3
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return None, g


class CtxAsArgument(Function):
    @staticmethod
    def forward(ctx, x):
        return Inner.apply(ctx, x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 2


@case()
def ctx_as_argument(m, x):
    return CtxAsArgument.apply(x * m.weight)
