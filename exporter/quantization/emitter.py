"""Standard operators in the place of a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.quantization.names import free_name

__all__ = ["Emitter"]


class Emitter:
    """Writes nodes before another one; Python floats become constants in float32.

    Args:
        graph: The graph.
        names: The names that it has; it gets more.
        before: The node.
    """

    def __init__(self, graph: ir.Graph, names: set[str], before: ir.Node) -> None:
        self._graph, self._names, self._before = graph, names, before
        self._stem = before.name or before.op_type

    def constant(self, array: np.ndarray, name: str = "constant") -> ir.Value:
        """An initializer."""
        name = free_name(self._names, f"{self._stem}/{name}")
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def __call__(self, op_type: str, *given: Any, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: Any) -> ir.Value:
        """A node of one output."""
        inputs = [self.constant(np.array(each, np.float32)) if isinstance(each, float) else each for each in given]
        domain, _, op_type = op_type.rpartition("::")
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain, name=free_name(self._names, f"{self._stem}/{op_type}"))
        self._graph.insert_before(self._before, node)
        node.outputs[0].name, node.outputs[0].type = free_name(self._names, f"{node.name}_0"), ir.TensorType(dtype)
        return node.outputs[0]

    def replace(self, result: ir.Value, value: ir.Value) -> None:
        """Let a value stand for what the node gave, under its name, and take the node out."""
        value.type, value.shape = result.type or value.type, result.shape
        result.replace_all_uses_with(value, replace_graph_outputs=True)
        self._graph.remove(self._before, safe=True)
        value.name, result.name = result.name, None
