"""What a forward writes into a container for its caller: the model reads it as in eager, or its use is refused."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import exporter
from symbolics.errors import ExportError

pytestmark = pytest.mark.filterwarnings("ignore:.*its forward changes argument")


@dataclass
class Notes:
    scale: float = 1.0
    seen: list[Any] = field(default_factory=list)


class Doubles(Function):
    """The base: doubles x after ``write`` wrote into ``told``."""

    write: Any

    @classmethod
    def forward(cls, ctx, x, told):
        y = x * 2
        cls.write(told, x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


def doubles(name, write):
    made = type(name, (Doubles,), {"__module__": __name__, "write": staticmethod(write)})
    globals()[name] = made
    return made


def largest(x):
    return float(x.detach().abs().max().numpy())


#: name -> what the caller makes, what forward writes, what the caller does with it.
TOLD = {
    "number": (dict, lambda t, x, y: t.update(scale=3.0), lambda t, y: y * t["scale"]),
    "appended": (list, lambda t, x, y: t.append(5.0), lambda t, y: y * (len(t) + 1) * t[0]),
    "taken": (lambda: [7.0, 2.0], lambda t, x, y: t.pop(), lambda t, y: y * len(t)),
    "field": (Notes, lambda t, x, y: setattr(t, "scale", 4.0), lambda t, y: y * t.scale),
    "nested": (lambda: {"a": [{}]}, lambda t, x, y: t["a"][0].update(k=[2.0, 3.0]), lambda t, y: y * t["a"][0]["k"][1]),
    "output": (dict, lambda t, x, y: t.update(k=[y, 3.0]), lambda t, y: t["k"][0] * t["k"][1] + y),
    "input": (dict, lambda t, x, y: t.update(x=x), lambda t, y: y * t["x"]),
    "tensor that nobody uses": (dict, lambda t, x, y: t.update(m=(x > 0).float()), lambda t, y: y * (3 if "m" in t else 1)),
    "value that nobody uses": (dict, lambda t, x, y: t.update(s=largest(x)), lambda t, y: y * 2),
}
REFUSED = {
    "tensor": (dict, lambda t, x, y: t.update(m=(x > 0).float()), lambda t, y: y * t["m"]),
    "value": (dict, lambda t, x, y: t.update(s=math.sqrt(largest(x))), lambda t, y: y * t["s"]),
    "compared": (dict, lambda t, x, y: t.update(s=x.detach().numpy().max()), lambda t, y: y * 2 if t["s"] > 100 else y),
    "size": (dict, lambda t, x, y: t.update(n=len(x.detach().numpy())), lambda t, y: y * t["n"]),
}
CLASSES = {
    name: doubles(f"Told{i}", write) for i, (name, (_, write, _)) in enumerate({**TOLD, **{f"{n}!": r for n, r in REFUSED.items()}}.items())
}


class Net(nn.Module):
    def __init__(self, row, function):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.row, self.function = types.SimpleNamespace(make=row[0], use=row[2]), function

    def forward(self, x):
        told = self.row.make()
        y = self.function.apply(self.linear(x), told)
        return self.row.use(told, y)


def exported(row, function, dynamo):
    torch.manual_seed(0)
    net, x = Net(row, function), torch.randn(4, 3)
    sizes = {"dynamic_shapes": ({0: "n"},)} if dynamo else {"dynamic_axes": {"x": {0: "n"}}, "input_names": ["x"]}
    return net, exporter.export(net, (x,), dynamo=dynamo, **sizes)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", TOLD)
def test_a_caller_reads_what_forward_told(name, dynamo, tmp_path):
    net, program = exported(TOLD[name], CLASSES[name], dynamo)
    program.save(tmp_path / "told.onnx")
    module = exporter.load(tmp_path / "told.onnx", allow=[f"{__name__}:*"])
    for rows in (4, 5, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), net(x))
    for each in (module, net):
        each(x).sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, net.linear.weight.grad)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_file_can_hold_is_refused_where_it_is_used(name, dynamo):
    with pytest.raises(ExportError, match=r"Told\d+'s forward puts a (tensor|value).*Return it as a tensor"):
        exported(REFUSED[name], CLASSES[f"{name}!"], dynamo)
