"""The gradient of an ONNX model as an ONNX model: one reverse sweep (`exporter.gradient_graph.engine`) from its outputs to its inputs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from exporter.errors import short
from exporter.files.outlined import outline_modules
from exporter.files.proto import reading
from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.cut import cut_gradients, warn_of_cut
from exporter.gradient_graph.engine import Engine, Key
from exporter.gradient_graph.frozen import check_frozen, warn_of_frozen
from exporter.gradient_graph.model import own_copy, set_ir_version
from exporter.gradient_graph.slow_operators import without_slow_operators
from symbolics.errors import ArgumentError
from symbolics.gradients import RULES, Rule, registry
from symbolics.gradients.boundaries import BOUNDARIES
from symbolics.gradients.linked import rules_of_functions
from symbolics.gradients.own import say_missing_rules
from symbolics.graph.builder import Builder
from symbolics.graph.collector import without_gc
from symbolics.graph.presence import conditions_of, holds
from symbolics.graph.scope import Scope
from symbolics.graph.shapes import may_lose_axes
from symbolics.graph.values import dtype_of, name_of
from symbolics.graph.walk import discard, prune, remove_unread, unread, walk
from symbolics.node.backward import count_readers, is_backward
from symbolics.node.metadata import GradientPairing, read_state, write_pairing
from symbolics.node.names import GRADIENTS_KEY

__all__ = ["build_gradient_graph", "built", "differentiate", "gradient"]

ModelLike = str | os.PathLike[str] | onnx.ModelProto | ir.Model | Any


@short
@functools.wraps(registry.gradient)
def gradient(*op_types: str, **options: Any) -> Callable[[registry.Function], registry.Function]:  # noqa: D103  it has the docstring of the rules
    return short(registry.gradient(*op_types, **options))


@short
def build_gradient_graph(
    model: ModelLike,
    *,
    wrt: Iterable[str] | None = None,
    outputs: Iterable[str] | None = None,
    overrides: Mapping[str | Key, Callable[..., Any] | Rule] | None = None,
) -> ir.Model:
    """Add the gradients to a model: the result is an ONNX model that computes outputs and gradients.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one, such as a `Program`. It is
            not changed.
        wrt: Names of initializers and inputs to differentiate with respect to. Default: the trainable parameters that the
            file names, or else its float initializers with at least one axis; and the float inputs.
        outputs: Names of outputs to differentiate. Default: all float outputs.
        overrides: Gradient rules for this model only, by operator or by (domain, operator).

    Returns:
        The model. After its own inputs it takes ``<output>_grad`` for each of ``outputs``, with the output's shape and dtype.
        After its own outputs it returns ``<name>_grad`` for each of ``wrt``. The metadata entry ``pythonop.gradients`` says
        which is which. A name in ``wrt`` that no output depends on has a gradient of zeros, and is listed there as unreached.
        Its IR version is the oldest (from 8 on) that its contents need, and never newer than the input's, or 8.

    Raises:
        UnsupportedOperatorError: An operator between ``wrt`` and the outputs has no gradient rule.
        FormatError: The model does not pass onnx.checker, cannot be converted to opset 18, or another tool has removed the
            marks at which gradients stop.
        ArgumentError: A name in ``wrt`` or ``outputs`` does not exist or has no gradient (this is a ValueError too); no output
            of the model is a float tensor; or ``overrides`` is not a table of rules.

    Examples:
        >>> training = exporter.build_gradient_graph(program, wrt=["x"])
        >>> onnx_ir.save(training, "training.onnx")
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ArgumentError(f"overrides is of type {type(overrides).__name__}: give a dict operator -> rule")
    return built(model, wrt=wrt, outputs=outputs, overrides=overrides, warns=True)


@without_gc()
def built(
    model: ModelLike,
    *,
    wrt: Iterable[str] | None = None,
    outputs: Iterable[str] | None = None,
    overrides: Mapping[str | Key, Callable[..., Any] | Rule] | None = None,
    warns: bool = False,
) -> ir.Model:
    """`build_gradient_graph`, whose arguments and errors these are. Without ``warns`` it takes a model without a float output, and says nothing of what is cut off."""
    with reading(model):
        copy = own_copy(model, bounded=True)
    wrt = None if wrt is None else wrt if isinstance(wrt, str) else list(wrt)
    boundary = Boundary(copy, wrt, outputs)
    if warns:
        boundary.check_outputs()
        # forces, say, of a file that is differentiated by its inputs alone, are meant to be constants
        learned = [v for v in boundary.wrt if wrt is not None or not v.is_graph_input()]
        warn_of_cut(cut_gradients(copy, learned, boundary.outputs), "the gradient graph")
        warn_of_frozen(copy, [name_of(value) for value in boundary.wrt])
    training = differentiate(copy, boundary, overrides or {})
    outline_modules(training)
    return training


