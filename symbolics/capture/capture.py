"""What is known of one export while it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from symbolics.capture.aliases import Aliases
from symbolics.capture.callsite import Callsites
from symbolics.capture.flags import Flags
from symbolics.capture.gradient_hooks import HookedTensor
from symbolics.capture.gradient_ops import Taken
from symbolics.capture.held import Held
from symbolics.capture.opaque_op import Record
from symbolics.capture.raised import Raised
from symbolics.capture.trace import Trace
from symbolics.errors import ExportError

__all__ = ["Capture"]


@dataclass
class Capture:
    """What is known of one export: a new one each time, so that nothing has to be reset.

    Attributes:
        sites: Finds the module and the line of a call.
        training: Whether the model is in training mode.
        error: The first ExportError: the exporters of torch wrap or retry, the hook raises this one.
        inlined: Names of Functions that were inlined without being asked to, with the reason.
        outputs: The structure of what the model's forward returned last, None where a file cannot say it.
        results: The dtype and the dims of each tensor among it; None for a dim that is symbolic.
        anchored: How many of the last outputs of the translated graph are there for calls alone.
        hidden: Tensors that were written without autograd seeing it, and that have their gradients as before in the graph, too.
        passed: The names of the parameters of which that is so, or that need no gradient.
        written: The buffers and parameters that forward writes and whose new values are outputs of the translated graph, before the anchored ones.
        evaluated: Whether the model was in eval mode when its forward was captured.
        missed: Buffers and parameters that forward writes in a way that the graph does not show.
        given: The code that an inlined forward is given to run, None where none is: with it, forward's own no_grad() and detach() stop nothing.
        aliases: Tensors that share memory in eager mode alone, and those whose value in the graph is stale.
        classes: name -> the class that has it.
        model: The model, None where it was captured before.
        hooks: The hooks on gradients that are carried, and the tensors that forward takes gradients with respect to.
        taken: The gradients that forward has taken.
        warned: Identities of backward hooks of modules that were warned of.
        placed: The node of each call in the finished model.
        untranslated: The names of torch's own operators that were called and have no translation, in a trace.
        translated: Where an operator that the exporter translates was called first, by its name.
        trace: The trace of torch.jit, None under torch.export.
        flags, held: The requires_grad flags that the forward has taken away; its parameters and buffers, wherever they are held.
        branches: The lines of branches that a size decides, of which it has been said.
        refused: The lines that asked torch.export for a value, which has none: source -> what asked, the module, the error that it raised.
        caught: The calls that raised in a trace of torch.jit, each with its module and line.
        strict: Whether torch could capture the model only with Dynamo.
        axes: The inputs of the translated graph, each with its sizes as torch.export calls them: later they have the user's names.
        equal: Sizes that torch.export has found to be others, both as it calls them.
        ones: Why the file may hold only where open axes have size 1, as in the example.
    """

    sites: Callsites = field(default_factory=Callsites)
    training: bool = False
    error: ExportError | None = None
    inlined: dict[str, str] = field(default_factory=dict)
    outputs: str | None = None
    results: list[tuple[torch.dtype, list[int | None]]] = field(default_factory=list)
    anchored: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    evaluated: bool = False
    missed: set[str] = field(default_factory=set)
    given: frozenset[CodeType] | None = None
    branches: set[str] = field(default_factory=set)
    refused: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    caught: Raised = field(init=False)
    strict: bool = False
    axes: list[tuple[Any, list[str]]] = field(default_factory=list)
    equal: dict[str, str] = field(default_factory=dict)
    ones: list[str] = field(default_factory=list)
    aliases: Aliases = field(default_factory=Aliases)
    classes: dict[str, type] = field(default_factory=dict)
    model: torch.nn.Module | None = None
    hooks: list[HookedTensor] = field(default_factory=list)
    taken: Taken = field(default_factory=Taken)
    warned: set[int] = field(default_factory=set)
    placed: dict[Any, Record] = field(default_factory=dict)
    translated: dict[str, tuple[str, str]] = field(default_factory=dict)
    untranslated: dict[str, None] = field(default_factory=dict)
    trace: Trace | None = None
    flags: Flags = field(default_factory=lambda: Flags(torch.Tensor.clone))
    held: Held = field(default_factory=Held)

    def __post_init__(self) -> None:
        self.caught = Raised(lambda: self.sites.here())

    @property
    def dynamic(self) -> Collection[int]:
        """Example sizes of the dimensions that are declared dynamic, in a trace; none under torch.export, whose sizes are symbols."""
        return () if self.trace is None else self.trace.sizes.dynamic
