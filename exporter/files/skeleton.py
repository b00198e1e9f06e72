"""A model without the data of its weights, as ONNX's shape inference and checker read it."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.graph.values import name_of
from symbolics.text import reason

__all__ = ["SMALL", "is_weight", "skeleton"]

SMALL = 256  # elements of an initializer that shape inference may have to read


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a message with its large weights, and those in other files, as inputs.

    Raises:
        FormatError: The model cannot be written down: a name is no text, a tensor is not what its type says.
    """
    graph = model.graph
    weights = [v for v in graph.initializers.values() if is_weight(v.const_value)]
    added = [v for v in weights if not v.is_graph_input()]
    for value in weights:
        del graph.initializers[name_of(value)]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    except (ir.serde.SerdeError, ValueError, TypeError, OSError) as error:
        raise FormatError.damaged("the model", f"it cannot be written as ONNX: {reason(error)}") from error
    finally:
        for _ in added:  # one by one: a deleted slice would leave them marked as inputs
            graph.inputs.pop()
        for value in weights:
            graph.initializers[name_of(value)] = value


def is_weight(tensor: ir.TensorProtocol | None) -> bool:
    """Whether shape inference and checker do without the data of an initializer: it is large, or in a file of its own."""
    return tensor is None or tensor.size > SMALL or isinstance(tensor, ir.ExternalTensor)
