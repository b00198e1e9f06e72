"""The table of rules: ``(domain, operator) -> rule``, and the decorators that fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from symbolics.graph.builder import Builder

__all__ = ["COMPOSITES", "RULES", "Composite", "Gradients", "Rule", "RuleFunction", "composite", "gradient"]

Gradients = Sequence[ir.Value | None] | Mapping[ir.Value, ir.Value]
RuleFunction = Callable[..., Gradients]  # (op, node, *output gradients) -> one gradient an input, None where there is none
Composite = Callable[[Builder, ir.Node], Sequence[ir.Value | None] | None]  # the forward in operators that have rules


@dataclass(frozen=True)
class Rule:
    """A gradient rule.

    Attributes:
        function: ``function(op, node, *gradients)``: the gradient of each input, None where there is none. Output gradients
            may be None too, but never all of them.
        broadcast: The inputs were broadcast to the shape of output 0 and their gradients have that shape: the engine sums them.
        straight_through: The outputs are integers through which a gradient passes nevertheless (QuantizeLinear).
        first_only: Only input 0 has a gradient, whatever the others are (CastLike): what they alone depend on is on no path.
    """

    function: RuleFunction
    broadcast: bool = False
    straight_through: bool = False
    first_only: bool = False


RULES: dict[tuple[str, str], Rule] = {}
COMPOSITES: dict[tuple[str, str], Composite] = {}


def gradient(
    *op_types: str, domain: str = "", broadcast: bool = False, straight_through: bool = False, first_only: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a gradient rule.

    ``@gradient("MyOp", domain="my.domain")`` on ``def rule(op, node, *gradients)``: ``gradients`` has an entry for each
    output of the node, None where nothing flows; the rule returns a gradient for each input (None: no gradient). ``op``
    builds nodes (``op.MatMul(a, b)``); values understand ``+ - * /``. An integer input needs no gradient.

    Example:
        >>> @gradient("Square", domain="my.domain")
        ... def square(op, node, g):
        ...     (x,) = node.inputs
        ...     return [2.0 * x * g]
    """

    def register(function: RuleFunction) -> RuleFunction:
        for op_type in op_types:
            RULES[domain, op_type] = Rule(function, broadcast, straight_through, first_only)
        return function

    return register


def composite(*op_types: str, domain: str = "") -> Callable[[Composite], Composite]:
    """Register the forward of an operator in operators that have rules; its gradient is theirs.

    A function that returns None leaves a node to its rule.
    """

    def register(function: Composite) -> Composite:
        for op_type in op_types:
            COMPOSITES[domain, op_type] = function
        return function

    return register
