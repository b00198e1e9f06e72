"""Parts of a graph, run by onnxruntime: what constants come to, and what a quantiser does with a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from symbolics.errors import FormatError
from symbolics.graph.copies import clone_nodes
from symbolics.graph.scope import Scope
from symbolics.graph.values import describe, is_python_op, name_of
from symbolics.graph.walk import subgraphs
from symbolics.text import reason

__all__ = ["Constants", "compiled", "nodes_between"]

_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
_SMALL = 1 << 16  # elements


class Constants:
    """The values of a graph that depend on none of its inputs.

    Args:
        model: The model, its functions inlined.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._known: dict[ir.Value, np.ndarray] = {}
        inputs = set(model.graph.inputs)
        self._constant = {value for value in model.graph.initializers.values() if value not in inputs}
        for node in model.graph:
            if node.domain or node.op_type in _RANDOM or is_python_op(node) or subgraphs(node):
                continue
            if all(value is None or value in self._constant for value in node.inputs):
                self._constant.update(node.outputs)

    def __contains__(self, value: ir.Value | None) -> bool:
        return value in self._constant

    def arrays(self, values: Sequence[ir.Value]) -> list[np.ndarray]:
        """What constants come to; onnxruntime computes them, in the operators that the graph has."""
        wanted = [value for value in dict.fromkeys(values) if value not in self._known]
        held = [value for value in wanted if value.const_value is not None]
        self._known.update((value, value.const_value.numpy()) for value in held if value.const_value is not None)
        made = [value for value in wanted if value not in self._known]
        if made:
            self._known.update(zip(made, compiled(self._model, (), made)(), strict=True))
        return [self._known[value] for value in values]

    def array(self, value: ir.Value) -> np.ndarray:
        """What a constant comes to."""
        return self.arrays([value])[0]

    def behind(self, value: ir.Value) -> list[np.ndarray]:
        """The small float constants that a constant is made of, itself excepted."""
        values = [
            each
            for node in nodes_between((), [value])
            for each in (*node.inputs, *node.outputs)
            if each is not None and each is not value and each.dtype in (None, ir.DataType.FLOAT) and each in self._constant
        ]
        return [array for array in self.arrays(list(dict.fromkeys(values))) if array.dtype == np.float32 and array.size < _SMALL]


def nodes_between(inputs: Iterable[ir.Value], outputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that make ``outputs`` of ``inputs`` and of constants, in the order of the graph."""
    stop = set(inputs)
    found: set[ir.Node] = set()
    todo = list(outputs)
    while todo:
        value = todo.pop()
        node = None if value in stop else value.producer()
        if node is not None and node not in found:
            found.add(node)
            todo += [each for each in node.inputs if each is not None]
    graph = next((node.graph for node in found), None)
    return [] if graph is None else [node for node in graph if node in found]


def compiled(
    model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], *, numbers: Mapping[ir.Value, np.ndarray] | None = None
) -> Callable[..., list[np.ndarray]]:
    """A part of a graph as a function of arrays.

    Args:
        model: The model.
        inputs: The values that it takes.
        outputs: The values that it gives; they depend on ``inputs`` and constants alone.
        numbers: What constants are, each one number, for a function that takes a vector of numbers where the graph has a tensor of another rank.

    Raises:
        FormatError: onnxruntime does not open the part.
    """
    nodes = nodes_between([*inputs, *(numbers or ())], outputs)
    mapping: dict[ir.Value, ir.Value | None] = {}
    given: list[ir.Value] = []
    held: list[ir.Value] = []
    for i, value in enumerate(inputs):
        given.append(ir.Value(name=f"x{i}", type=value.type or ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None])))
        mapping[value] = given[-1]
    for node in nodes:
        for read in node.inputs:
            if read is None or read in mapping or read.producer() in nodes:
                continue
            tensor = ir.tensor(numbers[read]) if numbers and read in numbers else read.const_value
            if tensor is None:
                raise FormatError(f"{describe(node)} reads {name_of(read)}, which is no constant")
            shape = ir.Shape(tensor.shape.numpy())
            held.append(ir.Value(name=f"c{len(held)}", type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor))
            mapping[read] = held[-1]
    copies = clone_nodes(Scope("", lambda _: False), nodes, mapping)
    if numbers is not None:
        for node in copies:
            _without_rank(node)
    results = [result for value in outputs if (result := mapping[value]) is not None]
    graph = ir.Graph(given, results, nodes=copies, initializers=held, opset_imports=dict(model.opset_imports))
    for result in results:
        result.shape = None
    run = _opened(ir.to_proto(ir.Model(graph, ir_version=model.ir_version)))
    names = [value.name for value in given]
    return lambda *arrays: run(dict(zip(names, arrays, strict=True)))


def _opened(proto: onnx.ModelProto) -> Callable[[dict[Any, np.ndarray]], list[np.ndarray]]:
    """A model as a function of its inputs, on onnxruntime; on ONNX's reference where onnxruntime has no kernel, as for arithmetic in bfloat16."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    run: Any
    try:
        try:
            run = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
            run = ReferenceEvaluator(proto).run
    except Exception as error:
        raise FormatError(f"onnxruntime does not open a part of the model: {reason(error)}") from error

    def call(feeds: dict[Any, np.ndarray]) -> list[np.ndarray]:
        try:
            return list(run(None, feeds))
        except Exception as error:  # shapes that do not fit, a division of integers by 0
            raise FormatError(f"a part of the model cannot be run: {reason(error)}") from error

    return call


def _without_rank(node: ir.Node) -> None:
    """Take from a copied node what speaks of the rank that the graph has: an axis of scales that are one number, shapes."""
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        node.attributes.pop("axis", None)
    for output in node.outputs:
        output.shape = None
