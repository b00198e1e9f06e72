"""What stock onnxruntime needs of a graph, arranged in memory.

1. An output of a node of ours (`_DOMAINS`) without a type gets a value_info with its element type: ORT cannot infer the
   outputs of a variadic operator. No shape: ORT would hold the run to it.
2. A context output that nobody reads loses its name, so that no context is made.
3. Empty names among variadic inputs and outputs fail when the model is loaded. They are removed, and an attribute
   remembers their places.
4. What stands behind the gradients of a PythonOpGrad or PythonOpBackward only orders nodes, which the context does as
   well; without it ORT frees those tensors earlier.
5. With a custom library, the domain of PythonOp is imported: ORT's own fusions make nodes of it (FusedGemm), and
   fail where the model does not import it.
6. A function with such a node in it is inlined: the values inside a function cannot be given types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx.inliner

from exporter.files.proto import graphs
from symbolics.node.names import (
    CALL_ATTRIBUTE,
    CLASS_KEY,
    MARK_DOMAIN,
    MARK_OP,
    ORT_DOMAIN,
    OWN_DOMAIN,
    PYTHON_OP,
    PYTHON_OP_BACKWARD,
    PYTHON_OP_GRAD,
    PYTHON_OP_TANGENT,
)
from symbolics.node.numbers import Numbers

__all__ = ["ABSENT_INPUTS", "KEPT_OUTPUTS", "drop_unread_contexts", "has_python_ops", "inline_modules", "needs_library", "prepare"]

#: Places (among the tensor arguments, with a tangent's behind them, or the gradients) whose input is absent.
ABSENT_INPUTS = "pythonop_absent_inputs"
#: Places (among the tensor arguments, or the outputs and tangents) whose gradient, or which itself, is an output of the node.
KEPT_OUTPUTS = "pythonop_kept_outputs"


def prepare(proto: onnx.ModelProto, *, fusions: bool = True) -> bool:
    """Arrange a model for onnxruntime, in place.

    Args:
        proto: The model.
        fusions: Whether a custom library will be there.

    Returns:
        Whether anything changed.
    """
    changed = _inline_python_ops(proto)
    changed |= drop_unread_contexts(proto)
    changed |= _unmark(proto)
    if fusions and all(imported.domain != ORT_DOMAIN for imported in proto.opset_import):
        proto.opset_import.add(domain=ORT_DOMAIN, version=1)
        changed = True
    for graph in graphs(proto):
        nodes = list(_ours(graph, *_DOMAINS))
        for node in nodes:
            changed |= _pack(node)
        changed |= _type_outputs(graph, nodes)
    return changed


def has_python_ops(proto: onnx.ModelProto) -> bool:
    """Whether a model has a node of ours, in a body or a function too."""
    return any(True for graph in graphs(proto) for _ in _ours(graph, *_DOMAINS))


def needs_library(proto: onnx.ModelProto) -> bool:
    """Whether a model has a node that the library of PythonOps runs, or should refuse."""
    return any(
        node.op_type in _DOMAINS if node.domain == ORT_DOMAIN else node.domain == OWN_DOMAIN and node.op_type != MARK_OP
        for graph in graphs(proto)
        for node in graph.node
    )


def drop_unread_contexts(proto: onnx.ModelProto) -> bool:
    """Take the names away from context outputs that nobody reads, so that runs make no contexts for them.

    Returns:
        Whether anything changed.
    """
    read: set[str] = set()
    for graph in graphs(proto):
        read.update(name for node in graph.node for name in node.input)
        read.update(value if isinstance(value, str) else value.name for value in graph.output)
    changed = False
    for graph in graphs(proto):
        dropped = set()
        for node in _ours(graph, PYTHON_OP, PYTHON_OP_BACKWARD):
            place = 0 if node.op_type == PYTHON_OP else len(_ints(node, "output_tensor_types"))
            if place < len(node.output) and node.output[place] and node.output[place] not in read:
                dropped.add(node.output[place])
                node.output[place] = ""
        if dropped and isinstance(graph, onnx.GraphProto):
            kept = [info for info in graph.value_info if info.name not in dropped]
            del graph.value_info[:]
            graph.value_info.extend(kept)
        changed |= bool(dropped)
    return changed


_DOMAINS = {PYTHON_OP: ORT_DOMAIN, PYTHON_OP_GRAD: ORT_DOMAIN, PYTHON_OP_BACKWARD: OWN_DOMAIN, PYTHON_OP_TANGENT: OWN_DOMAIN}


def _ours(graph: onnx.GraphProto | onnx.FunctionProto, *kinds: str) -> Iterator[onnx.NodeProto]:
    """The nodes of ours of these kinds in a graph, without those in its bodies."""
    return (node for node in graph.node if node.op_type in kinds and node.domain == _DOMAINS[node.op_type])


def inline_modules(proto: onnx.ModelProto) -> bool:
    """Put the nodes of modules in the place of the calls of their functions, in place: for passes that look at every node of the graph.

    Returns:
        Whether there were any.
    """
    return _inline(proto, [f for f in proto.functions if any(entry.key == CLASS_KEY for entry in f.metadata_props)])


def _inline_python_ops(proto: onnx.ModelProto) -> bool:
    changed = False
    while found := [function for function in proto.functions if has_python_ops(onnx.ModelProto(functions=[function]))]:
        changed = _inline(proto, found)  # those that call these have them now
    return changed


def _inline(proto: onnx.ModelProto, functions: Sequence[onnx.FunctionProto]) -> bool:
    if not functions:
        return False
    proto.CopyFrom(onnx.inliner.inline_selected_functions(proto, [(function.domain, function.name) for function in functions]))
    _number(proto)
    return True


def _number(proto: onnx.ModelProto) -> None:
    numbers = Numbers()
    for node in (node for graph in graphs(proto) for node in _ours(graph, *_DOMAINS)):
        for attribute in node.attribute:
            if attribute.name == CALL_ATTRIBUTE:
                attribute.s = (numbers.of(attribute.s, node.op_type == PYTHON_OP, node.input, node.output) or "").encode() or attribute.s


def _unmark(proto: onnx.ModelProto) -> bool:
    # A mark without a body is a file on its way to the gradient builder; to a runtime it is Identity.
    if any(f.domain == MARK_DOMAIN and f.name == MARK_OP for f in proto.functions):
        return False
    changed = False
    for graph in graphs(proto):
        for node in graph.node:
            if node.domain == MARK_DOMAIN and node.op_type == MARK_OP:
                node.domain, node.op_type = "", "Identity"
                changed = True
    return changed


def _set(node: onnx.NodeProto, name: str, values: Sequence[int]) -> None:
    attribute = onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS, ints=values)
    kept = [other for other in node.attribute if other.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, attribute])


def _ints(node: onnx.NodeProto, name: str) -> list[int]:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == name), [])


def _pack(node: onnx.NodeProto) -> bool:
    before = node.SerializeToString()
    if node.op_type == PYTHON_OP:
        inputs = list(node.input)
        first: list[str] = []
    else:
        backward = node.op_type != PYTHON_OP_TANGENT
        first = list(node.input[:1]) if backward else []
        inputs = list(node.input[1 : 1 + len(_ints(node, "input_tensor_requires_grads"))] if backward else node.input)
        kept = [i for i, name in enumerate(node.output) if name]
        if len(kept) < len(node.output):
            outputs = [name for name in node.output if name]
            del node.output[:]
            node.output.extend(outputs)
            _set(node, KEPT_OUTPUTS, kept)
    absent = [i for i, name in enumerate(inputs) if not name]
    if absent or len(first) + len(inputs) != len(node.input):
        del node.input[:]
        node.input.extend([*first, *(name for name in inputs if name)])
        if absent:
            _set(node, ABSENT_INPUTS, absent)
    return node.SerializeToString() != before


def _type_outputs(graph: onnx.GraphProto | onnx.FunctionProto, nodes: Sequence[onnx.NodeProto]) -> bool:
    if not nodes or not isinstance(graph, onnx.GraphProto):
        return False
    known = {value.name for value in (*graph.value_info, *graph.output) if value.type.tensor_type.elem_type}
    missing = [(name, kind) for node in nodes for name, kind in _outputs(node) if name not in known]
    graph.value_info.extend(onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in missing)
    return bool(missing)


def _outputs(node: onnx.NodeProto) -> list[tuple[str, int]]:
    """The named outputs of a packed node, each with its element type."""
    types = _ints(node, "output_tensor_types")
    if node.op_type == PYTHON_OP:
        return [(name, kind) for name, kind in zip(node.output, [onnx.TensorProto.INT64, *types], strict=False) if name]
    if node.op_type == PYTHON_OP_TANGENT:
        types = types * 2
    types += [onnx.TensorProto.INT64, onnx.TensorProto.BOOL] * (node.op_type == PYTHON_OP_BACKWARD)  # its context, and what is there
    kept = _ints(node, KEPT_OUTPUTS) or range(len(types))
    return [(name, types[place]) for name, place in zip(node.output, kept, strict=False) if name and 0 <= place < len(types)]
