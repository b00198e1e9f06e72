"""The graph that TorchScript wrote, made smaller while it still is a message: what goes here is never made a node, typed and written again."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from symbolics.graph.values import RANDOM
from symbolics.node.names import MARK_DOMAIN

__all__ = ["constants_to_initializers", "drop_invented_sizes", "read_draft"]

_SMALL = 1024  # bytes of a constant that is worth comparing


def constants_to_initializers(graph: onnx.GraphProto, merge: bool) -> None:
    """Half of the nodes that TorchScript writes are Constants: as messages they are moved for a fraction of what nodes cost.

    Args:
        graph: The main graph.
        merge: Whether equal small constants, and then equal nodes, become one, as the optimizer would make them later. It is
            left to the optimizer where nodes have bodies, which read names of the graph.
    """
    constants, nodes = [], []
    for node in graph.node:
        if node.op_type == "Constant" and not node.domain and len(node.attribute) == 1 and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            constants.append(tensor)
        else:
            nodes.append(node)
    if merge and not any(attribute.HasField("g") for node in nodes for attribute in node.attribute):
        outputs = {value.name for value in graph.output}
        constants, other = _merge_constants(constants, outputs)
        nodes = _merge_nodes(nodes, outputs, other)
    graph.initializer.extend(constants)
    if len(nodes) < len(graph.node):
        # Removing nodes one by one moves all that follow, each time.
        nodes = list(map(onnx.NodeProto.FromString, (node.SerializeToString() for node in nodes)))
        del graph.node[:]
        graph.node.extend(nodes)


def drop_invented_sizes(graph: onnx.GraphProto, declared: Collection[str]) -> None:
    """Take away the names that TorchScript invents for open sizes: it gives one name to sizes that differ, and onnxruntime then uses the buffers of one for the other.

    Args:
        graph: The main graph, of whose inner values none has a type yet.
        declared: The names that the user gave; those of inputs stay, too. What follows from them, onnx infers.
    """
    kept = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim} | set(declared)
    bodies = [graph]
    while bodies:
        body = bodies.pop()
        values = body.output if body is graph else (*body.input, *body.output, *body.value_info)
        for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
            if dim.dim_param and dim.dim_param not in kept:
                dim.ClearField("dim_param")
        bodies += [attribute.g for node in body.node for attribute in node.attribute if attribute.HasField("g")]


def _merge_constants(constants: list[onnx.TensorProto], outputs: set[str]) -> tuple[list[onnx.TensorProto], dict[str, str]]:
    """The first of each small constant, and what the others' readers read in place of them."""
    kept: list[onnx.TensorProto] = []
    first: dict[bytes, str] = {}
    other: dict[str, str] = {}
    for tensor in constants:
        if len(tensor.raw_data) <= _SMALL and tensor.name not in outputs:
            name = tensor.name
            tensor.ClearField("name")
            data = tensor.SerializeToString(deterministic=True)
            tensor.name = name
            if first.setdefault(data, name) != name:
                other[name] = first[data]
                continue
        kept.append(tensor)
    return kept, other


def _merge_nodes(nodes: list[onnx.NodeProto], outputs: set[str], other: dict[str, str]) -> list[onnx.NodeProto]:
    """The first of equal nodes, with their inputs by the names in ``other``, which learns those of the rest."""
    kept: list[onnx.NodeProto] = []
    first: dict[tuple[object, ...], list[str]] = {}
    for node in nodes:
        for i, name in enumerate(node.input):
            if name in other:
                node.input[i] = other[name]
        names = list(node.output)
        # What is known to give equal results; two calls of a Function, or two draws, are two.
        if node.domain in ("", MARK_DOMAIN) and node.op_type not in RANDOM and "" not in names and outputs.isdisjoint(names):
            attributes = tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute))
            same = first.setdefault((node.domain, node.op_type, *node.input, attributes, len(names)), names)
            if same is not names:
                other.update(zip(names, same, strict=True))
                continue
        kept.append(node)
    return kept


def read_draft(proto: onnx.ModelProto) -> ir.Model:
    """The model of a message, from which the types of inner values are taken.

    Half of the time of ir.from_proto goes into those types, and the values of a graph share a few: each is read once.
    """
    types = {info.name: info.type.SerializeToString(deterministic=True) for info in proto.graph.value_info}
    del proto.graph.value_info[:]
    model = ir.from_proto(proto)
    known: dict[bytes, ir.TypeAndShape] = {}
    for value in (value for node in model.graph for value in node.outputs):
        key = types.get(value.name or "")
        if key is None:
            continue
        kind = known.get(key) or ir.from_proto(onnx.TypeProto.FromString(key))
        if isinstance(kind.type, ir.TensorType):  # types and shapes may be changed: each value has its own
            known[key] = kind
            value.type, value.shape = ir.TensorType(kind.type.dtype), None if kind.shape is None else kind.shape.copy()
        else:
            value.type, value.shape = kind.type, kind.shape
    return model
