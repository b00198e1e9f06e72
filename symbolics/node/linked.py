"""The link from an ONNX function of a file to another one that computes its gradient (docs/format.md).

It is to an ONNX function what a custom backward is to a Python one. No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.node.limits import MAX_RANK
from symbolics.node.names import BACKWARD_KEY
from symbolics.node.records import parse, read_record
from symbolics.text import shown

__all__ = ["Backward", "Kept", "Taken", "backward_of", "write_backward"]

_TYPES = frozenset(ir.DataType) - {ir.DataType.UNDEFINED}


@dataclass(frozen=True)
class Taken:
    """What one input of the backward is, by its number among the inputs or outputs of the forward."""

    kind: Literal["input", "output", "gradient"]
    index: int


@dataclass(frozen=True)
class Kept:
    """An output of the forward that is there for the backward alone: its element type and rank, which no node says."""

    type: int
    rank: int


@dataclass(frozen=True)
class Backward:
    """The gradient of a function.

    Attributes:
        domain, name: The function that computes it; "" and "" where the function has no gradient.
        takes: What each of its inputs is.
        gives: The input of the forward that each of its outputs is the gradient of.
        kept: The last outputs of the forward, which no caller has to name: constants to a gradient of the gradient.
        once: Whether it must not be differentiated again.
    """

    domain: str
    name: str
    takes: tuple[Taken, ...]
    gives: tuple[int, ...]
    kept: tuple[Kept, ...]
    once: bool


def write_backward(backward: Backward) -> str:
    """The text for the function's metadata."""
    return json.dumps(backward, default=vars, separators=(",", ":"))


def backward_of(model: ir.Model, function: ir.Function) -> Backward | None:
    """The link of a function, None where it has none.

    Raises:
        FormatError: The text is damaged, or does not fit the two functions.
    """
    text = function.metadata_props.get(BACKWARD_KEY)
    if text is None:
        return None
    place = f"metadata {BACKWARD_KEY} of the function {shown(function.name)!r}"
    link: Backward = read_record(parse(text, place), Backward, place)
    other = model.functions.get((link.domain, link.name, "")) if link.name else None
    if function.overload:
        raise FormatError.damaged(place, "the function is an overload, and a link is for all calls of a name")
    if not link.name and (link.domain or link.takes or link.gives):
        raise FormatError.damaged(place, "it names no function, and says what one takes and gives")
    if link.name and other is None:
        raise FormatError.damaged(place, f"it names the function {shown(link.name)!r}, which the file lacks")
    counts = {"input": len(function.inputs), "output": len(function.outputs), "gradient": len(function.outputs) - len(link.kept)}
    outside = [taken for taken in link.takes if not 0 <= taken.index < counts[taken.kind]]
    if outside or counts["gradient"] < 0 or any(not 0 <= index < counts["input"] for index in link.gives):
        raise FormatError.damaged(place, f"it counts more inputs or outputs than the function has ({counts['input']}, {counts['output']})")
    if len(set(link.gives)) != len(link.gives):
        raise FormatError.damaged(place, "it gives two gradients of one input")
    if any(kept.type not in _TYPES or not 0 <= kept.rank <= MAX_RANK for kept in link.kept):
        raise FormatError.damaged(place, "what it keeps has no type of ONNX, or no rank")
    if other is not None and (len(other.inputs) != len(link.takes) or len(other.outputs) != len(link.gives)):
        raise FormatError.damaged(
            place, f"it does not fit {shown(link.name)!r}, with {len(other.inputs)} inputs and {len(other.outputs)} outputs"
        )
    if other is not None and (
        lacking := [name for name, a in other.attributes.items() if a.value is None and name not in function.attributes]
    ):
        raise FormatError.damaged(
            place, f"{shown(link.name)!r} wants the attribute {shown(lacking[0])!r}, which the function does not have"
        )
    return link
