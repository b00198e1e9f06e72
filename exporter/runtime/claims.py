"""Calls of named gradients (`symbolics.graph.named`): who can compute one faster than its body says claims it, and the others are written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, fact_of, find_facts
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.named import name_of_call, write_out
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr
from symbolics.graph.walk import remove_unread, unread, walk

__all__ = ["Claim", "ConvWeight", "claim"]

#: (takes nodes, a call, shapes and types of values) -> what stands for its results; None where its body is as good.
Claim = Callable[[Emitter, ir.Node, Mapping[ir.Value, ShapeAndType]], Sequence[ir.Value] | None]


def claim(model: ir.Model, claims: Mapping[str, Claim]) -> int:
    """Put nodes in the place of every call of a named gradient: those of who claims it, or those of its body.

    Args:
        model: Changed; afterwards it has no function of the domain `pythonop.grad`.
        claims: Name of a gradient -> who claims it.

    Returns:
        How many calls were claimed.
    """
    facts: dict[ir.Value, ShapeAndType] = {}
    wanted = [node for node in walk(model.graph) if name_of_call(node) in claims]
    if not wanted:
        write_out(model)
        return 0
    if any(value is not None and fact_of(value, facts)[0] is None for node in wanted for value in node.inputs):
        find_facts(model, facts)
    scope, before = Scope(free_prefix(model.graph, "claimed/"), lambda value: False), unread(model.graph)
    claimed = 0
    for node in wanted:
        op = Emitter(scope)
        if (made := claims[name_of_call(node) or ""](op, node, facts)) is not None:
            replace(scope, node, op.nodes, list(made))
            claimed += 1
    scope.register(model.graph)
    write_out(model)
    if claimed:
        remove_unread(model.graph, before)
    return claimed


class ConvWeight(NamedTuple):
    """A call of ConvWeight, the gradient of a convolution for its weights: the sum over samples and windows of what a window reads times what it gives.

    Attributes:
        large: The tensor (N, G*C, *sizes) that the windows slide over; ``small`` (N, G*M, *outs) has one element a window.
        images: The shape of ``large``; None for an open size. ``outs`` is that of ``small``.
        kernel, strides, dilations: A number an axis.
        before, after: The padding that windows reach into; negative where they leave places out.
        group: G.
        kind: The element type.
    """

    large: ir.Value
    small: ir.Value
    images: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    group: int
    kind: ir.DataType

    @classmethod
    def of(cls, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> Self | None:
        """What a call says; None where it does not say all of it, or a file says it wrong."""
        large, small = node.inputs if len(node.inputs) == 2 else (None, None)
        if large is None or small is None:
            return None
        (images, kind), (outs, other) = fact_of(large, facts), fact_of(small, facts)
        said = [attr(node, name) for name in ("kernel_shape", "strides", "dilations", "pads", "group")]
        if images is None or outs is None or kind is None or kind is not other or not all(_are_ints(numbers) for numbers in said):
            return None
        kernel, strides, dilations, pads, group = map(tuple, said)
        rank = len(kernel)
        if {len(images), len(outs)} != {rank + 2} or {len(strides), len(dilations), len(pads) // 2} != {rank} or len(group) != 1:
            return None
        if not rank or len(pads) % 2 or min(*kernel, *strides, *dilations, *group) < 1:
            return None
        of_large, of_small = (tuple(size if isinstance(size, int) else None for size in shape) for shape in (images, outs))
        return cls(large, small, of_large, of_small, kernel, strides, dilations, pads[:rank], pads[rank:], group[0], kind)


def _are_ints(numbers: object) -> bool:
    return isinstance(numbers, (list, tuple)) and all(isinstance(number, int) for number in numbers)
