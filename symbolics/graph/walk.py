"""Walks over a graph: subgraphs, what a node reads, nodes that nobody uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir

__all__ = [
    "bypass",
    "captured",
    "discard",
    "name_nodes",
    "prune",
    "reads",
    "remove_operators",
    "remove_unread",
    "subgraphs",
    "unread",
    "walk",
]


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs among the attributes of a node."""
    found: list[ir.Graph] = []
    # Every pass over a graph asks this of every node: UserDict's own dictionary, not a view over it.
    for attribute in node.attributes.data.values():
        kind = attribute.type
        if kind is ir.AttributeType.GRAPH and not attribute.is_ref():
            found.append(attribute.value)
        elif kind is ir.AttributeType.GRAPHS and not attribute.is_ref():
            found.extend(attribute.value)
    return found


def walk(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from walk(graph)


def captured(node: ir.Node) -> list[ir.Value]:
    """Values of enclosing scopes that the subgraphs of a node read, in order of first use."""
    found: dict[ir.Value, None] = {}
    for graph in subgraphs(node):
        inner = {*graph.inputs, *graph.initializers.values()}
        for n in graph:
            for v in (*n.inputs, *captured(n)):
                if v is not None and v not in inner:
                    found[v] = None
            inner.update(n.outputs)
        found.update((v, None) for v in graph.outputs if v not in inner)
    return list(found)


def reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads: its inputs, and values of enclosing scopes that its subgraphs use."""
    return [*(v for v in node.inputs if v is not None), *captured(node)]


def discard(node: ir.Node) -> None:
    """Let go of what a removed node reads, its subgraphs included."""
    for n in walk([node]):
        for i in range(len(n.inputs)):
            n.replace_input_with(i, None)


def bypass(node: ir.Node) -> None:
    """Let all read the first input of a node in place of its one output. As an output of the graph, it stays under its name, by an Identity."""
    graph, value, made = node.graph, node.inputs[0], node.outputs[0]
    assert graph is not None and value is not None
    if made.is_graph_output():
        node.domain, node.op_type = "", "Identity"
        node.attributes.clear()
        return
    made.replace_all_uses_with(value)
    discard(node)
    graph.remove(node)


def prune(nodes: list[ir.Node], kept: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that something uses, those that make ``kept`` included."""
    keep, out = set(kept), []
    for node in reversed(nodes):
        if any(o in keep or o.uses() or o.is_graph_output() for o in node.outputs):
            out.append(node)
        else:
            discard(node)
    out.reverse()
    return out


def remove_operators(graph: ir.Graph, operators: Collection[str]) -> None:
    """Take standard operators of these kinds out of a graph where nobody reads what they make."""
    for node in reversed(list(graph)):
        if node.domain == "" and node.op_type in operators and not any(o.uses() or o.is_graph_output() for o in node.outputs):
            discard(node)
            graph.remove(node)


def unread(graph: ir.Graph) -> set[ir.Node | ir.Value]:
    """The standard operators, and the initializers, that nobody reads."""
    nodes = {node for node in graph if node.domain == "" and not any(map(_is_read, node.outputs))}
    return nodes | {value for value in graph.initializers.values() if not (_is_read(value) or value.is_graph_input())}


def remove_unread(graph: ir.Graph, kept: Collection[ir.Node | ir.Value]) -> None:
    """Take out the standard operators, and then the initializers, that nobody reads, but for those that are to be kept."""
    for node in reversed(list(graph)):
        if node.domain == "" and node not in kept and not any(map(_is_read, node.outputs)):
            discard(node)
            graph.remove(node)
    for name, value in list(graph.initializers.items()):
        if value not in kept and not (_is_read(value) or value.is_graph_input()):
            del graph.initializers[name]


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def name_nodes(model: ir.Model) -> None:
    """Give every node a name of its own: onnxruntime's profiler and its optimized model tell nodes by nothing else."""
    met = set[str]()
    for part in (model.graph, *model.functions.values()):
        for node in walk(part):
            name = base = node.name or node.op_type
            number = 0
            while name in met:
                number += 1
                name = f"{base}_{number}"
            node.name = name
            met.add(name)
