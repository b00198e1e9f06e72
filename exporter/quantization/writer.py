"""Integers in a graph, in the forms that onnxruntime's CPU fuses: uint8 activations, int8 weights by channels, int32 biases."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from exporter.quantization.groups import GroupGrid
from exporter.quantization.names import free_name
from exporter.quantization.products import Product, only_reader
from exporter.quantization.quantizers import Quantizer
from symbolics.graph.scope import graph_names
from symbolics.graph.values import attr

__all__ = ["Writer"]


class Writer:
    """Writes into a graph.

    Args:
        model: The model, changed in place.
    """

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._names = graph_names(model.graph)
        self._sources: dict[ir.Value, ir.Value] = {}
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._levels: dict[tuple[Any, ...], ir.Value] = {}

    def write_product(self, product: Product) -> None:
        """Give a product a weight in integers, and a convolution a bias; what is folded into them goes."""
        node, weight = product.node, product.weight
        if weight is None:
            return
        name = (node.inputs[1].name if node.inputs[1] is not None else None) or "weight"
        zero = np.full(weight.scale.shape, weight.zero, weight.levels.dtype)
        levels, axis = weight.levels, weight.axis
        if node.op_type == "Gemm" and attr(node, "transB", 0):
            levels, axis = np.ascontiguousarray(levels.T), None if axis is None else 1 - axis
        node.replace_input_with(1, self._dequantized(name, levels, weight.scale, zero, axis, node))
        if product.bias is not None:
            scale = product.bias_scale
            steps = np.rint(product.bias.astype(np.float64) / scale).astype(np.int32)
            old = node.inputs[2].name if len(node.inputs) > 2 and node.inputs[2] is not None else None
            bias = self._dequantized(old or f"{name}/bias", steps, scale, None, 0 if scale.ndim else None, node)
            if len(node.inputs) < 3:
                node.resize_inputs(3)
            node.replace_input_with(2, bias)
        if node.op_type == "Gemm":
            self._divide_gemm(node)
        elif node.op_type == "MatMul":
            self._keep_apart(node)
        if product.last not in (None, node):
            result = product.result
            result.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
            self._sources[result] = node.outputs[0]

    def write_groups(self, node: ir.Node, grid: GroupGrid) -> None:
        """Give a matrix product a weight of 4 bits in groups; what it takes stays in float."""
        name = (node.inputs[1].name if node.inputs[1] is not None else None) or "weight"
        levels, zero = (array.astype(ml_dtypes.uint4) for array in (grid.levels, grid.zero))
        inputs = [self._held(f"{name}/levels", levels), self._held(f"{name}/scale", grid.scale), self._held(f"{name}/zero_point", zero)]
        value = self._node(
            "DequantizeLinear", inputs, f"{name}/quantized", ir.DataType.FLOAT, ir.Shape(levels.shape), before=node,
            attributes={"axis": 0, "block_size": grid.group},
        )  # fmt: skip
        node.replace_input_with(1, value)
        if node.op_type == "Gemm":
            self._divide_gemm(node)
        else:
            self._keep_apart(node)
        old = node.outputs[0]
        if any(not reader.domain and reader.op_type in ("Clip", "Identity", "Relu") for reader in old.consumers()):
            # onnxruntime takes these for a part of the product, and then for one that it has no kernel of.
            uses = list(old.uses())
            alone = self._node("Sum", [old], f"{old.name}/float", ir.DataType.FLOAT, old.shape, after=node)
            for use in uses:
                use.node.replace_input_with(use.idx, alone)

    def write_quantizer(self, quantizer: Quantizer) -> str:
        """Put QuantizeLinear and DequantizeLinear in the place of a quantiser; the name of its value."""
        grid, result = quantizer.grid, quantizer.result
        source = self._sources.get(quantizer.source, quantizer.source)
        name = result.name or "value"
        uses = list(result.uses())  # the node that makes levels may be one, later
        levels = self._quantized(source, quantizer, name)
        scale = self._held(f"{name}/scale", np.array(grid.scale, np.float32))
        zero = self._held(f"{name}/zero_point", np.array(grid.zero, np.uint8))
        after = levels.producer()
        assert after is not None
        value = self._node("DequantizeLinear", [levels, scale, zero], f"{name}/quantized", ir.DataType.FLOAT, result.shape, after=after)
        for use in uses:
            use.node.replace_input_with(use.idx, value)
        self._sources[result] = value  # of a quantiser of what is quantised
        for place, output in enumerate(self._graph.outputs):
            if output is result and result is not source:
                self._graph.outputs[place] = value
                value.name, result.name = result.name, value.name
                value.type, value.shape = result.type, result.shape
        return name

    def _quantized(self, source: ir.Value, quantizer: Quantizer, name: str) -> ir.Value:
        """The levels of a value; quantisers of one value that have the same levels share them."""
        grid = quantizer.grid
        key = (source, float(grid.scale), grid.zero, grid.low, grid.high)
        if key in self._levels:
            return self._levels[key]
        scale = self._held(f"{name}/scale", np.array(grid.scale, np.float32))
        zero = self._held(f"{name}/zero_point", np.array(grid.zero, np.uint8))
        # Right behind what makes the value: kernels are fused with what stands next to them.
        maker = source.producer()
        place: dict[str, Any] = {"after": maker} if maker is not None else {"before": next(iter(self._graph))}
        levels = self._node("QuantizeLinear", [source, scale, zero], f"{name}/levels", ir.DataType.UINT8, source.shape, **place)
        if (grid.low, grid.high) != (0, 255):
            ends = [self._held(f"{name}/{end}", np.array(level, np.uint8)) for end, level in (("low", grid.low), ("high", grid.high))]
            made = levels.producer()
            levels = self._node("Clip", [levels, *ends], f"{name}/clipped", ir.DataType.UINT8, source.shape, after=made)
        self._levels[key] = levels
        return levels

    def _dequantized(
        self, name: str, levels: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, axis: int | None, before: ir.Node
    ) -> ir.Value:
        inputs = [self._held(f"{name}/levels", levels), self._held(f"{name}/scale", scale)]
        if zero is not None:
            # One for each weight: with session.x64quantprecision, onnxruntime 1.32 makes another of each, and fails at one that it has made before.
            inputs.append(self._new(f"{name}/zero_point", zero))
        attributes = {} if axis is None else {"axis": axis}
        return self._node(
            "DequantizeLinear", inputs, f"{name}/quantized", ir.DataType.FLOAT, ir.Shape(levels.shape), before=before, attributes=attributes
        )

    def _divide_gemm(self, node: ir.Node) -> None:
        """Make of a Gemm a MatMul and a Sum: the bias stays what it was, where a Gemm in integers takes it in steps of activation times weight."""
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        node.op_type = "MatMul"
        node.attributes.clear()
        node.resize_inputs(2)
        old = node.outputs[0]
        if bias is None:
            self._keep_apart(node)
            return
        uses, given = list(old.uses()), [place for place, value in enumerate(self._graph.outputs) if value is old]
        total = self._node("Sum", [old, bias], f"{old.name}/product", ir.DataType.FLOAT, old.shape, after=node)
        for use in uses:
            use.node.replace_input_with(use.idx, total)
        for place in given:
            self._graph.outputs[place] = total
        old.name, total.name = total.name, old.name
        self._sources[old] = total

    def _keep_apart(self, node: ir.Node) -> None:
        """Write Sum for an Add behind a MatMul: of the two, onnxruntime makes a Gemm in float."""
        add = only_reader(node.outputs[0])
        if add is not None and not add.domain and add.op_type == "Add":
            add.op_type = "Sum"

    def _held(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer; equal ones are one."""
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._new(name, array)
        return self._constants[key]

    def _new(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer of its own."""
        name = self._free(name)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _node(
        self,
        op_type: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType,
        shape: ir.Shape | None,
        *,
        before: ir.Node | None = None,
        after: ir.Node | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes=attributes, name=self._free(f"{name}/{op_type}"))
        output = node.outputs[0]
        output.name, output.type, output.shape = self._free(name), ir.TensorType(dtype), shape
        if before is not None:
            self._graph.insert_before(before, node)
        elif after is not None:
            self._graph.insert_after(after, node)
        return output

    def _free(self, name: str) -> str:
        return free_name(self._names, name)
