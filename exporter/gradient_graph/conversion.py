"""A model of an old opset in the oldest that the rules know: ONNX's converter, and what it leaves wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporter.files.skeleton import is_weight, skeleton
from exporter.gradient_graph.inference import infer_shapes
from symbolics.errors import FormatError
from symbolics.graph.values import array_of, attr, describe, graph_of, input_of, made_by, rank_of, static_shape
from symbolics.graph.walk import walk
from symbolics.node.names import BACKWARD_KEY, MARK_DOMAIN, MARK_OP
from symbolics.text import clean, reason

__all__ = ["OPSET", "converted"]

OPSET = 18  # the rules' oldest
# The opsets since which something is otherwise.
_SLOPES_BROADCAST = 7  # those of a PRelu
_RESIZE, _HALF_PIXELS = 10, 11  # instead of Upsample; where a pixel lies
_MASKS_OF_BITS, _MASKS = 10, 12  # those of a Dropout that drops nothing; all ones
_ALONG_ONE_AXIS = 13  # Softmax and its like
_NUMBERED_PARTS = 18  # those of a Split into equal ones
_SCANS_OF_BATCHES = 8  # the only one that has them
_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}


def converted(model: ir.Model, version: int) -> ir.Model:
    """The model in the rules' oldest opset; the converter does not see the large weights."""
    from onnx import version_converter

    for node in walk(model.graph):
        if node.op_type == "Scan" and node.domain == "" and version == _SCANS_OF_BATCHES:
            raise FormatError(
                f"{describe(node)} is of opset {version}, whose Scan goes over each part of a batch: newer opsets do not have it."
                f" Export it again with opset_version={OPSET} or newer."
            )
    try:
        new = ir.from_proto(version_converter.convert_version(_inlined(model), OPSET))
    except Exception as error:
        raise FormatError(
            f"the model has opset {version} and could not be converted to {OPSET}, the oldest that gradients are written for: "
            f"{_culprit(model, error)}. Export it again with opset_version={OPSET} or newer."
        ) from error
    new.metadata_props.update(model.metadata_props)
    if any(_has_its_own_gradient(key, function) for key, function in model.functions.items()):
        new.functions.update({key: _function_converted(function) for key, function in model.functions.items()})
    if version < _SLOPES_BROADCAST:
        _align_slopes(new)
    _mend(new.graph, version)
    graph, before = new.graph, model.graph
    graph.name = before.name
    values = {v.name: v for v in graph.inputs}
    weights = {n: values[n] for n, v in before.initializers.items() if is_weight(v.const_value)}
    for name, value in weights.items():
        value.const_value = before.initializers[name].const_value
    kept = {v.name for v in before.inputs}
    for value in [v for v in graph.inputs if v.name in weights and v.name not in kept]:
        graph.inputs.remove(value)
    rest = dict(graph.initializers)
    graph.initializers.clear()
    for name in (*before.initializers, *rest):  # in their old order
        if name not in graph.initializers:
            graph.initializers[name] = weights.get(name) or rest[name]
    return new


def _has_its_own_gradient(key: ir.OperatorIdentifier, function: ir.Function) -> bool:
    return key[:2] == (MARK_DOMAIN, MARK_OP) or BACKWARD_KEY in function.metadata_props


def _function_converted(function: ir.Function) -> ir.Function:
    """A function in the rules' oldest opset: as it is where its nodes mean the same there, else by ONNX's converter."""
    version = function.opset_imports.get("", OPSET)
    if version < OPSET and not all(_has_kept_its_words(node, version) for node in walk(function)):
        proto = ir.to_proto(function)
        inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names] for names in (proto.input, proto.output))
        body = onnx.helper.make_graph(proto.node, function.name, inputs, outputs, value_info=proto.value_info)
        try:
            new = onnx.version_converter.convert_version(onnx.helper.make_model(body, opset_imports=proto.opset_import), OPSET).graph
        except Exception as error:
            raise FormatError(
                f"the function {clean(function.name)} has opset {version} and could not be converted to {OPSET}, the oldest that gradients are written for: "
                f"{reason(error)}. Export it again with opset_version={OPSET} or newer."
            ) from error
        del proto.node[:], proto.value_info[:]
        proto.node.extend(new.node)
        proto.value_info.extend(new.value_info)
        function = ir.serde.deserialize_function(proto)
    _mend(function, version)
    function.opset_imports[""] = max(OPSET, version)
    return function


