"""One run of a forward, unseen by the exporter and on copies of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.interception import original_apply
from symbolics.capture.outputs import Output, Outputs
from symbolics.capture.side_effects import watched
from symbolics.capture.told import Told, Watch
from symbolics.errors import ExportError
from symbolics.node.containers import Slot, fill
from symbolics.node.names import qualified_name
from symbolics.text import clean

__all__ = ["Call", "Trial", "apply", "forward_raised", "stand_in_for", "trial"]

#: The positional and keyword arguments of a call.
Call = tuple[Sequence[Any], dict[str, Any]]


@dataclass
class Trial:
    """One run of forward on stand-ins.

    Attributes:
        result: What apply returned.
        copies: The stand-ins, by slot.
        changed: Input slots that are not as they were.
        side_effects: What else it did, as text for warnings.
        told: The containers among its arguments that it changed.
        state: The names of what it changed that can remember.
    """

    result: Any
    copies: list[Any]
    changed: list[int]
    side_effects: list[str]
    told: list[Told] = field(default_factory=list)
    state: list[str] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """Its tensor outputs in order."""
        found: list[torch.Tensor] = []
        fill(self.result, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
        return found

    def describe(self, shapes: list[list[Any]], keep: bool = False) -> Outputs:
        """The record of this run, with these output sizes; ``keep`` the tensors themselves.

        Raises:
            ExportError: One of them is of a class that wraps others.
        """
        tensors = self.tensors()
        for tensor in tensors:
            if hasattr(type(tensor), "__tensor_flatten__"):  # torch's protocol of classes that wrap tensors, and have no data themselves
                raise ExportError(
                    f"its forward returns what is of {clean(type(tensor).__module__)}'s tensor class {type(tensor).__name__}, which wraps other tensors, and no file "
                    "holds such a one: name the module that makes and uses it in opaque=, or return the tensors in it"
                )
        count = iter(range(len(tensors)))
        outputs = [
            Output(shape, t.dtype, t.device, t.requires_grad, t.detach() if keep else None)
            for shape, t in zip(shapes, tensors, strict=True)
        ]
        dirty = [(i, j) for i, copy in enumerate(self.copies) for j, t in enumerate(tensors) if t is copy]
        return Outputs(
            tensors=outputs,
            template=fill(self.result, lambda leaf: Slot(next(count)) if isinstance(leaf, torch.Tensor) else leaf),
            dirty=dirty,
            aliases=[
                (i, j)
                for i, copy in enumerate(self.copies)
                for j, t in enumerate(tensors)
                if isinstance(copy, torch.Tensor) and t is not copy and private.shares_memory(copy, t)
            ],
            shared=[(i, j) for j, t in enumerate(tensors) for i in range(j) if private.shares_memory(tensors[i], t)],
            mutated=[i for i in self.changed if i not in {i for i, _ in dirty}],
            side_effects=self.side_effects,
            told=self.told,
            state=self.state,
        )


def stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that forward may change, of the same standing: leaf or not, Parameter or not."""
    fresh = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    if tensor.requires_grad:
        fresh.requires_grad_()
        if not tensor.is_leaf:
            with torch.enable_grad():
                return fresh.clone()
    return fresh


def trial(cls: Any, call: Call, values: Sequence[Any], stand_ins: Sequence[Any]) -> Trial:
    """Run apply with other tensors and sizes in the places of its own."""
    by_id = {id(value): stand_in for value, stand_in in zip(values, stand_ins, strict=True)}
    sizes = iter([s for v, s in zip(values, stand_ins, strict=True) if not isinstance(v, torch.Tensor) and not isinstance(s, torch.Tensor)])

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return by_id.get(id(value), value)
        if isinstance(value, torch.SymInt):
            known = value.node.maybe_as_int()
            return next(sizes) if known is None else known
        if isinstance(value, torch.Size):
            return torch.Size([leaf(n) for n in value])
        return value

    given = tuple(call[0]), dict(call[1])
    args, kwargs = fill(given, leaf)
    watch = Watch(given, (args, kwargs))
    with watched(cls, (args, kwargs), stand_ins) as seen:
        result = apply(cls, args, kwargs)
    run = Trial(result, list(stand_ins), seen.changed, seen.warnings, state=seen.state)
    run.told = watch.told(list(zip(stand_ins, values, strict=True)), run.tensors(), qualified_name(cls))
    return run


def apply(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a Function, or an `Operator`, or an `OpaqueModule`, past whoever listens."""
    return original_apply(cls, args, kwargs) if isinstance(cls, type) else cls.apply(*args, **kwargs)


def forward_raised(error: Exception, invented: str = "") -> ExportError:
    """What to tell of a forward that fails.

    Args:
        error: What it raised.
        invented: Why it ran on random values in place of its arguments, "" where it did not.
    """
    raised = f"its forward raised {type(error).__name__}: {str(error)[:500]}"
    if invented:
        return ExportError(
            f"{raised}, on random values, for those of its arguments are not known: {invented}; or name the Function in inline="
        )
    return ExportError(f"{raised}; make it run on the example arguments, or name the Function in inline=")
