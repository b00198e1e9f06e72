"""What the scopes of one build share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from symbolics.graph.values import RANDOM, attr, name_of, static_shape

__all__ = ["Scope"]

_FOLDED_SIZE = 4096
_FOLDED_DEPTH = 40
_NEVER_FOLDED = RANDOM | {"If", "Loop", "Scan"}


class Scope:
    """What the scopes of one build share: fresh names, constants, and the engine's way to differentiate a body."""

    def __init__(self, prefix: str, folded: Callable[[ir.Value], bool]) -> None:
        self.prefix = prefix
        self.constants: dict[Hashable, ir.Value] = {}
        self.active: set[ir.Value] = set()
        self.backward: Callable[..., dict[ir.Value, ir.Value]] = _no_engine
        self.functions: Mapping[Any, ir.Function] = {}
        self.opset = 18
        self._folded = folded
        self._count = 0
        self._own: set[ir.Value] = set()
        self._known: dict[ir.Value, np.ndarray] = {}

    def name(self, stem: str) -> str:
        """A name that nothing in the model has."""
        self._count += 1
        return f"{self.prefix}{stem}_{self._count}"

    def constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A constant; equal ones are one."""
        array = np.asarray(value, dtype=dtype.numpy())
        key = (dtype, array.shape, array.tobytes())
        if (known := self.constants.get(key)) is None:
            name = self.name("constant")
            known = ir.Value(
                name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=ir.tensor(array, dtype=dtype, name=name)
            )
            self.constants[key] = known
            self._own.add(known)
        return known

    def register(self, graph: ir.Graph) -> None:
        """Those constants that something uses are initializers of the graph, no others."""
        for value in self.constants.values():
            if value.uses() or value.is_graph_output():
                graph.initializers[name_of(value)] = value
            else:
                graph.initializers.pop(name_of(value), None)

    def const(self, value: ir.Value | None, depth: int = 0) -> np.ndarray | None:
        """The array of a value that no training step changes, otherwise None; so many nodes deep it looks, and no further."""
        if value is None or depth > _FOLDED_DEPTH:
            return None
        if value in self._own and value.const_value is not None:
            return value.const_value.numpy()
        producer = value.producer()
        if producer is not None:
            if value not in self._known and (arrays := self.evaluate(producer, depth)) is not None:
                self._known.update(zip(producer.outputs, arrays))
            return self._known.get(value)
        if value.const_value is not None and value.is_initializer() and not value.is_graph_input() and self._folded(value):
            return value.const_value.numpy()
        return None

    def evaluate(self, node: ir.Node, depth: int = 0) -> list[np.ndarray] | None:
        """The outputs of a node that only constants and static shapes go into, None for any other."""
        if node.domain != "" or node.op_type in _NEVER_FOLDED:
            return None
        if node.op_type == "Constant":
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
            return None if tensor is None or tensor.dtype is ir.DataType.STRING else [tensor.numpy()]
        if node.op_type == "Shape" and (dims := static_shape(node.inputs[0])) is not None:
            return [np.array(dims[slice(attr(node, "start"), attr(node, "end"))], np.int64)]
        if node.op_type == "Size" and (dims := static_shape(node.inputs[0])) is not None:
            return [np.array(int(np.prod(dims)), np.int64)]
        arrays = []
        for v in node.inputs:
            array = None if v is None else self.const(v, depth + 1)
            if v is not None and (array is None or array.size > _FOLDED_SIZE or v.type is None):
                return None
            arrays.append(array)
        if not node.inputs:
            return None
        return _run(node, arrays, self.opset)


def _run(node: ir.Node, arrays: list[np.ndarray | None], opset: int) -> list[np.ndarray] | None:
    """The outputs of one node by the reference evaluator; None where it cannot, or where they are large."""
    inputs = [None if v is None else ir.Value(name=f"i{k}", type=v.type) for k, v in enumerate(node.inputs)]
    twin = ir.Node("", node.op_type, inputs, node.attributes.values(), num_outputs=len(node.outputs))
    for k, o in enumerate(twin.outputs):
        o.name = f"o{k}"
    graph = ir.Graph([v for v in inputs if v is not None], twin.outputs, nodes=[twin], name="fold", opset_imports={"": opset})
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
    try:
        with np.errstate(all="ignore"):
            results = [np.asarray(r) for r in ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10))).run(None, feeds)]
    except Exception:  # an evaluator that cannot is no obstacle: the node stays
        return None
    return None if any(r.size > _FOLDED_SIZE or r.dtype.kind not in "fiub" for r in results) else results


def _no_engine(*_: Any) -> dict[ir.Value, ir.Value]:
    raise RuntimeError("this scope has no engine")
