"""Copies of nodes: function bodies in place of calls, bodies of control flow for their backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope
from symbolics.graph.values import array_of, dtype_of, graph_of, shape_in_function
from symbolics.graph.walk import captured, discard, prune, walk
from symbolics.node.names import GRADIENT_DOMAIN

__all__ = ["clone_nodes", "function_body", "inline", "inline_body", "replace"]

_PREVIEW = "ai.onnx.preview"


def clone_nodes(
    scope: Scope,
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
        body = clone_nodes(scope, graph, mapping, attributes, metadata)
        outputs = [mapping.get(v) or v for v in graph.outputs]
        return ir.Graph(inputs, outputs, nodes=body, initializers=initializers, name=graph.name, opset_imports=dict(graph.opset_imports))

    def value_of(v: ir.Value) -> ir.Value:
        if (copy := mapping.get(v)) is None:
            copy = mapping[v] = ir.Value(name=scope.name(v.name or "value"), type=v.type, shape=v.shape, const_value=v.const_value)
        return copy

    def attribute_of(name: str, a: ir.Attr) -> ir.Attr | None:
        if a.is_ref():
            if attributes is None:
                return a
            source = attributes.get(a.ref_attr_name or "")
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
            name=scope.name(node.name or node.op_type), metadata_props={**(metadata or {}), **node.metadata_props},
        )  # fmt: skip
        copy.meta.update(node.meta)
        for old, new in zip(node.outputs, copy.outputs):
            mapping[old] = new
            new.name = scope.name(old.name) if old.name else None if old.name is None else ""
            new.type, new.shape = old.type, old.shape
        copies.append(copy)
    return copies


def function_body(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function], opset: int) -> ir.Function | None:
    """The body of a call: a function of the model, or the one that the ONNX standard gives its operator."""
    if (local := functions.get(node.op_identifier())) is not None:
        return local
    if node.domain not in ("", _PREVIEW):
        return None
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset if node.domain == "" else 1, node.domain)  # its stub lacks functions
    except onnx.defs.SchemaError:
        return None
    data: bytes = b""
    if schema.has_context_dependent_function:
        trimmed = ir.Node("", node.op_type, node.inputs, node.attributes.values(), num_outputs=len(node.outputs))
        for o, t in zip(node.outputs, trimmed.outputs):
            t.name = o.name or ""
        proto = ir.to_proto(trimmed)
        for place in range(len(trimmed.inputs)):  # not those of its graphs, which are the node's
            trimmed.replace_input_with(place, None)
        types = [b"" if v is None or v.type is None else ir.to_proto(v).type.SerializeToString() for v in node.inputs]
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
    outer = {v.name: v for v in captured(node)}  # what graphs among its attributes read from outside: ONNX writes their nodes into the body
    proto.input.extend(name for name in outer if name is not None)
    made = {o for n in proto.node for o in n.output} | set(proto.input)
    for name in [o for o in proto.output if o not in made]:  # listed, but made by nobody
        proto.output[list(proto.output).index(name)] = ""
    live = [o for o in proto.output if o]
    names = list(proto.output)
    del proto.output[:]
    proto.output.extend(live)
    function = ir.serde.deserialize_function(proto)
    function.meta["captured"] = list(outer.values())
    function.meta["outputs"] = [function.outputs[live.index(n)] if n else None for n in names]
    function.meta["defaults"] = {a.name: ir.from_proto(a.default_value) for a in schema.attributes.values() if a.default_value.type}
    return function


def inline(scope: Scope, node: ir.Node, function: ir.Function) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """Copies of the nodes of a function for one call, and what stands for the outputs of the call."""
    mapping: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
    mapping.update(zip(function.inputs, node.inputs))
    if outer := function.meta.get("captured"):
        mapping.update(zip(function.inputs[-len(outer) :], outer, strict=True))
    defaults = {k: a for k, a in function.attributes.items() if a.value is not None}
    attributes = {**function.meta.get("defaults", {}), **defaults, **node.attributes}
    nodes = clone_nodes(scope, function, mapping, attributes, node.metadata_props)
    if function.domain != GRADIENT_DOMAIN:  # whose calls share a function where their sizes have equal names
        for value in (value for each in walk(nodes) for value in each.outputs):  # files of earlier releases have names in functions
            value.shape = shape_in_function(value)
    outputs = function.meta.get("outputs", list(function.outputs))
    return nodes, [None if o is None else mapping[o] for o in outputs]


def inline_body(op: Emitter, body: ir.Graph, inputs: Iterable[ir.Value]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Copies of the nodes of a body for one run of it, and what stands for its outputs."""
    mapping: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, inputs, strict=True))
    mapping.update((v, op.constant(array_of(v), dtype_of(v))) for v in body.initializers.values())
    nodes = clone_nodes(op.scope, body, mapping)
    return nodes, [mapping.get(v) or v for v in body.outputs]


def replace(scope: Scope, node: ir.Node, nodes: Iterable[ir.Node], values: Sequence[ir.Value | None]) -> list[ir.Node]:
    """Put nodes in the place of one, whose names and readers go over to ``values``, one per output; None: nobody reads it.

    A value that another node makes, or that stands for two outputs, gets an Identity: its name is taken.

    Returns:
        Those of the nodes that something uses.
    """
    graph, nodes = graph_of(node), list(nodes)
    made = {o for n in nodes for o in n.outputs}
    for old, new in zip(node.outputs, values):
        if new is None:
            continue
        if new not in made:
            same = ir.Node("", "Identity", [new], name=scope.name("Identity"))
            nodes.append(same)
            new = same.outputs[0]
        made.discard(new)
        name, new.type, new.shape = old.name, old.type or new.type, new.shape if old.shape is None else old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name or new.name
    nodes = prune(nodes, graph.outputs)
    graph.insert_before(node, nodes)
    discard(node)
    graph.remove(node)
    return nodes
