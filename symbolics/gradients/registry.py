"""The table of rules: ``(domain, operator) -> rule``, and the decorators that fill it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import onnx.defs
import onnx_ir as ir

from symbolics.errors import ArgumentError, PythonopError
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, describe, may_be_float

__all__ = ["COMPOSITES", "RULES", "Composite", "Grads", "Ints", "Rule", "RuleFunction", "composite", "formulas", "gradient"]

Grads = ir.Value | Sequence[ir.Value | None] | Mapping[ir.Value, ir.Value]
Ints = Sequence[int] | None  # an attribute of the node, where it has it
_OLDEST_OPSET, _NEWEST_OPSET = 18, 10**6  # models are converted to the oldest at least
_OF_THE_NODE = ("node", "y", "ys")  # keyword parameters that are no attributes


class RuleFunction(Protocol):
    """A function from cotangents to gradients; `gradient` says which parameters it may have."""

    def __call__(self, op: Builder, /, *args: Any, **kwargs: Any) -> Grads:
        """The gradients of the inputs; a Value alone is that of the first, a mapping says whose each is."""


Function = TypeVar("Function", bound=RuleFunction)


@dataclass(frozen=True)
class _Parameters:
    """What a function that is written as a formula wants of a node.

    Attributes:
        cotangents: ``g`` or ``gs``; nothing for the forward of a composite.
        inputs: How many inputs it names, the first ones.
        others: Whether it takes all inputs behind those too.
        keywords: Attributes and `_OF_THE_NODE`, with the value that stands for an attribute that is nowhere.
    """

    cotangents: str
    inputs: int
    others: bool
    keywords: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], *, is_rule: bool = True) -> _Parameters | None:
        """The parameters of a formula; None of a rule that takes the node and its cotangents."""
        try:
            _op, *rest = inspect.signature(function).parameters.values()
        except ValueError:  # a builtin
            return None
        named = [p.name for p in rest if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        cotangents = named.pop(0) if is_rule and named else ""
        if is_rule and cotangents not in ("g", "gs"):
            return None
        others = any(p.kind is p.VAR_POSITIONAL for p in rest)
        return cls(cotangents, len(named), others, {p.name: p.default for p in rest if p.kind is p.KEYWORD_ONLY})

    def check(self, domain: str, op_types: Sequence[str], function: Callable[..., Any]) -> None:
        """Raise ArgumentError for a parameter that no schema of the operators knows; without a schema all pass."""
        schemas = [_schemas(domain, op_type) for op_type in op_types]
        inputs = max((s.max_input for found in schemas for s in found), default=0)
        attributes = {a for found in schemas for s in found for a in s.attributes}
        unknown = sorted(self.keywords.keys() - attributes.union(_OF_THE_NODE))
        if all(schemas) and (unknown or self.inputs > inputs):
            what = f"asks for {', '.join(map(repr, unknown))}" if unknown else f"names {self.inputs} inputs"
            raise ArgumentError(
                f"the rule {_place(function)} of {', '.join(op_types)} {what}; there are {inputs} inputs at most and the attributes "
                f"{', '.join(sorted(attributes)) or '(none)'}. Further keywords are {', '.join(_OF_THE_NODE)}."
            )

    def taken(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """The inputs of a node that the formula takes, None for those that are not given."""
        given = node.inputs if self.others else node.inputs[: self.inputs]
        return [*given, *[None] * (self.inputs - len(given))]

    def keywords_of(self, node: ir.Node) -> dict[str, Any]:
        """The values of the keyword parameters."""
        values = {}
        for name, otherwise in self.keywords.items():
            value = node if name == "node" else node.outputs[0] if name == "y" else node.outputs if name == "ys" else attr(node, name)
            if value is None and otherwise is not inspect.Parameter.empty:
                value = otherwise
            elif value is None and not _schemas(node.domain, node.op_type):
                raise PythonopError(f"the rule of {describe(node)} asks for attribute {name!r}, which the node lacks: give it a default")
            values[name] = value
        return values


@functools.cache
def _schemas(domain: str, op_type: str) -> list[onnx.defs.OpSchema]:
    """The operator's schema in the oldest opset that rules are written for, and the newest one; empty where onnx knows none."""
    found = []
    for opset in (_OLDEST_OPSET, _NEWEST_OPSET):
        with contextlib.suppress(onnx.defs.SchemaError):
            found.append(onnx.defs.get_schema(op_type, opset, domain))
    return found


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', function)}"