def _has_kept_its_words(node: ir.Node, version: int) -> bool:
    """Whether a node of this opset means the same in the rules' oldest: it has no fewer inputs and attributes there, and the same defaults."""
    if node.domain:
        return True
    try:
        old, new = (onnx.defs.get_schema(node.op_type, opset, "") for opset in (version, max(version, OPSET)))
    except onnx.defs.SchemaError:
        return False
    kept = all(name in new.attributes and new.attributes[name].default_value == a.default_value for name, a in old.attributes.items())
    return kept and not new.deprecated and len(old.inputs) <= len(new.inputs)


def _inlined(model: ir.Model) -> onnx.ModelProto:
    """For the converter, which loses functions: their nodes in the place of their calls, but where the function has a gradient of its own."""
    from onnx import inliner

    called = [key[:2] for key, function in model.functions.items() if not _has_its_own_gradient(key, function)]
    return inliner.inline_selected_functions(skeleton(model), called) if called else skeleton(model)


# -------------------------------------------------------------------------------------------- what the converter leaves
def _before(node: ir.Node, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    """The output of a new node before this one, which has a name as its output has."""
    new = ir.node(op_type, inputs, attributes={k: v for k, v in attributes.items() if v is not None})
    place = next(name for i in itertools.count() if (name := f"{node.outputs[0].name}_converted_{i}") not in _names(graph_of(node)))
    new.name = new.outputs[0].name = place
    graph_of(node).insert_before(node, new)
    return new.outputs[0]


def _names(graph: ir.Graph | ir.Function) -> set[str | None]:
    return {output.name for node in graph for output in node.outputs}


def _mend(graph: ir.Graph | ir.Function, version: int) -> None:
    for node in list(walk(graph)):
        if (mend := _MENDS.get(node.op_type)) is not None and node.domain == "":
            mend(node, version)


def _hardmax(node: ir.Node, version: int) -> None:
    """Before opset 13 it was of a matrix: the axes before its axis, and the others."""
    if version >= _ALONG_ONE_AXIS:
        return
    x, y = node.inputs[0], node.outputs[0]
    matrix = _before(node, "Flatten", x, axis=attr(node, "axis", 1))
    hot = _before(node, "Hardmax", matrix, axis=-1)
    shape = _before(node, "Shape", x)
    _become(node, "Reshape", [hot, shape], allowzero=1)
    y.shape = None if x is None else x.shape


def _softmax(node: ir.Node, version: int) -> None:
    """The same matrix; the converter's Reshape behind it takes a length of 0 for that of another axis."""
    if version >= _ALONG_ONE_AXIS or made_by(node.inputs[0], "Flatten") is None:
        return
    for reader in node.outputs[0].consumers():
        if reader.op_type == "Reshape" and made_by(input_of(reader, 1), "Shape") is not None:
            reader.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)


def _become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> None:
    """The node as another operator, with its name and output."""
    node.op_type = op_type
    node.attributes.clear()
    node.attributes.update({k: ir.convenience.convert_attribute(k, v) for k, v in attributes.items()})
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _resize(node: ir.Node, version: int) -> None:
    """Before opset 11, and as Upsample, the place of an element was its index by the scale. Nearest was the one before it, or after it where the axis shrinks."""
    if version >= _HALF_PIXELS:
        return
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
    if attr(node, "mode") != "nearest":
        return
    x, roi, scales = (*node.inputs, None, None)[:3]
    known = array_of(scales)
    grows = version < _RESIZE or (known is not None and bool((known >= 1).all()))  # an Upsample may not shrink
    shrinks = known is not None and bool((known <= 1).all())
    if not grows and not shrinks and scales is not None:  # axis by axis: first those that grow
        one = _before(node, "Constant", value=ir.tensor(np.ones(1, np.float32)))
        larger, smaller = _before(node, "Max", scales, one), _before(node, "Min", scales, one)
        grown = _before(node, "Resize", x, None, larger, **_NEAREST, nearest_mode="floor")
        _become(node, "Resize", [grown, None, smaller], **_NEAREST)
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor" if grows else "ceil")


