"""ONNX's inference of shapes, with the sizes that pools, Einsums and DFTs have.

With ``ceil_mode`` the last window of a pool may stand over the border. One that would start in the padding behind an axis is none: torch,
onnxruntime and ONNX's own text say so, and ONNX's inference counts it. Of an Einsum that stretches an axis of one element it takes the 1 where that operand comes first.
A DFT whose length is no constant has the size of its input, by ONNX, even where it gives half of a spectrum: here it has a size that nothing else has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import onnx

from symbolics.graph.einsum import sizes_of_result

__all__ = ["POOLS", "count_of_windows", "infer_proto"]

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_PADDED = {"NOTSET", b"NOTSET", "", b""}


def infer_proto(model: onnx.ModelProto, *, forget_outputs: bool = False, **options: Any) -> onnx.ModelProto:
    """The model with the types and shapes of its values.

    Args:
        model: The model.
        forget_outputs: Whether sizes that the main graph declares of its outputs follow from those of its pools where ONNX counts a window
            too many: who wrote them has them from ONNX.
        **options: Those of `onnx.shape_inference.infer_shapes`.
    """
    result = onnx.shape_inference.infer_shapes(model, **options)
    doubtful = [node for graph in _graphs(model.graph) for node in graph.node if not node.domain and _is_doubtful(node)]
    forgotten = not forget_outputs
    for _ in doubtful:  # those behind a mended one have other sizes then
        wrong = _mended(doubtful, result.graph)
        if not wrong:
            break
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        if not forgotten:
            for dim in (dim for value in changed.graph.output for dim in value.type.tensor_type.shape.dim if dim.dim_value):
                dim.ClearField("dim_value")
            forgotten = True
        _state(changed.graph, wrong)
        model = changed
        result = onnx.shape_inference.infer_shapes(model, **options)
    return result


def count_of_windows(length: int, before: int, behind: int, reach: int, step: int) -> tuple[int, int]:
    """How many windows a pool with ceil_mode has along an axis: as ONNX counts them, and as there are."""
    count = math.ceil((length + before + behind - reach) / step) + 1
    return count, count - ((count - 1) * step >= length + before)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those of its nodes' bodies."""
    yield graph
    for body in (a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
        yield from _graphs(body)


def _is_doubtful(node: onnx.NodeProto) -> bool:
    if node.op_type == "DFT":
        return len(node.input) > 1 and bool(node.input[1])
    return node.op_type == "Einsum" or (node.op_type in POOLS and bool(_attributes(node).get("ceil_mode")))


def _mended(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """The types of what such nodes give, where ONNX's are wrong."""
    graphs = list(_graphs(graph))
    types = {value.name: value.type for each in graphs for value in (*each.input, *each.value_info, *each.output)}
    shapes = {name: _shape(kind) for name, kind in types.items()}
    shapes |= {tensor.name: list(tensor.dims) for each in graphs for tensor in each.initializer if tensor.name not in shapes}
    numbers = dict(number for each in graphs for number in _numbers(each)) if any(node.op_type == "DFT" for node in nodes) else {}
    found = {}
    for node in nodes:
        for name in node.output:
            shape = shapes.get(name)
            try:
                right = None if shape is None else _right(node, [shapes.get(given) for given in node.input], shape, numbers)
            except (LookupError, TypeError, ValueError, ZeroDivisionError):  # a damaged node, of which ONNX's checker tells
                continue
            if right not in (None, shape):
                found[name] = onnx.helper.make_tensor_type_proto(types[name].tensor_type.elem_type, right)
    return found


def _numbers(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """The constants of a graph that are one integer."""
    made = ((node.output[0], _attributes(node).get("value")) for node in graph.node if node.op_type == "Constant" and node.output)
    for name, tensor in (*((tensor.name, tensor) for tensor in graph.initializer), *made):
        if isinstance(tensor, onnx.TensorProto) and tensor.data_type == onnx.TensorProto.INT64 and math.prod(tensor.dims) == 1:
            yield name, int(onnx.numpy_helper.to_array(tensor).item())


def _right(node: onnx.NodeProto, given: list[list[Any] | None], shape: list[Any], numbers: Mapping[str, int]) -> list[Any] | None:
    """The sizes of an output, None where there is nothing to say of ONNX's."""
    attributes = _attributes(node)
    if node.op_type == "DFT":
        if node.input[1] in numbers or given[0] is None or len(shape) != len(given[0]):
            return None
        axis = numbers.get(node.input[2]) if len(node.input) > 2 else attributes.get("axis", -2)
        places = range(len(shape) - 1) if axis is None else (axis % len(shape),)
        return [f"unk__{node.output[0]}_{i}" if i in places and size == given[0][i] else size for i, size in enumerate(shape)]
    if node.op_type == "Einsum":
        return sizes_of_result(attributes["equation"].decode(), given, shape)
    if given[0] is None or len(shape) != len(given[0]) or attributes.get("auto_pad", "") not in _PADDED:
        return None
    return [*shape[:2], *(_size(attributes, given[0], axis, shape[axis]) for axis in range(2, len(shape)))]


def _size(attributes: Mapping[str, Any], given: list[Any], axis: int, found: Any) -> Any:
    """How many windows there are along an axis; as ONNX says where it is open."""
    length, place, axes = given[axis], axis - 2, len(given) - 2
    if type(length) is not int or type(found) is not int:
        return found
    pads = attributes.get("pads", [0] * 2 * axes)
    step = attributes.get("strides", [1] * axes)[place]
    reach = attributes.get("dilations", [1] * axes)[place] * (attributes["kernel_shape"][place] - 1) + 1
    before, behind = pads[place], pads[place + axes]
    return count_of_windows(length, before, behind, reach, step)[1]


def _state(graph: onnx.GraphProto, wrong: Mapping[str, onnx.TypeProto]) -> None:
    """Write types down: ONNX does not overrule them."""
    for each in _graphs(graph):
        here = wrong.keys() & {name for node in each.node for name in node.output}
        kept = [value for value in each.value_info if value.name not in here]
        outputs = {value.name: value for value in each.output}
        del each.value_info[:]
        each.value_info.extend(kept)
        for name in sorted(here):
            if name in outputs:
                outputs[name].type.CopyFrom(wrong[name])
            else:
                each.value_info.append(onnx.ValueInfoProto(name=name, type=wrong[name]))


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _shape(kind: onnx.TypeProto) -> list[Any] | None:
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim]