@dataclass(frozen=True)
class Rule:
    """A gradient rule.

    Attributes:
        function: A formula, or a function of the node; see `gradient`.
        broadcast: The inputs were broadcast to the shape of output 0 and their gradients have that shape: the engine sums them.
        straight_through: The outputs are integers through which a gradient passes nevertheless (QuantizeLinear).
    """

    function: RuleFunction
    broadcast: bool = False
    straight_through: bool = False
    parameters: _Parameters | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", _Parameters.of(self.function))

    def check(self, domain: str, *op_types: str) -> Rule:
        """The rule, for these operators; raises ArgumentError for a parameter that they do not have."""
        if self.parameters is not None:
            self.parameters.check(domain, op_types, self.function)
        return self

    def inputs(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """The inputs that can have a gradient: those that a formula takes, otherwise all."""
        return node.inputs if self.parameters is None else self.parameters.taken(node)

    def gradients(self, op: Builder, node: ir.Node, cotangents: Sequence[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
        """Values that the node reads, and their gradients; not all cotangents are None.

        Raises:
            PythonopError: The rule returned too many gradients or too few, or does not take the cotangent of an output that has one.
        """
        inputs, wanted = self.inputs(node), self.parameters
        if wanted is None:
            result = self.function(op, node, *cotangents)
        else:
            if wanted.cotangents == "g":
                others = zip(cotangents[1:], node.outputs[1:])
                if any(h is not None and may_be_float(y) for h, y in others):
                    raise self._wrong(node, "takes g, the cotangent of output 0, and another output has one: take all of them, gs")
                if cotangents[0] is None:
                    return []
            given = cotangents[0] if wanted.cotangents == "g" else cotangents
            result = self.function(op, given, *inputs, **wanted.keywords_of(node))
        if isinstance(result, Mapping):
            return list(result.items())
        if result is None:
            raise self._wrong(node, "returned None; [None] says that there is no gradient")
        gradients = [result] if isinstance(result, ir.Value) else result
        missing = () if wanted is None else inputs[len(gradients) :]
        if len(gradients) > len(inputs) or any(v in op.scope.active for v in missing):
            raise self._wrong(node, f"returned {len(gradients)} gradients for {len(inputs)} inputs")
        return [(v, g) for v, g in zip(inputs, gradients) if v is not None and g is not None]

    def _wrong(self, node: ir.Node, what: str) -> PythonopError:
        return PythonopError(f"the rule of {describe(node)}, {_place(self.function)}, {what}")


# The forward of a node in operators that have rules: one value per output, None for the node to stay.
Composite = Callable[[Builder, ir.Node], Sequence[ir.Value | None] | None]
RULES: dict[tuple[str, str], Rule] = {}
COMPOSITES: dict[tuple[str, str], Composite] = {}


def gradient(*op_types: str, domain: str = "", broadcast: bool = False, straight_through: bool = False) -> Callable[[Function], Function]:
    """Register the gradient rule of an ONNX operator; use it as a decorator.

    A rule is a function that builds the nodes of the gradient. Its second parameter says which of two kinds it is. The first
    kind is usually enough.

    **A formula**: ``def rule(op, g, x, z, *, y, alpha)``.

    - ``op`` builds nodes: ``op.MatMul(a, b)``. ``+ - * /`` on values build nodes, too.
    - ``g`` is the gradient of output 0. The rule is called only where there is one. A rule that wants those of all outputs
      takes ``gs`` instead, a list with None where there is none.
    - Then come the inputs of the node in their order: None for one that is not given, ``*xs`` for any number of them. An input
      that the rule does not name has no gradient.
    - Keyword parameters are attributes of the node. One that the node does not have gets the default of the operator's
      schema, or that of the parameter, or None. Three keywords are not attributes: ``y`` is output 0, ``ys`` are all outputs,
      ``node`` is the node.

    **A node**: ``def rule(op, node, *gradients)``, with any other name for the second parameter. ``gradients`` has the gradient
    of each output, None where there is none. Every input can have a gradient, and a list that is too short ends in None.

    Both kinds return a gradient for each input, in order, and None where there is none. A single value is the gradient of the
    first input. Inputs without gradients (integers) may be left out at the end. A mapping from values to gradients may stand in
    place of the list. Sums over broadcast axes, accumulation and casts are done for you.

    Args:
        *op_types: The operators that the rule is for.
        domain: Their domain. "" is that of the ONNX standard.
        broadcast: Whether the operator broadcasts its inputs. Gradients are then summed to the shapes of the inputs.
        straight_through: Whether a gradient passes through integer outputs, as those of QuantizeLinear.

    Raises:
        ArgumentError: A formula names more inputs than the operator's schema has, or a keyword that is none of the above.

    Examples:
        >>> @exporter.gradient("Square", domain="my.domain")
        ... def square(op, g, x):
        ...     return 2.0 * x * g
    """

    def register(function: Function) -> Function:
        rule = Rule(function, broadcast, straight_through).check(domain, *op_types)
        RULES.update({(domain, op_type): rule for op_type in op_types})
        return function

    return register


def formulas(table: Mapping[str, RuleFunction], *, broadcast: bool = False) -> None:
    """Register the rules of standard operators that are one line each."""
    for op_type, formula in table.items():
        gradient(op_type, broadcast=broadcast)(formula)


def composite(*op_types: str, domain: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the forward of an operator in operators that have rules; its gradient is theirs.

    ``def forward(op, x, z, *, alpha)``: parameters as in the formula of a `gradient`, without cotangents. It returns a value
    per output, or a single value; outputs that the node does not have are dropped. None leaves the node to its rule.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = _Parameters.of(function, is_rule=False)
        assert parameters is not None

        def forward(op: Builder, node: ir.Node) -> Sequence[ir.Value | None] | None:
            made = function(op, *parameters.taken(node), **parameters.keywords_of(node))
            return [made] if isinstance(made, ir.Value) else made

        parameters.check(domain, op_types, function)
        COMPOSITES.update({(domain, op_type): forward for op_type in op_types})
        return function

    return register
