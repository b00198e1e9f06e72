"""A translated call, parted into two ONNX functions: its forward, and the backward that it is linked to."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from symbolics.graph.own_outputs import own_outputs
from symbolics.graph.values import name_of, shape_in_function
from symbolics.graph.walk import reads
from symbolics.node.linked import Backward, Kept, Taken, write_backward
from symbolics.node.names import BACKWARD_KEY, FUNCTION_KEY, PORTABLE_DOMAIN
from symbolics.portable.joint import Joint

__all__ = ["functions_of", "rename"]


def rename(model: ir.Model, joint: Joint) -> None:
    """Give the values at the edge of a translated call their names: x0, y0, kept0, y0_grad, x0_grad; constants become nodes.

    An output that is an input, or stands twice, gets a node of its own: a function's outputs are its own.
    """
    graph, inputs, constants = model.graph, joint.inputs, list[ir.Node]()
    for value, tensor in zip(list(graph.inputs)[inputs + len(joint.differentiated) :], joint.constants, strict=True):
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(tensor.numpy(), name=value.name))])
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        constants.append(node)
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    _put_first(graph, constants)
    while len(graph.inputs) > inputs + len(joint.differentiated):
        graph.inputs.pop()
    own_outputs(graph, (*graph.inputs, *(value for value in graph.outputs if value.is_initializer())))
    names = [f"x{i}" for i in range(inputs)] + [f"y{i}_grad" for i in joint.differentiated]
    names += [f"y{i}" for i in range(joint.outputs)] + [f"kept{i}" for i in range(joint.kept)] + [f"x{i}_grad" for i in joint.gradients]
    taken = set(names)
    for value in (*graph.initializers.values(), *(v for node in graph for v in node.outputs)):
        value.name = f"{value.name}_" if value.name in taken else value.name
    for value, name in zip((*graph.inputs, *graph.outputs), names, strict=True):
        value.name = name


def functions_of(model: ir.Model, joint: Joint, name: str, of: str) -> list[ir.Function]:
    """The functions of a call: its forward, and its backward where it has one.

    Args:
        model: The translated call, with the names that `rename` gave.
        joint: What was translated.
        name: What the forward is to be called.
        of: The Function's name, for people.
    """
    graph = model.graph
    forward = [f"x{i}" for i in range(joint.inputs)]
    results = [f"y{i}" for i in range(joint.outputs)]
    kept = [f"kept{i}" for i in range(joint.kept)]
    gradients = [f"x{i}_grad" for i in joint.gradients]
    places = {value: Taken("input", i) for i, value in enumerate(forward)}
    places |= {value: Taken("output", i) for i, value in enumerate((*results, *kept))}
    places |= {f"y{i}_grad": Taken("gradient", i) for i in joint.differentiated}
    # Eager calls a backward whichever of its cotangents flows: it takes all of them, also those that it does not read.
    met = {*_read(graph, gradients, places), *(f"y{i}_grad" for i in joint.differentiated)}
    read = [place for place in places if place in met]
    one = _function(model, forward, [*results, *kept], name, of)
    values = {name_of(v): v for v in graph.outputs}
    link = Backward(
        domain=PORTABLE_DOMAIN if gradients else "",
        name=f"{name}_backward" if gradients else "",
        takes=tuple(places[value] for value in read) if gradients else (),
        gives=tuple(joint.gradients),
        kept=tuple(Kept(int(values[v].dtype or 1), len(values[v].shape or ())) for v in kept),
        once=joint.once,
    )
    one.metadata_props[BACKWARD_KEY] = write_backward(link)
    return [one, _function(model, read, gradients, link.name, of)] if gradients else [one]


def _read(graph: ir.Graph, ends: Sequence[str], places: dict[str, Taken]) -> set[str]:
    """The values with a place that a walk from the ends meets first."""
    values = {name_of(v): v for v in (*graph.inputs, *(o for node in graph for o in node.outputs if o.name))}
    todo, seen, met = [values[end] for end in ends], set[ir.Value](), set[str]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.name in places:
            met.add(name_of(value))
        elif (node := value.producer()) is not None:
            todo += reads(node)
    return met


def _function(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], name: str, of: str) -> ir.Function:
    """What lies between some values of a model, as a function; its initializers as constants."""
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    constants = []
    # By first use, so that two exports of a model are alike.
    for value in dict.fromkeys((*(v for node in graph.all_nodes() for v in node.inputs if v is not None), *graph.outputs)):
        tensor = value.const_value
        if tensor is None or not value.is_initializer():
            continue
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)])
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = value.name, value.type, value.shape
        constants.append(node)
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    graph.initializers.clear()
    _put_first(graph, constants)
    for value in graph.inputs:
        value.metadata_props.clear()
        value.shape = shape_in_function(value)
    for node in graph.all_nodes():  # torch.onnx's notes on where a node comes from
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            value.shape = shape_in_function(value)
    graph.metadata_props.clear()
    graph.opset_imports.update(model.opset_imports)
    function = ir.Function(PORTABLE_DOMAIN, name, graph=graph, attributes=[])
    function.metadata_props[FUNCTION_KEY] = of
    return function


def _put_first(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    if len(graph):
        graph.insert_before(graph[0], nodes)
    else:
        graph.extend(nodes)
