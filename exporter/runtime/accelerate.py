"""What may make a session quicker: an accelerator.

It is a guest: a module named in `GUESTS`, which nothing else here imports. It is asked for the parts of a module of `exporter.load` and for training
steps; `inference_session` of any other file runs it as it is. Without it every file runs on stock onnxruntime.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType

__all__ = ["GUESTS", "Accelerator", "Optimized", "Request", "Update", "accelerator", "switched_off"]

#: The modules that have an ``ACCELERATOR``. Only the first that takes a session's providers is asked: another one for the CPU goes in front.
GUESTS = ["exporter.cpu.accelerator"]

#: No accelerator, in the whole process, where it has one of these values.
_SWITCH, _OFF = "PYTHONOP_ACCELERATE", ("0", "false", "no", "off")

Part = Literal["inference", "forward", "backward", "step"]


@dataclass(frozen=True)
class Request:
    """What an accelerator is asked for.

    Attributes:
        part: What the model is: a forward of its own ("inference"), one whose backward is a model of its own, such a backward, or a whole
            training step.
        sizes: open dim of an input -> its size in the first run.
        carried: Of a step, output -> the input that takes its value in the next step; None: nothing is to be taken out.
    """

    part: Part
    sizes: Mapping[str, int] = field(default_factory=dict)
    carried: Mapping[str, str] | None = None


@dataclass
class Update:
    """What has left a training step, so that it may write where the state lies.

    Attributes:
        model: It makes the next state of the present one and of outputs that the step has got for it.
        written: output -> the input whose memory it may be written to.
        reads: What the step hands out for it, or is given, and the shape of each. What has another shape may be refused when some of the state
            is written already.
        added: The outputs that the step has got.
    """

    model: ir.Model
    written: dict[str, str]
    reads: dict[str, tuple[int, ...]]
    added: frozenset[str]


class Optimized(NamedTuple):
    """What an accelerator did: how many nodes it replaced, and what has left a step."""

    replaced: int
    update: Update | None = None


class Accelerator(Protocol):
    """What rewrites a model in memory so that a provider of onnxruntime runs it faster.

    Attributes:
        library: The custom-op library that has its operators; None where it needs none.
        own_gradients: The named gradients (`symbolics.graph.named`) that `load` would leave to torch's kernels and that it computes as fast:
            ``"ConvWeight"``, or none. What it computes is up to `optimize` alone.
    """

    library: Path | None
    own_gradients: frozenset[str]

    def takes(self, providers: Sequence[Any]) -> bool:
        """Whether it is for sessions of these providers, as onnxruntime.InferenceSession has them; none: the CPU."""

    def optimize(self, model: ir.Model, request: Request, facts: dict[ir.Value, ShapeAndType]) -> Optimized:
        """Rewrite a model. `symbolics.graph.copies.replace` puts nodes in the place of one, `exporter.runtime.added_calls.add_call` a call of Python.

        Calls of ONNX functions are inlined before, but for named gradients, which `exporter.runtime.claims.claim` hands out or inlines. A call of a Function F is a node of which `symbolics.graph.values.is_python_op` holds, and
        whose attribute ``name`` is ``qualified_name(F)`` (`symbolics.node.names`); `exporter.runtime.link` has joined those that feed one another alone.

        Args:
            model: Changed; its inputs and outputs keep their names. Its nodes stand in the order of their values, before and after.
            request: What it is.
            facts: Takes shapes and types of its values, as far as they are found out.
        """


def accelerator(providers: Sequence[Any] | None, accelerate: bool = True) -> Accelerator | None:
    """The accelerator for a session; None where there is none for its providers, or where it is switched off.

    Args:
        providers: As onnxruntime.InferenceSession has them; None: the CPU.
        accelerate: False: none.
    """
    if not accelerate or switched_off():
        return None
    guests: list[Accelerator] = [importlib.import_module(name).ACCELERATOR for name in GUESTS]
    return next((guest for guest in guests if guest.takes(providers or ())), None)


def switched_off() -> bool:
    """Whether the environment leaves accelerators out: ``PYTHONOP_ACCELERATE=0``, or false, no, off."""
    return os.environ.get(_SWITCH, "").strip().lower() in _OFF
