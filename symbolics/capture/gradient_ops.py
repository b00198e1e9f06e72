"""What stands in a captured graph where a forward takes gradients: two operators, which ``exporter/gradient_graph/inside.py`` puts a sweep in place of.

``pythonop::gradient`` stands for one call of torch.autograd.grad. ``pythonop::variable`` is an identity: a value of its own to
differentiate with respect to, which no optimizer takes for the value that it was made of. In a trace it reads an input of the model
beside (``fed``), for nothing: what reads constants alone, TorchScript's exporter runs, and takes for one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from symbolics.errors import ExportError

__all__ = ["PIN", "Answers", "Taken", "gradient_attributes", "is_edge", "is_pin", "keep_results"]

#: How the key of a variable begins that stands for a tensor to all who read it.
PIN = "pin"


#: Module and line of calls of torch.autograd.grad -> for each of them, in their order: for each input None where it gave None, else whether
#: gradients flow through what it gave. Empty where that cannot be told.
Answers = dict[tuple[str, str], list[tuple[bool | None, ...]]]


@dataclass
class Taken:
    """What one forward has taken gradients of.

    Attributes:
        pins: The tensors with respect to which it has, each with the variable that stands for it.
        accumulated: Tensors with the ``.grad`` that ``backward()`` gave them, by identity.
        given: The model's inputs: in eager mode they are leaves.
        retained: Where retain_grad() was called.
        outputs: What was differentiated.
        hooked: Keys of the hooks on gradients that stood on the way of a gradient when it was taken.
        calls: How many calls of torch.autograd.grad it has made, by module and line.
        pushing: For each jvp that is being taken: what looks at a call of a Function inside of what it differentiates.
        cut: Gradients that were taken without create_graph=True: nothing flows through them.
        shared: What the rows of the Jacobian that is being taken share, None outside of one.
    """

    pins: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    accumulated: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    given: list[torch.Tensor] = field(default_factory=list)
    retained: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    hooked: set[str] = field(default_factory=set)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    pushing: list[Callable[[type, Any], None]] = field(default_factory=list)
    cut: list[torch.Tensor] = field(default_factory=list)
    shared: dict[Any, Any] | None = None


_library = torch.library.Library("pythonop", "FRAGMENT")
_library.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents, str key) -> Tensor[]")
_library.define("variable(Tensor x, str key, Tensor? fed=None) -> Tensor")

#: What eager computes where a trace runs for real, until the operator gives it out.
_results: dict[str, list[torch.Tensor]] = {}


def keep_results(key: str, results: list[torch.Tensor]) -> None:
    """Say what the call of ``pythonop::gradient`` under this key gives out, where it is run."""
    _results[key] = results


def is_pin(key: str) -> bool:
    """Whether a variable stands for its tensor to all who read that, before the call as well as after it."""
    return key.startswith(PIN)


def is_edge(key: str) -> bool:
    """Whether a variable stands for the boundary of a call (`symbolics.graph.boundaries`)."""
    return key.startswith("{")


def gradient_attributes(key: str, outputs: int) -> list[ir.Attr]:
    """What the node of a gradient says: how many outputs are differentiated, and what its key names: the module, the line, whether it is cut off."""
    return [ir.AttrInt64("outputs", outputs), *(ir.AttrString(name, text) for name, text in json.loads(key).items())]


@torch.library.impl("pythonop::gradient", "CompositeExplicitAutograd")
def _gradient_real(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    found = _results.pop(key, None)
    if found is None:
        raise ExportError("a captured gradient was run a second time: a captured graph is for translation, not for running")
    return found


@torch.library.register_fake("pythonop::gradient")  # type: ignore[untyped-decorator]
def _gradient_fake(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise ExportError(
        "a captured graph is for translation: run the exported file for its gradients (exporter.load, exporter.build_gradient_graph)"
    )


torch.library.register_autograd("pythonop::gradient", _no_backward)


@torch.library.impl("pythonop::variable", "CompositeExplicitAutograd")
def _variable_real(x: torch.Tensor, key: str, fed: torch.Tensor | None = None) -> torch.Tensor:
    return x.detach().clone()


@torch.library.register_fake("pythonop::variable")  # type: ignore[untyped-decorator]
def _variable_fake(x: torch.Tensor, key: str, fed: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty_like(x)


def _variable_backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return g, None, None


torch.library.register_autograd("pythonop::variable", _variable_backward)
