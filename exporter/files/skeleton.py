"""A model without the data of its weights, as ONNX's shape inference and checker read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from exporter.files.tensors import held_tensors, inside, is_external, replacing
from symbolics.errors import FormatError
from symbolics.graph.values import name_of
from symbolics.graph.walk import subgraphs, walk
from symbolics.text import reason

__all__ = ["SMALL", "is_weight", "skeleton"]

SMALL = 256  # elements of an initializer that shape inference may have to read


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a message with its large weights, and those in other files, as inputs. Values of other tensors that are in files are read.

    Raises:
        FormatError: The model cannot be written down: a name is no text, a tensor is not what its type says.
    """
    graph = model.graph
    every = dict(graph.initializers)
    weights = [v for v in graph.initializers.values() if is_weight(v.const_value)]
    added = [v for v in weights if not v.is_graph_input()]
    for value in weights:
        del graph.initializers[name_of(value)]
    graph.inputs.extend(added)
    try:
        elsewhere = [each for each in held_tensors(model) if is_external(each.tensor)]
        with replacing(elsewhere, {id(each.tensor): inside(each.tensor) for each in elsewhere}), _without_typeless_shapes(model):
            proto = ir.to_proto(model)
        for value, info in zip(reversed(added), reversed(proto.graph.input)):
            if value.const_value is not None and not info.HasField("type"):  # an initializer's type is that of its tensor
                tensor = value.const_value
                info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, int(tensor.dtype), tensor.shape.numpy()))
        return proto
    except (ir.serde.SerdeError, ValueError, TypeError, OSError) as error:
        raise FormatError.damaged("the model", f"it cannot be written as ONNX: {reason(error)}") from error
    finally:
        for _ in added:  # one by one: a deleted slice would leave them marked as inputs
            graph.inputs.pop()
        if weights:  # in the order that they had
            graph.initializers.clear()
            graph.initializers.update(every)


@contextlib.contextmanager
def _without_typeless_shapes(model: ir.Model) -> Iterator[None]:
    """While the block runs, no value has a shape without a type: a message has no place for one, and onnx_ir would say so of each."""
    nodes = [node for part in (model.graph, *model.functions.values()) for node in walk(part)]
    made = (value for node in nodes for values in (node.outputs, *(body.inputs for body in subgraphs(node))) for value in values)
    shapes = [(value, value.shape) for value in made if value.type is None and value.shape is not None]
    for value, _ in shapes:
        value.shape = None
    try:
        yield
    finally:
        for value, shape in shapes:
            value.shape = shape


def is_weight(tensor: ir.TensorProtocol | None) -> bool:
    """Whether shape inference and checker do without the data of an initializer: it is large, or in a file of its own."""
    return tensor is None or tensor.size > SMALL or isinstance(tensor, ir.ExternalTensor)