def _dropout(node: ir.Node, version: int) -> None:
    """Before opset 12 it dropped nothing, and onnxruntime's mask is all zeros; before 10 the mask was of numbers."""
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    if version >= _MASKS or mask is None or not (mask.is_graph_output() or mask.uses()):
        return
    x, name, kind, shape = node.inputs[0], mask.name, mask.type, mask.shape
    zeros = _before(node, "Less", x, x)
    if version < _MASKS_OF_BITS:
        zeros = _before(node, "CastLike", zeros, x)
    mask.replace_all_uses_with(zeros, replace_graph_outputs=True)
    node.resize_outputs(1)
    zeros.name, zeros.type, zeros.shape = name, kind, shape


def _pad(node: ir.Node, version: int) -> None:
    """Its number, which the converter leaves where the mode has none."""
    node.attributes.pop("value", None)


def _split(node: ir.Node, version: int) -> None:
    """Into equal parts: newer opsets want their number."""
    if version < _NUMBERED_PARTS and input_of(node, 1) is None and "num_outputs" not in node.attributes:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


_MENDS: dict[str, Callable[[ir.Node, int], None]] = {
    "Dropout": _dropout,
    "Hardmax": _hardmax,
    "LogSoftmax": _softmax,
    "Pad": _pad,
    "Resize": _resize,
    "Softmax": _softmax,
    "Split": _split,
}


def _align_slopes(model: ir.Model) -> None:
    """Before opset 7 the slopes of a PRelu were one for each channel, which ONNX's converter passes over: as it broadcasts now they need axes behind."""
    nodes = [node for node in walk(model.graph) if node.op_type == "PRelu" and node.domain == ""]
    if not nodes:
        return
    infer_shapes(model)
    for node in nodes:
        x, slope = node.inputs
        if rank_of(x) is None or slope is None or rank_of(slope) is None:
            raise FormatError(
                f"{describe(node)} is of an opset before 7, and the ranks of its inputs are not known: add their shapes to the file"
            )
        behind = (rank_of(x) or 0) - 2
        if behind > 0 and rank_of(slope) == 1 and static_shape(slope) != (1,):
            axes = ir.node("Constant", [], attributes={"value_ints": list(range(1, 1 + behind))})
            aligned = ir.node("Unsqueeze", [slope, axes.outputs[0]])
            for new, what in ((axes, "axes"), (aligned, "slopes")):
                new.outputs[0].name = new.name = f"{node.outputs[0].name}_{what}"
            graph_of(node).insert_before(node, [axes, aligned])
            node.replace_input_with(1, aligned.outputs[0])


def _culprit(model: ir.Model, error: Exception) -> str:
    """What ONNX's converter said, without the line of its source; and the first node that it says that of alone."""
    said = reason(error).rpartition(" failed: ")[2].rstrip(".")
    proto = skeleton(model)
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        proto = onnx.shape_inference.infer_shapes(proto)
    infos = {v.name: v for v in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)}
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node, twin in zip(model.graph, proto.graph.node):
        given = [infos[n] for n in dict.fromkeys(twin.input) if n in infos]
        constants = [weights[n] for n in dict.fromkeys(twin.input) if n in weights]
        made = [infos.get(n) or onnx.ValueInfoProto(name=n) for n in twin.output if n]
        alone = onnx.helper.make_graph([twin], "alone", given, made, constants)
        try:
            onnx.version_converter.convert_version(
                onnx.helper.make_model(alone, opset_imports=proto.opset_import, ir_version=proto.ir_version), OPSET
            )
        except Exception as again:
            if reason(again).rpartition(" failed: ")[2].rstrip(".") == said:
                return f"{describe(node)}: {said}"
    return said
