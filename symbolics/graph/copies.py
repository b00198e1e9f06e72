"""Copies of nodes: function bodies in place of calls, bodies of control flow for their backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.scope import Session
from symbolics.graph.values import attr

__all__ = [
    "captured",
    "clone_nodes",
    "discard",
    "fold",
    "function_body",
    "inline",
    "inline_body",
    "prune",
    "subgraphs",
    "taken_branch",
    "walk",
]


_PREVIEW = "ai.onnx.preview"


# ------------------------------------------------------------------------------------------------------- looking around
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


# ------------------------------------------------------------------------------------------------------------- copies
def clone_nodes(
    session: Session,
    nodes: Iterable[ir.Node],
    mapping: dict[ir.Value, ir.Value | None],
    attributes: Mapping[str, ir.Attr] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[ir.Node]:
    """Copies with fresh names. ``mapping`` says what stands for outer values and grows by the copied outputs.

    With ``attributes``, of a function call, references to attributes are replaced; those to absent ones go.
    """

    def graph_of(graph: ir.Graph) -> ir.Graph:
        inputs = [value_of(v) for v in graph.inputs]
        initializers = [value_of(v) for v in graph.initializers.values()]
        body = clone_nodes(session, graph, mapping, attributes, metadata)
        outputs = [mapping.get(v, v) for v in graph.outputs]
        return ir.Graph(inputs, outputs, nodes=body, initializers=initializers, name=graph.name, opset_imports=dict(graph.opset_imports))

    def value_of(v: ir.Value) -> ir.Value:
        if v not in mapping:
            mapping[v] = ir.Value(name=session.name(v.name or "value"), type=v.type, shape=v.shape, const_value=v.const_value)
        return mapping[v]

    def attribute_of(name: str, a: ir.Attr) -> ir.Attr | None:
        if a.is_ref():
            if attributes is None:
                return a
            source = attributes.get(a.ref_attr_name)
            return None if source is None else ir.Attr(name, source.type, source.value)
        if a.type is ir.AttributeType.GRAPH:
            return ir.AttrGraph(name, graph_of(a.value))
        if a.type is ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(name, [graph_of(g) for g in a.value])
        return a

    copies = []
    for node in nodes:
        inputs = [None if v is None else mapping.get(v, v) for v in node.inputs]
        copied = [c for k, a in node.attributes.items() if (c := attribute_of(k, a)) is not None]
        copy = ir.Node(
            node.domain, node.op_type, inputs, copied, overload=node.overload, num_outputs=len(node.outputs),
            name=session.name(node.name or node.op_type), metadata_props={**(metadata or {}), **node.metadata_props},
        )  # fmt: skip
        copy.meta.update(node.meta)
        for old, new in zip(node.outputs, copy.outputs):
            mapping[old] = new
            new.name = session.name(old.name) if old.name else None if old.name is None else ""
            new.type, new.shape = old.type, old.shape
        copies.append(copy)
    return copies


def discard(node: ir.Node) -> None:
    """Let go of what a removed node reads, its subgraphs included."""
    for n in walk([node]):
        for i in range(len(n.inputs)):
            n.replace_input_with(i, None)


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


# --------------------------------------------------------------------------------------------------------- expansion
def function_body(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function], opset: int) -> ir.Function | None:
    """The body of a call: a function of the model, or the one that the ONNX standard gives its operator."""
    if (local := functions.get(node.op_identifier())) is not None:
        return local
    if node.domain not in ("", _PREVIEW):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset if node.domain == "" else 1, node.domain)
    except onnx.defs.SchemaError:
        return None
    data: bytes = b""
    if schema.has_context_dependent_function:
        trimmed = ir.Node("", node.op_type, node.inputs, node.attributes.values(), num_outputs=len(node.outputs))
        for o, t in zip(node.outputs, trimmed.outputs):
            t.name = o.name or ""
        proto = ir.to_proto(trimmed)
        discard_inputs(trimmed)
        types = [b"" if v is None or v.type is None else _type_proto(v).SerializeToString() for v in node.inputs]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        if versions:
            data = schema.get_context_dependent_function_with_opset_version(max(versions), proto.SerializeToString(), types)
    if not data and schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        data = schema.get_function_with_opset_version(max(versions)) if versions else b""
    if not data:
        return None
    proto = onnx.FunctionProto()
    proto.ParseFromString(data)
    made = {o for n in proto.node for o in n.output} | set(proto.input)
    for name in [o for o in proto.output if o not in made]:  # listed, but made by nobody
        proto.output[list(proto.output).index(name)] = ""
    live = [o for o in proto.output if o]
    names = list(proto.output)
    del proto.output[:]
    proto.output.extend(live)
    function = ir.from_proto(proto)
    function.meta["outputs"] = [function.outputs[live.index(n)] if n else None for n in names]
    function.meta["defaults"] = {a.name: ir.from_proto(a.default_value) for a in schema.attributes.values() if a.default_value.type}
    return function


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    return ir.to_proto(value).type


def discard_inputs(node: ir.Node) -> None:
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def inline(session: Session, node: ir.Node, function: ir.Function) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """Copies of the nodes of a function for one call, and what stands for the outputs of the call."""
    mapping: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
    mapping.update(zip(function.inputs, node.inputs))
    defaults = {k: a for k, a in function.attributes.items() if a.value is not None}
    attributes = {**function.meta.get("defaults", {}), **defaults, **node.attributes}
    nodes = clone_nodes(session, function, mapping, attributes, node.metadata_props)
    outputs = function.meta.get("outputs", list(function.outputs))
    return nodes, [None if o is None else mapping[o] for o in outputs]


def inline_body(op: Builder, body: ir.Graph, inputs: Iterable[ir.Value]) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """Copies of the nodes of a body for one run of it, and what stands for its outputs."""
    mapping: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, inputs, strict=True))
    mapping.update((v, op.constant(v.const_value.numpy(), v.dtype)) for v in body.initializers.values())
    nodes = clone_nodes(op.session, body, mapping)
    return nodes, [mapping.get(v, v) for v in body.outputs]


# ----------------------------------------------------------------------------------------------------------- folding
def fold(op: Builder, nodes: list[ir.Node]) -> tuple[list[ir.Node], bool]:
    """Remove from their graph the nodes that only constants and static shapes go into, so that ranks behind them are known.

    The nodes that are left, and whether any went.
    """
    left: list[ir.Node] = []
    before = len(nodes)
    todo = nodes[::-1]
    dead: set[ir.Node] = set()
    while todo:
        node = todo.pop()
        if node.graph is None or node in dead:  # expanded itself since, or in a branch not taken
            continue
        ends_graph = any(o.is_graph_output() for o in node.outputs)
        if not ends_graph and (branch := taken_branch(op, node)) is not None:
            copies, results = inline_body(op, branch, ())
            node.graph.insert_before(node, copies)
            todo += list(walk(copies))[::-1]
            dead.update(walk([node]))
        elif not ends_graph and (arrays := op.session.evaluate(node)) is not None:
            results = [op.constant(a, o.dtype or ir.DataType.from_numpy(a.dtype)) for o, a in zip(node.outputs, arrays)]
        else:
            left.append(node)
            continue
        for o, v in zip(node.outputs, results):
            o.replace_all_uses_with(v)
        discard(node)
        node.graph.remove(node)
    return left, len(left) != before


def taken_branch(op: Builder, node: ir.Node) -> ir.Graph | None:
    """The branch of an If whose condition is known."""
    if node.op_type != "If" or node.domain != "":
        return None
    condition = op.const(node.inputs[0])
    return None if condition is None else attr(node, "then_branch" if condition.any() else "else_branch")
