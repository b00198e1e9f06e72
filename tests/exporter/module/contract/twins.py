"""The models of the rows: an eager one, and the same as files that are loaded."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import onnx.parser
import torch
from torch import nn

import exporter
from tests.trains import loaded

__all__ = ["KINDS", "Net", "TiedNet", "twins", "x_of"]

#: Who made a file: our two exporters, and torch's own without us, whose file has no metadata of ours.
KINDS = ("dynamo", "torchscript", "foreign")


class Cubed(torch.autograd.Function):
    """x ** 3, as torch.func takes Functions, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * g


class Net(nn.Module):
    """Layers with and without state, a Function, running statistics, a buffer, a frozen parameter."""

    def __init__(self, function: Callable[..., Any] = Cubed.apply) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self._function(self.first(x)))) * self.scale + self.frozen


class Uncounted(nn.BatchNorm1d):
    """Without the counter of batches, which a plain file does not have and torch's would put into a state_dict."""

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


class TiedNet(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x)))


class Inverse(nn.Module):
    """Stands for a file with an operator that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x[:4] @ self.w)


INVERSE = """<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g (float[6, 4] x) => (float[4, 4] y)
    <float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, int64[1] start = {0}, int64[1] end = {4}>
    { part = Slice(x, start, end)  h = MatMul(part, w)  y = com.microsoft.Inverse(h) }"""

NETS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "double": lambda: Net().double(),
    "tied": TiedNet,
    "training file": Net,
    "inverse": Inverse,
    "drop": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
}


def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


def x_of(net: str) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(torch.float64 if net == "double" else torch.float32)


@functools.cache
def _made(net: str, kind: str, training: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, x = NETS[net]().train(training), x_of(net)
    if net == "inverse":
        return model, exporter.load(onnx.parser.parse_model(INVERSE))
    if net == "training file":
        return model, exporter.load(exporter.build_gradient_graph(exporter.export(copy.deepcopy(model), (x,))), allow=[Cubed])
    if kind != "foreign":
        return model, loaded(model, (x,), dynamo=kind == "dynamo", allow=[Cubed])
    if isinstance(model, Net):
        _as_foreign(model)
    written = io.BytesIO()
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(copy.deepcopy(model), (x,), written, dynamo=False, training=mode, do_constant_folding=False)
    proto = onnx.load_from_string(written.getvalue())
    assert not proto.metadata_props
    module = exporter.load(proto)
    if training:
        model.load_state_dict(module.state_dict())  # torch's exporter has run the model once
    return model, module


def _as_foreign(model: Net) -> None:
    """What a plain file says of it: no counter of batches, and every float tensor is a weight."""
    model._function = cube
    model.norm.__class__ = Uncounted
    model.norm.num_batches_tracked = None
    model.frozen.requires_grad_(True)
    scale = model.scale
    del model.scale
    model.scale = nn.Parameter(scale)


def twins(net: str, kind: str, training: bool = True) -> tuple[nn.Module, nn.Module]:
    """The eager model and the loaded one, in a mode, each its caller's own; sessions are shared by all copies."""
    model, module = (copy.deepcopy(each) for each in _made(net, kind, training))
    return model, module