def differentiate(
    model: ir.Model,
    boundary: Boundary,
    overrides: Mapping[Any, Any],
    given: Collection[str] | None = None,
    presence: dict[str, str] | None = None,
    *,
    final: bool = True,
) -> ir.Model:
    """Add the gradient graph to a model of `own_copy`, in place; arguments and errors are those of `build_gradient_graph`.

    Args:
        model, boundary, overrides: Its arguments.
        given: The names of the boundary's outputs that have a cotangent; default: all. The forward, and what it leaves for a backward, is the
            same for each such set.
        presence: Gets gradient -> output that says whether it is there, of those that may not be; without it, such a gradient is zeros.
        final: Whether nothing is differentiated behind it: its operators that are slow on onnxruntime's CPU are written in others.
    """
    before = set(walk(model.graph)) if final else set()
    build = _Build(model, boundary, overrides)
    with build.explained():
        result = build.run(given, presence)
    if final:
        without_slow_operators(result, [node for node in walk(result.graph) if node not in before])
    return result


class _Build(Engine):
    """One build: expand what has no rule, sweep, join."""

    def __init__(self, model: ir.Model, boundary: Boundary, overrides: Mapping[Any, Any]) -> None:
        self.boundary = boundary
        own = {_key(k): _rule(k, r) for k, r in overrides.items()}
        rules: dict[Key, Rule] = {
            **rules_of_functions(model),
            **RULES,
            **BOUNDARIES,
            **{(domain, name): r.check(domain, name) for (domain, name), r in own.items()},
        }
        say_missing_rules(model, rules)
        super().__init__(model, rules, Scope(self.boundary.prefix, self.boundary.is_constant))

    def run(self, given: Collection[str] | None, presence: dict[str, str] | None) -> ir.Model:
        graph, boundary = self.model.graph, self.boundary
        state = {entry.initializer for entry in (read_state(self.model.metadata_props) or {}).values()}
        kept = {*unread(graph), *boundary.wrt, *(value for name, value in graph.initializers.items() if name in state)}
        check_frozen(self.model, boundary.wrt)
        self.expand_all(boundary.wrt, lambda: boundary.outputs)
        cotangents = {
            v: ir.Value(name=boundary.input_name(v), type=v.type, shape=None if may_lose_axes(v) else v.shape) for v in boundary.outputs
        }
        boundary.check_reached(self.active(graph, boundary.wrt)[0])
        op = Builder(self.scope)
        found = self.sweep(op, graph, cotangents, boundary.wrt)
        if given is not None:  # the forward is ready for all of them: this sweep finds what it reads there
            for node in op.nodes:
                discard(node)
            op, cotangents = Builder(self.scope), {v: g for v, g in cotangents.items() if v.name in given}
            found = self.sweep(op, graph, cotangents, boundary.wrt)
        gradients: dict[ir.Value, str] = {}
        flags: list[ir.Value] = []
        for value in boundary.wrt:
            conditions = conditions_of(op, found[value]) if presence is not None and value in found else None
            g = found[value] if value in found else op.zeros(op.Shape(value), dtype_of(value))
            if (maker := g.producer()) is None or maker.graph is not None or g in gradients:  # it has a name already
                g = op.Identity(g)
            g.name, g.type, g.shape = boundary.output_name(value), value.type, value.shape
            gradients[g] = name_of(value)
            if presence is not None and conditions is not None:
                flag = op.Identity(holds(op, conditions))
                flag.name = presence[name_of(g)] = f"{self.scope.name('is_there')}"
                flags.append(flag)
        graph.extend(prune(op.nodes, [*gradients, *flags]))
        graph.inputs.extend(cotangents.values())
        graph.outputs.extend([*gradients, *flags])
        self.register()
        remove_unread(graph, kept)  # what an operator read that has become others: the initial state of an LSTM
        count_readers(walk(graph))
        for node in (*walk(op.nodes), *filter(is_backward, walk(graph))):
            graph.opset_imports.setdefault(node.domain, 1)
        self.model.metadata_props[GRADIENTS_KEY] = write_pairing(
            GradientPairing(
                {name_of(v): name_of(g) for v, g in cotangents.items()},
                {name: name_of(g) for g, name in gradients.items()},
                tuple(name_of(v) for v in boundary.wrt if v not in found),
            )
        )
        set_ir_version(self.model)
        return self.model


def _key(operator: Any) -> Key:
    """(domain, operator) of a key of ``overrides``."""
    key = ("", operator) if isinstance(operator, str) else operator
    if not isinstance(key, tuple) or len(key) != 2 or not all(isinstance(part, str) for part in key):
        raise ArgumentError(f"overrides has the key {operator!r}: give the operator's name, or (domain, operator)")
    return key


def _rule(operator: Any, rule: Any) -> Rule:
    if not isinstance(rule, Rule) and not callable(rule):
        raise ArgumentError(f"overrides has {rule!r} for {operator!r}: give a rule, a function as exporter.gradient takes it")
    return rule if isinstance(rule, Rule) else Rule(rule)
