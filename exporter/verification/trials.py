"""What `pythonop doctor` tries: one small model with a Function of its own, on the way from torch to a gradient on each runtime."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from exporter.files.program import Program
from exporter.forward.export import export
from exporter.gradient_graph.build import build_gradient_graph
from exporter.module.load import load
from exporter.runtime.absent import NO_ONNXRUNTIME
from exporter.runtime.accelerate import accelerator, switched_off
from exporter.runtime.library import available
from exporter.runtime.reference import reference_evaluator
from symbolics.capture.interception import TESTED
from symbolics.errors import RunError
from symbolics.graph.values import is_python_op, name_of
from symbolics.node.metadata import pairing_of
from symbolics.text import extra

__all__ = ["TRIALS", "NotThere", "Probe", "anew"]


class NotThere(Exception):
    """Something optional is not installed; the text says how to get it."""


class Probe(torch.autograd.Function):
    """Twice its argument forward, seven times backward: no derivative of its forward looks like that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """2 x."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        """7 g."""
        return g * 7


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Probe.apply(x) + 1  # type: ignore[no-untyped-call]
        return result


_X = (1.0, -2.0)


def _input() -> torch.Tensor:
    return torch.tensor(_X, requires_grad=True)


@functools.cache
def _exported(dynamo: bool = True, portable: bool = False) -> Program:
    return export(_Model().eval(), (_input().detach(),), dynamo=dynamo, portable=portable)


def anew() -> None:
    """The trials share what they export: forget what earlier ones did, in a process where torch may have been another."""
    _exported.cache_clear()


def _release() -> str:
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TESTED:
        return f"torch {torch.__version__} is not among those that were tested ({', '.join(TESTED)}); what follows says whether it works"
    return f"torch {torch.__version__} is among those that were tested"


def _captured(dynamo: bool) -> str:
    calls = [node for node in _exported(dynamo).model.graph if is_python_op(node)]
    if len(calls) != 1:
        raise RunError(f"the file has {len(calls)} PythonOps for one call")
    return "a call of a Function is one PythonOp"


def _gradient() -> str:
    count = len(list(build_gradient_graph(_exported()).graph))
    return f"{count} nodes for a forward of {len(list(_exported().model.graph))}"


def _equal(y: torch.Tensor, gradient: torch.Tensor) -> str:
    if y.tolist() != [2 * x + 1 for x in _X] or gradient.tolist() != [7.0, 7.0]:
        raise RunError(f"the outputs are {y.tolist()}, the gradient is {gradient.tolist()}: not eager's")
    return "outputs and gradients are eager's"


def _onnxruntime() -> str:
    if (problem := available()) is not None:
        raise (NotThere if importlib.util.find_spec("onnxruntime") is None else RunError)(problem)
    x = _input()
    y = load(_exported(), allow=[Probe])(x)
    y.sum().backward()
    assert x.grad is not None
    return _equal(y.detach(), x.grad)


def _reference() -> str:
    training = build_gradient_graph(_exported())
    pairing = pairing_of(training)
    assert pairing is not None
    (seed,) = pairing.inputs.values()
    feeds = {name_of(training.graph.inputs[0]): _input().detach().numpy(), seed: torch.ones(2).numpy()}
    y, gradient = reference_evaluator(training, allow=[Probe]).run(None, feeds)
    return _equal(torch.from_numpy(y), torch.from_numpy(gradient))


def _portable() -> str:
    program = _exported(portable=True)
    left = [node for node in program.model.graph if is_python_op(node)]
    if left:
        raise RunError(program.portable[0].reason)
    if importlib.util.find_spec("onnxruntime") is None:
        raise NotThere(NO_ONNXRUNTIME)
    x = _input()
    y = load(program)(x)
    y.sum().backward()
    assert x.grad is not None
    return _equal(y.detach(), x.grad)


def _providers() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        raise NotThere(NO_ONNXRUNTIME)
    import onnxruntime

    from exporter.runtime.providers import installed

    offers, idle = installed()
    ready = ", ".join([*onnxruntime.get_available_providers(), *(f"{name} ({devices})" for name, devices in offers.items())])
    return "; ".join([ready, *(f"not {name}: {why}" for name, why in idle.items())])


def _accelerator() -> str:
    if switched_off():
        raise NotThere("PYTHONOP_ACCELERATE leaves them out")
    if importlib.util.find_spec("onnxruntime") is None:
        raise NotThere(NO_ONNXRUNTIME)
    guest = accelerator(None)
    if guest is None or guest.library is None:
        raise NotThere("this install has no compiled code: graphs run on onnxruntime's own kernels")
    return "run parts of a graph; PYTHONOP_ACCELERATE=0 leaves them out"


def _report() -> str:
    if importlib.util.find_spec("jinja2") is None:
        raise NotThere(extra("report"))
    return "pythonop verify --html writes it"


TRIALS: dict[str, Callable[[], str]] = {
    "torch's release": _release,
    "export, dynamo": functools.partial(_captured, True),
    "export, TorchScript": functools.partial(_captured, False),
    "gradient graph": _gradient,
    "onnxruntime": _onnxruntime,
    "onnx.reference": _reference,
    "without Python (portable=)": _portable,
    "onnxruntime's providers": _providers,
    "pythonop's CPU kernels": _accelerator,
    "page of verify": _report,
}
