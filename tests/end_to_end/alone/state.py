"""Parameters and buffers."""

from __future__ import annotations

import collections

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import Net, add, net, some


@add
def parameter_list_and_dict() -> Given:
    def body(m, x):
        return x * m.many[0] + m.many[1] * m.named["a.b" if "a.b" in m.named else "a"]

    return net(body, some(), many=nn.ParameterList([some(4), some(4)]), named=nn.ParameterDict({"a": nn.Parameter(some(4))}))


@add
def module_list_and_dict() -> Given:
    def body(m, x, which="one"):
        for layer in m.layers:
            x = layer(x)
        return m.heads[which](x)

    return net(
        body,
        some(),
        layers=nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]),
        heads=nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Identity()}),
    )


@add
def buffers_not_persistent() -> Given:
    model = Net(lambda m, x: x + m.kept + m.passing, kept=some(4))
    model.register_buffer("passing", some(4), persistent=False)
    return Given(model.eval(), (some(),))


@add
def buffer_none() -> Given:
    model = Net(lambda m, x: x if m.nothing is None else x + m.nothing)
    model.register_buffer("nothing", None)
    model.register_parameter("bias", None)
    return Given(model.eval(), (some(),))


@add
def attributes_of_tensors() -> Given:
    model = Net(lambda m, x: x * m.plain + m.table["a"] + m.rows[0])
    model.plain, model.table, model.rows = [some(4)][0], {"a": some(4)}, [some(4)]
    return Given(model.eval(), (some(),))


class _Hooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self._register_state_dict_hook(
            lambda module, state, prefix, local: collections.OrderedDict((f"old.{k}", v) for k, v in state.items())
        )
        self.inner.register_forward_hook(lambda module, args, out: out * 2)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x):
        return self.inner(x)


@add
def state_dict_hooks() -> Given:
    return Given(_Hooks().eval(), (some(),))


@add
def lazy() -> Given:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).eval()
    model(some())
    return Given(model, (some(),))


@add
def lazy_not_run() -> Given:
    return Given(nn.Sequential(nn.LazyLinear(3)).eval(), (some(),))


@add
def shared_submodules() -> Given:
    layer = nn.Linear(4, 4)
    return Given(nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()), layer).eval(), (some(),))


@add
def tied_parameters() -> Given:
    def body(m, ids):
        return m.head(m.table(ids))

    model = Net(body, table=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False))
    model.head.weight = model.table.weight
    return Given(model.eval(), (torch.tensor([[1, 2]]),))


@add
def names_with_dots() -> Given:
    model = nn.Sequential(collections.OrderedDict([("0", nn.Linear(4, 4)), ("weight", nn.Linear(4, 4)), ("input", nn.ReLU())]))
    return Given(model.eval(), (some(),))


@add
def counter_written() -> Given:
    def body(m, x):
        m.count += 1
        return x * m.count

    return net(body, some(), count=torch.zeros(()))


@add
def state_of_half() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4)).half().eval(), (some().half(),), loose=1e-2)


@add
def state_of_double() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().eval(), (some().double(),))


@add
def frozen() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False).eval(), (some(),))


@add
def state_without_storage_order() -> Given:
    return net(lambda m, x: x @ m.w, some(), w=nn.Parameter(some(5, 4).T))


@add
def expanded_buffer() -> Given:
    return net(lambda m, x: x + m.b, some(), b=torch.arange(4.0).expand(3, 4))


@add
def empty_parameter() -> Given:
    return net(lambda m, x: torch.cat([x, m.none], 0), some(), none=nn.Parameter(torch.zeros(0, 4)))


@add
def sparse_buffer() -> Given:
    return net(lambda m, x: x @ m.s.to_dense(), some(), s=torch.eye(4).to_sparse())
