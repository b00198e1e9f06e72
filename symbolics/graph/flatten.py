"""Calls of functions that stand for modules become the nodes of these again, in memory: for those who look at every node of a graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import onnx_ir as ir

from symbolics.graph.boundaries import Edge, Origin, boundary
from symbolics.graph.copies import clone_nodes, replace
from symbolics.graph.outline import count_marks
from symbolics.graph.scope import Scope, graph_names
from symbolics.graph.values import is_float, is_python_op
from symbolics.graph.walk import walk
from symbolics.node.names import BOUNDARY_OP, CALL_ATTRIBUTE, CLASS_KEY, INNER_DOMAIN, MARK_COUNT_KEY, MODULE_PROPERTY
from symbolics.node.numbers import Numbers

__all__ = ["flatten", "flattened", "of_modules"]


def of_modules(model: ir.Model) -> dict[ir.OperatorIdentifier, ir.Function]:
    """The functions of a model that stand for modules."""
    return {key: function for key, function in model.functions.items() if CLASS_KEY in function.metadata_props}


def flatten(model: ir.Model, *, bounded: bool = False) -> bool:
    """Put the nodes of modules in the place of the calls of their functions, in place, and take out these functions.

    Args:
        model: The model.
        bounded: Whether boundaries stand around what each call takes and gives, so that `symbolics.graph.outline` can make functions of it again.

    Returns:
        Whether there was any.
    """
    functions = of_modules(model)
    if not functions:
        return False
    scope = _Names(model)
    calls = itertools.count()
    todo = [node for node in walk(model.graph) if node.op_identifier() in functions]
    for node in todo:
        copies = _expand(scope, node, functions[node.op_identifier()], next(calls) if bounded else None)
        todo += [each for each in walk(copies) if each.op_identifier() in functions]
    for key in functions:
        del model.functions[key]
    used = {node.domain for part in (model.graph, *model.functions.values()) for node in walk(part)}
    for domain in {function.domain for function in functions.values()} - used:
        model.opset_imports.pop(domain, None)
    if bounded:
        model.opset_imports[INNER_DOMAIN] = 1
    if MARK_COUNT_KEY in model.metadata_props:
        model.metadata_props[MARK_COUNT_KEY] = str(count_marks(model))
    _number(walk(model.graph))
    return True


def flattened(model: ir.Model) -> ir.Model:
    """The same model without functions of modules: a copy where it has any."""
    if not of_modules(model):
        return model
    flatten(copy := model.clone())
    return copy


class _Names(Scope):
    """Names that nothing in a model has."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__("", lambda _: False)
        self._taken = graph_names(model.graph)

    def name(self, stem: str) -> str:
        """The stem itself, where it is free."""
        found = next(
            name for i in itertools.count() if (name := f"{self.prefix}{stem}_{i}" if i else f"{self.prefix}{stem}") not in self._taken
        )
        self._taken.add(found)
        return found


def _expand(scope: _Names, node: ir.Node, function: ir.Function, call: int | None) -> list[ir.Node]:
    path = node.metadata_props.get(MODULE_PROPERTY, "")
    scope.prefix = f"{node.name or function.name}/"
    mapping: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
    mapping.update(zip(function.inputs, node.inputs))
    origin = Origin(function.domain, re.sub(r"_\d+$", "", function.name), function.metadata_props[CLASS_KEY], path)
    before: list[ir.Node] = []
    if call is not None:
        for i, formal in enumerate(function.inputs):
            value = mapping[formal]
            if value is not None and is_float(value):
                before.append(boundary(value, Edge(origin, call, False, i, formal.name or ""), scope.name(BOUNDARY_OP)))
                mapping[formal] = before[-1].outputs[0]
    defaults = {name: attribute for name, attribute in function.attributes.items() if attribute.value is not None}
    copies = clone_nodes(scope, function, mapping, {**defaults, **node.attributes})
    for copy in walk(copies):
        inner = copy.metadata_props.get(MODULE_PROPERTY, "")
        if found := ".".join(filter(None, (path, inner))):
            copy.metadata_props[MODULE_PROPERTY] = found
    values = [mapping.get(value) for value in function.outputs]
    after: list[ir.Node] = []
    if call is not None:
        for i, (value, formal, made) in enumerate(zip(values, function.outputs, node.outputs)):
            if value is not None and is_float(value) and made.name:
                after.append(boundary(value, Edge(origin, call, True, i, formal.name or ""), scope.name(BOUNDARY_OP)))
                values[i] = after[-1].outputs[0]
    scope.prefix = ""
    return replace(scope, node, [*before, *copies, *after], values)


def _number(nodes: Iterable[ir.Node]) -> None:
    numbers = Numbers()
    for node in nodes:
        attribute = node.attributes.get(CALL_ATTRIBUTE)
        if attribute is not None and attribute.type is ir.AttributeType.STRING:
            read, made = ([value.name or "" if value is not None else "" for value in values] for values in (node.inputs, node.outputs))
            if text := numbers.of(attribute.value, is_python_op(node), read, made):
                node.attributes[CALL_ATTRIBUTE] = ir.AttrString(CALL_ATTRIBUTE, text)
