"""Arguments and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import add, net, some


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Out:
    value: torch.Tensor
    more: Any = None


torch.export.register_dataclass(Out)


@add
def nested_arguments() -> Given:
    return net(lambda m, d, pair: d["a"] * d["b"][0] + pair[0] - pair[1][0], {"a": some(), "b": [some(), some()]}, (some(), (some(),)))


@add
def named_tuples() -> Given:
    return net(lambda m, p: Pair(p.left + 1, p.right * 2), Pair(some(), some()))


@add
def dataclasses_() -> Given:
    return net(lambda m, x: Out(x + 1, [x * 2]), some())


@add
def dataclass_argument() -> Given:
    return net(lambda m, o: o.value + 1, Out(some()))


@add
def dict_result() -> Given:
    return net(lambda m, x: {"b": x + 1, "a": (x * 2, {"c": x - 1})}, some())


@add
def none_in_arguments() -> Given:
    def body(m, x, y, z):
        return x + z if y is None else x + y

    return net(body, some(), None, some())


@add
def none_in_results() -> Given:
    return net(lambda m, x: (x + 1, None, x * 2), some())


class _Optional(nn.Module):
    def forward(self, x, mask: torch.Tensor | None = None, scale: float = 2.0, flag: bool = False, mode: str = "add", *, bias=None):
        x = x * scale if mode == "mul" else x + scale
        x = -x if flag else x
        x = x if mask is None else x * mask
        return x if bias is None else x + bias


@add
def optional_left_out() -> Given:
    return Given(_Optional().eval(), (some(),))


@add
def optional_as_keywords() -> Given:
    return Given(_Optional().eval(), (some(),), {"bias": some(4), "mask": some()})


@add
def numbers_and_texts() -> Given:
    return Given(_Optional().eval(), (some(), None, 3.0, True, "mul"))


@add
def numbers_as_keywords() -> Given:
    return Given(_Optional().eval(), (some(),), {"scale": 3.0, "flag": True, "mode": "mul"})


@add
def integer_argument() -> Given:
    return net(lambda m, x, n: x[:, :n] * n, some(), 2)


@add
def var_arguments() -> Given:
    return net(lambda m, *xs: sum(xs), some(), some(), some())


class _Keywords(nn.Module):
    def forward(self, x, **more):
        return x + more["b"] - more["a"]


@add
def var_keywords() -> Given:
    return Given(_Keywords().eval(), (some(),), {"b": some(), "a": some()})


@add
def input_returned() -> Given:
    return net(lambda m, x, y: (x, x + y, y), some(), some())


@add
def only_inputs_returned() -> Given:
    return net(lambda m, x, y: (y, x), some(), some())


@add
def parameter_returned() -> Given:
    return net(lambda m, x: (m.w, x * m.w), some(), w=nn.Parameter(some(4)))


@add
def buffer_returned() -> Given:
    return net(lambda m, x: (x * 2, m.b), some(), b=some(4))


@add
def constant_returned() -> Given:
    return net(lambda m, x: (x * 2, torch.ones(2)), some())


@add
def number_returned() -> Given:
    return net(lambda m, x: (x * 2, 3), some())


@add
def twice_returned() -> Given:
    def body(m, x):
        y = x * 2
        return y, y, (y,)

    return net(body, some())


@add
def view_of_input_returned() -> Given:
    return net(lambda m, x: (x.view(12), x.T, x[0]), some())


@add
def empty_result() -> Given:
    return net(lambda m, x: (x[:0] * 2, x + 1), some())


@add
def empty_argument() -> Given:
    return net(lambda m, x, y: torch.cat([x, y]), some(), some(0, 4))


@add
def no_arguments() -> Given:
    return net(lambda m: m.w * 2, w=nn.Parameter(some(4)))


@add
def unread_argument() -> Given:
    return net(lambda m, x, y, z: x * z, some(), some(2), some())


@add
def scalar_arguments() -> Given:
    return net(lambda m, x, s: x * s, some(), torch.tensor(2.0))


@add
def integers_and_booleans() -> Given:
    return net(
        lambda m, i, b, u: (torch.where(b, i, i + 1), ~b, u * 2),
        torch.arange(4),
        torch.tensor([True, False, True, False]),
        torch.arange(4, dtype=torch.uint8),
    )


@add
def argument_written() -> Given:
    def body(m, x):
        x.mul_(2)
        return x + 1

    return net(body, some())


@add
def same_tensor_twice() -> Given:
    x = some()
    return net(lambda m, a, b: a * b + b, x, x)


@add
def argument_is_a_parameter() -> Given:
    return net(lambda m, a: a * 2, nn.Parameter(some()))


@add
def argument_of_an_expand() -> Given:
    return net(lambda m, a: a * 2, some(1, 4).expand(3, 4))
