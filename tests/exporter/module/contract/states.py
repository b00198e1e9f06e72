"""Rows of state: names, values, what is in a place."""

from __future__ import annotations

import torch
from torch import nn

from tests.exporter.module.contract.row import ALL, OURS, row, state, step

STATE = "State"


@row(STATE, "`state_dict()`: keys, order, values; `prefix`, `keep_vars`", kinds=ALL)
def state_dict(m, x):
    kept = m.state_dict(keep_vars=True)
    return [
        list(m.state_dict().items()),
        list(m.state_dict(prefix="a.")),
        [v.requires_grad for v in kept.values()],
        all(kept[n] is p for n, p in m.named_parameters()),
    ]


@row(STATE, "`load_state_dict`: back into the module and from it, `strict` and not")
def load_state_dict(m, x):
    given = {name: value + 1 for name, value in m.state_dict().items()}
    found = [str(m.load_state_dict(given)), step(m, x)]
    del given["second.bias"]
    given["other"] = torch.zeros(1)
    found.append(str(m.load_state_dict(given, strict=False)))
    try:
        m.load_state_dict(given)
    except RuntimeError as error:
        found.append(str(error).split("\n", 1)[1])
    given["first.weight"] = torch.zeros(3)
    try:
        m.load_state_dict(given, strict=False)
    except RuntimeError as error:
        found.append(str(error).split("\n", 1)[1])
    return found


@row(STATE, "`load_state_dict(assign=True)`")
def load_state_dict_assign(m, x):
    given = {name: value.clone() + 1 for name, value in m.state_dict().items()}
    m.load_state_dict(given, assign=True)
    return [m.first.weight.data_ptr() == given["first.weight"].data_ptr(), [p.requires_grad for p in m.parameters()], step(m, x), state(m)]


@row(STATE, "`named_parameters`, `named_buffers`, `parameters`, `buffers`: names, order, which require grad", kinds=ALL)
def names(m, x):
    return [
        [(n, p.requires_grad, p.shape, p.is_leaf) for n, p in m.named_parameters()],
        [(n, b.shape, b.dtype) for n, b in m.named_buffers()],
        [n for n, _ in m.named_parameters(recurse=False)],
        len(list(m.parameters())),
        len(list(m.buffers())),
    ]


@row(STATE, "`named_modules`, `named_children`, `modules`: those that have parameters or buffers, in eager's order")
def named_modules(m, x):
    return [[n for n, _ in m.named_modules()], [n for n, _ in m.named_children()], len(list(m.modules()))]


@row(STATE, "`get_parameter`, `get_buffer`, `get_submodule`, attributes")
def get(m, x):
    return [
        m.get_parameter("first.weight"),
        m.get_buffer("norm.running_mean"),
        m.get_submodule("norm").weight,
        m.second.bias,
        hasattr(m, "third"),
    ]


@row(STATE, "tied parameters are one: `named_parameters(remove_duplicate=False)`, gradients, steps", net="tied", kinds=OURS)
def tied(m, x):
    found = [m.head.weight is m.embed.weight, [n for n, _ in m.named_parameters(remove_duplicate=False)], step(m, x)]
    torch.optim.SGD(m.parameters(), 0.1).step()
    return [*found, m(x), state(m)]


@row(
    STATE,
    "tied parameters made two",
    net="tied",
    kinds=OURS,
    refused=r"'embed.weight' and 'head.weight' are one tensor in the file, and two now.*way out",
    way="export the model with weights that are not tied",
)
def untied(m, x):
    m.head.weight = nn.Parameter(m.embed.weight.detach().clone())
    return m(x)


@row(STATE, "a parameter replaced, its `.data` set, changed in place by `nn.init`")
def replaced(m, x):
    torch.manual_seed(3)
    m.first.weight = nn.Parameter(torch.randn(4, 4))
    m.second.weight.data = torch.randn(3, 4)
    nn.init.ones_(m.first.bias)
    return step(m, x)


@row(STATE, "a module in the place of one that has the same parameters")
def module_replaced(m, x):
    torch.manual_seed(3)
    m.second = nn.Linear(4, 3)
    return step(m, x)


@row(STATE, "`register_parameter` and `register_buffer` of names that the file has not: state that nothing reads")
def registered(m, x):
    m.register_parameter("extra", nn.Parameter(torch.ones(2)))
    m.register_buffer("more", torch.ones(2), persistent=False)
    return [step(m, x), sorted(m.state_dict()), m.extra.grad]


@row(STATE, "`apply(fn)`: `fn` sees the module and each part, by attributes")
def applied(m, x):
    seen = []

    def fill(each):
        seen.append(sorted(n for n, _ in each.named_parameters(recurse=False)))
        if isinstance(getattr(each, "weight", None), nn.Parameter):
            nn.init.constant_(each.weight, 0.25)

    m.apply(fill)
    return [seen, step(m, x)]


@row(
    STATE,
    "a part alone: `module.first(x)`, `nn.Sequential(*module.children())`",
    refused=r"'first' of a loaded file cannot be called.*way out",
    way="export that module by itself",
)
def a_part_called(m, x):
    return m.first(x)


@row(
    STATE,
    "a deleted part or parameter",
    refused=r"'second.weight'.*is gone.*way out",
    way="put a parameter of its shape in its place",
)
def deleted(m, x):
    del m.second
    return m(x)
