"""What one call returns, as a record: its tensor outputs, and their sizes as far as they are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics.capture.told import Told

__all__ = ["Fresh", "Output", "Outputs", "expression_of", "sizes_of"]


@dataclass(frozen=True)
class Fresh:
    """A size that only a run can tell; equal labels are equal sizes."""

    label: str


@dataclass
class Output:
    """One tensor output.

    Attributes:
        shape: An int, a sympy expression over the sizes of the inputs, or Fresh, a dimension.
        dtype, device, requires_grad: As eager's.
        real: The tensor itself under TorchScript.
    """

    shape: list[Any]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    real: torch.Tensor | None = None


@dataclass
class Outputs:
    """What one call returns.

    Attributes:
        tensors: The tensor outputs in order.
        template: What apply returned, with `Slot`s in place of its tensors.
        dirty: (input slot, output) of each input that forward changed and declared with mark_dirty.
        mutated: Input slots that forward changed without saying so.
        aliases: (input slot, output) of each output that is an input or a view of it, without being that dirty input.
        shared: Pairs of outputs that share memory.
        side_effects: What else a run of the file does that eager does otherwise, as text for a warning: random draws, state.
        state: The names of what it changed that can remember.
        read: The values that the Function read of its class and module, by label.
        told: What it wrote into containers among its arguments.
        moved: The numbers in the template that move with the inputs, by `moved_numbers`.
        input_sizes: The sizes of the inputs when shapes were expressed: one list per slot, [value] for a size slot.
    """

    tensors: list[Output]
    template: Any
    dirty: list[tuple[int, int]] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    aliases: list[tuple[int, int]] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    side_effects: list[str] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    input_sizes: list[list[Any]] = field(default_factory=list)
    moved: dict[int, tuple[Any, Any]] = field(default_factory=dict)


def expression_of(size: Any) -> Any:
    """An int, or the sympy expression of a symbolic one."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None else int(size)


def sizes_of(value: Any) -> list[Any]:
    """The sizes of a slot: a dimension each of a tensor, the value itself of a size."""
    return [expression_of(n) for n in value.shape] if isinstance(value, torch.Tensor) else [expression_of(value)]
