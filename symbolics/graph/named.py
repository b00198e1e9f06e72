"""What a gradient rule computes, by its name: calls of functions of the domain `pythonop.grad`, whose bodies are standard operators.

A rule that takes many nodes writes them into such a function and calls it. Every runtime runs the body; a picture shows one node; and who can compute
the same faster finds the call by its name and attributes, in place of recognising its nodes (`exporter.runtime.claims`). docs/format.md lists the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.copies import inline, replace
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.walk import prune, walk
from symbolics.node.names import GRADIENT_DOMAIN

__all__ = ["add_called", "call", "function_of", "name_of_call", "write_out"]


def name_of_call(node: ir.Node) -> str | None:
    """What a call computes (``"ConvWeight"``); None for any other node. Functions of one name are numbered: ``ConvWeight_2``."""
    return node.op_type.partition("_")[0] if node.domain == GRADIENT_DOMAIN else None


Write = Callable[[Builder, Sequence[ir.Value]], Sequence[ir.Value]]


def call(
    op: Builder, name: str, inputs: Sequence[ir.Value], write: Write, *, results: Sequence[ir.Value] = (), **attributes: Sequence[int]
) -> list[ir.Value]:
    """Call a function.

    Args:
        op: Takes the call. The function waits in its scope until `add_called` gives it to the model.
        name: What is computed, without an underscore.
        inputs: All that the body reads, of known type and rank.
        write: (an emitter, the values that stand for ``inputs``) -> the results, each made by a node of its own. It may look at sizes: calls whose inputs have
            the same ones and whose attributes are equal share a function, where their results have the same ones, too.
        results: Values of the sizes of the results, where these do not follow from those of the inputs.
        attributes: What else says what is computed. The body does not read them: who claims the call does.

    Returns:
        The results. Their types and shapes are those that ``write`` gave, or else the type of the first input and no shape.
    """
    sizes = tuple((value.dtype, None if value.shape is None else tuple(map(str, value.shape))) for value in (*inputs, *results))
    key = (name, sizes, tuple(sorted((kind, tuple(numbers)) for kind, numbers in attributes.items())))
    functions = op.scope.called
    if key not in functions:
        taken = {function.name for function in (*functions.values(), *op.scope.functions.values()) if function.domain == GRADIENT_DOMAIN}
        numbers = (name if number == 1 else f"{name}_{number}" for number in range(1, len(taken) + 2))
        functions[key] = _function(op, next(free for free in numbers if free not in taken), inputs, write, attributes)
    function = functions[key]
    made = op.node(function.name, inputs, domain=GRADIENT_DOMAIN, outputs=len(function.outputs), **attributes)
    given: list[ir.Value] = [made] if len(function.outputs) == 1 else list(made)
    for value, inner in zip(given, function.outputs, strict=True):
        value.type, value.shape = inner.type, inner.shape
    return given


def _function(op: Builder, name: str, inputs: Sequence[ir.Value], write: Write, attributes: Iterable[str]) -> ir.Function:
    scope = Scope("", lambda value: False)
    scope.opset = op.scope.opset
    given = [ir.Value(name=f"x{place}", type=value.type, shape=value.shape) for place, value in enumerate(inputs)]
    return function_of(scope, GRADIENT_DOMAIN, name, given, write, attributes)


def function_of(
    scope: Scope, domain: str, name: str, inputs: Sequence[ir.Value], write: Write, attributes: Iterable[str] = ()
) -> ir.Function:
    """An ONNX function.

    Args:
        scope: Of its own: the constants of its body become nodes, for a function has no initializers.
        domain, name: What it is called.
        inputs: Its inputs, with their names.
        write: As `call` has it.
        attributes: The names of its attributes, ints.
    """
    op = Builder(scope)
    with op.arithmetic():
        results = write(op, inputs)
    for result in results:
        result.type = result.type or inputs[0].type
    constants = []
    for value in scope.constants.values():
        if value.uses() and value.const_value is not None:
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], name=value.name)
            made = node.outputs[0]
            made.name, made.type, made.shape = value.name, value.type, value.shape
            value.replace_all_uses_with(made)
            constants.append(node)
    graph = ir.Graph(inputs, results, nodes=[*constants, *prune(op.nodes, results)], name=name, opset_imports={"": scope.opset})
    return ir.Function(domain, name, graph=graph, attributes=[ir.Attr(each, ir.AttributeType.INTS, None) for each in attributes])


def write_out(model: ir.Model) -> None:
    """Put the nodes of their bodies in the place of all calls; afterwards the model has no function of the domain `pythonop.grad`.

    Args:
        model: Changed.
    """
    calls = [node for node in walk(model.graph) if node.domain == GRADIENT_DOMAIN]
    scope = Scope(free_prefix(model.graph, "grad/") if calls else "", lambda value: False)
    for node in calls:
        if (function := model.functions.get(node.op_identifier())) is not None:
            replace(scope, node, *inline(scope, node, function))
    for key in [key for key in model.functions if key[0] == GRADIENT_DOMAIN]:
        del model.functions[key]
    model.graph.opset_imports.pop(GRADIENT_DOMAIN, None)


def add_called(model: ir.Model, scope: Scope) -> None:
    """Give a model the functions that its nodes call, those of them that wait in a scope."""
    waiting = {function.identifier(): function for function in scope.called.values()}
    for node in walk(model.graph) if waiting else ():
        if (function := waiting.pop(node.op_identifier(), None)) is not None:
            model.functions[function.identifier()] = function
            model.graph.opset_imports[GRADIENT_DOMAIN] = 1
