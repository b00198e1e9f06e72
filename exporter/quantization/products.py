"""Convolutions and matrix products: which of them can run in integers, and why the others cannot."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from exporter.quantization.evaluation import Constants, nodes_between
from exporter.quantization.grids import WeightGrid, finer, fit_weight
from exporter.quantization.groups import GroupGrid, fit_groups
from exporter.quantization.quantizers import ELEMENTWISE, Missed, Quantizer
from symbolics.graph.values import attr
from symbolics.graph.walk import subgraphs, walk

__all__ = [
    "MOVES",
    "NO_QUANTIZER",
    "OF_FLOAT32",
    "STATISTICS",
    "UNQUANTIZED",
    "Product",
    "find_products",
    "group_weights",
    "only_reader",
    "products_in_bodies",
    "sources_of",
    "weights_of",
]

_PRODUCTS = {"Conv", "Gemm", "MatMul"}
_FEWEST_AXES = {"Conv": 3, "Gemm": 2, "MatMul": 1}  # of a weight
#: What has a weight, and no integer kernel in onnxruntime's CPU.
_FLOAT = {"ConvTranspose", "GRU", "LSTM", "RNN"}
#: What moves numbers and computes none: levels stay levels.
MOVES = {"Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
#: Why a weight of another type is none.
OF_FLOAT32 = "integers are made of float32 models alone, model.float()"
_LARGEST = 2**31 - 1
#: Reasons that other modules ask for: of what a product takes (what is there in its place follows), of what it gives, of training mode.
NO_QUANTIZER = "no quantiser gives what it takes"
STATISTICS = "the batch normalization behind it computes statistics: export in eval mode"
UNQUANTIZED = "no quantiser takes what it gives, or something else takes it, too"


@dataclass(eq=False)
class Product:
    """A product of the model.

    Attributes:
        node: Its node.
        operator: What that was in the model.
        weight: Its weight on its grid; None where it has none, or two activations are multiplied.
        inputs: The quantiser behind each activation that it takes.
        bias: What a convolution adds, by channels.
        last: The node that gives what weight and bias come to: itself, or the last of the normalizations and factors behind it that they hold.
        moved: The share of what it gives that the rounding of its bias to int32 moves by a level, about.
        reason: Why it stays in float, "" where nothing stands in the way.
        groups: Its weight of 4 bits in groups, where only that is in integers.
    """

    node: ir.Node
    operator: str
    weight: WeightGrid | None
    inputs: list[Quantizer]
    bias: np.ndarray | None = None
    last: ir.Node | None = None
    moved: float = 0.0
    reason: str = ""
    groups: GroupGrid | None = None

    @property
    def result(self) -> ir.Value:
        """What it gives, what is folded into it included."""
        return (self.last or self.node).outputs[0]

    @property
    def bias_scale(self) -> np.ndarray:
        """The step of a bias in int32: that of the activation times that of the weight."""
        assert self.weight is not None
        return (self.inputs[0].grid.scale * self.weight.scale).astype(np.float32)


def weights_of(model: ir.Model, constants: Constants) -> dict[ir.Node, WeightGrid | str]:
    """The weight of each product that has one, as integers, or why it is none."""
    found: dict[ir.Node, WeightGrid | str] = {}
    for node in model.graph:
        if node.domain or node.op_type not in _PRODUCTS or (value := node.inputs[1]) is None or value not in constants:
            continue
        weight = constants.array(value)
        axis = 0 if node.op_type == "Conv" or attr(node, "transB", 0) else 1 if weight.ndim == 2 else None
        if weight.ndim < _FEWEST_AXES[node.op_type]:
            found[node] = f"its weight has {weight.ndim} axes"
        elif weight.dtype != np.float32:
            found[node] = f"its weight is {weight.dtype}: {OF_FLOAT32}"
        else:
            found[node] = fit_weight(weight, axis, constants.behind(value))
    return found


def _folded(product: Product, constants: Constants, steps: Container[ir.Value]) -> str:
    """Put normalizations, factors and terms of channels behind a convolution into its weight and bias; why that cannot be, "" where it can or there are none."""
    node, grid = product.node, product.weight
    assert grid is not None
    channels = grid.levels.shape[0]
    factor, term = np.ones(channels), np.zeros(channels) if product.bias is None else product.bias.astype(np.float64)
    last = node
    while last.outputs[0] not in steps and (reader := only_reader(last.outputs[0])) is not None:
        step = _affine(reader, last.outputs[0], constants, channels, grid.levels.ndim)
        if step is None:
            break
        if isinstance(step, str):
            return step
        factor, term = factor * step[0], term * step[0] + step[1]
        last = reader
    if last is node:
        return ""
    folded = _scaled(grid, factor)
    if folded is None:
        return "what is folded into its weight turns the sign of a level that int8 does not hold then"
    product.weight, product.last, product.bias = folded, last, term.astype(np.float32)
    return ""


def _affine(
    node: ir.Node, value: ir.Value, constants: Constants, channels: int, rank: int
) -> tuple[np.ndarray | float, np.ndarray | float] | str | None:
    """Factor and term of what a node computes of a value, by channels; None where it computes something else, or why it cannot be folded."""
    if node.domain:
        return None
    if node.op_type == "BatchNormalization":
        values = [each for each in node.inputs[1:] if each is not None and each in constants]
        if len(values) != 4 or attr(node, "training_mode", 0):
            return STATISTICS
        gamma, beta, mean, var = (array.astype(np.float64) for array in constants.arrays(values))
        factor = gamma / np.sqrt(var + attr(node, "epsilon", 1e-5))
        return factor, beta - mean * factor
    if node.op_type not in ("Add", "Div", "Mul", "Sub"):
        return None
    first = node.inputs[0] is value
    other = node.inputs[1 if first else 0]
    if other is None or other not in constants or (node.op_type == "Div" and not first):
        return None
    array = constants.array(other).astype(np.float64)
    shape = (1,) * (rank - array.ndim) + array.shape
    if len(shape) > rank or any(size != 1 and (i != 1 or size != channels) for i, size in enumerate(shape)):
        return None
    array = array.reshape(-1)
    if node.op_type in ("Mul", "Div"):
        return (array if node.op_type == "Mul" else 1 / array), 0.0
    return (1.0 if first or node.op_type == "Add" else -1.0), array if (first and node.op_type == "Add") or not first else -array


def _scaled(grid: WeightGrid, factor: np.ndarray) -> WeightGrid | None:
    """A weight times a factor for each channel of axis 0; None where int8 cannot hold it."""
    if grid.zero:
        return None
    signs = np.where(factor < 0, -1, 1).reshape(-1, *[1] * (grid.levels.ndim - 1))
    levels = grid.levels.astype(np.int64) * signs
    scale = np.abs(grid.scale.astype(np.float64) * factor).astype(np.float32)
    if levels.max() > 127 or levels.min() < -128 or not np.isfinite(scale).all():
        return None
    dead = scale == 0  # a channel that is switched off
    levels[dead] = 0
    return WeightGrid(levels.astype(np.int8), np.where(dead, np.float32(1), scale), 0, 0)


def sources_of(value: ir.Value | None, results: Mapping[ir.Value, Quantizer]) -> Iterator[ir.Value]:
    """The values from which one comes without being computed anew, itself first, up to what a quantiser gives."""
    while value is not None:
        yield value
        node = value.producer()
        if value in results or node is None or node.domain or node.op_type not in MOVES:
            return
        value = node.inputs[0]


def find_products(
    model: ir.Model,
    constants: Constants,
    weights: Mapping[ir.Node, WeightGrid | str],
    quantizers: list[Quantizer],
    missed: Iterable[Missed],
) -> list[Product]:
    """The products of a model, and what stands in the way of integers."""
    results = {each.result: each for each in quantizers}
    steps = {each.source: each for each in quantizers}
    reasons = {each.step: each.reason for each in missed} | {each.step: each.beyond for each in quantizers if each.beyond}
    found = []
    for node in model.graph:
        if node.domain or node.op_type not in _PRODUCTS | _FLOAT:
            continue
        weight = weights.get(node)
        values = [list(sources_of(each, results))[-1] for each in node.inputs[: 1 if weight is not None else 2] if each is not None]
        for value in values:
            if (derived := _derived(value, results)) is not None:
                results[value] = derived
                quantizers.append(derived)
        product = Product(
            node, node.op_type, weight if isinstance(weight, WeightGrid) else None, [results[value] for value in values if value in results]
        )
        if node.op_type in _FLOAT:
            product.reason = f"onnxruntime's CPU has no integer kernel for {node.op_type}"
        elif isinstance(weight, str):
            product.reason = weight
        elif (other := next((each for each in values if each not in results), None)) is not None:
            product.reason = f"{NO_QUANTIZER}: {_instead(other, constants, reasons)}"
        else:
            product.reason = _reason(product, constants, steps)
        found.append(product)
    return found


def products_in_bodies(model: ir.Model) -> Iterator[Product]:
    """The products in bodies of Scan, Loop and If: no quantiser is looked for there, and they stay in float."""
    for node in model.graph:
        for inner in (inner for body in subgraphs(node) for inner in walk(body)):
            if not inner.domain and inner.op_type in _PRODUCTS | _FLOAT:
                yield Product(inner, inner.op_type, None, [], reason=f"it is in the body of {node.op_type} {node.name}")


def group_weights(products: Iterable[Product], constants: Constants, group: int | None) -> None:
    """Give the matrix products that stay in float weights of 4 bits in groups, where they have weights of their own.

    Args:
        products: The products, changed in place.
        constants: The constants of the model.
        group: The size of a group, None: what fits.
    """
    for product in products:
        node, value = product.node, product.node.inputs[1]
        if not product.reason or node.op_type not in ("Gemm", "MatMul") or value is None or value not in constants:
            continue
        if _scales(node):
            product.reason = _SCALES
            continue
        weight = constants.array(value)
        if weight.dtype != np.float32 or weight.ndim != 2 or not weight.size or not np.isfinite(weight).all():
            continue
        product.groups = fit_groups(weight.T if node.op_type == "Gemm" and attr(node, "transB", 0) else weight, group)
        product.reason = ""


_SCALES = "it scales or transposes what it takes: alpha, beta, transA"


def _scales(node: ir.Node) -> bool:
    """Whether a Gemm does more than to multiply and add."""
    return node.op_type == "Gemm" and (attr(node, "alpha", 1.0) != 1.0 or attr(node, "beta", 1.0) != 1.0 or bool(attr(node, "transA", 0)))


def _instead(value: ir.Value, constants: Constants, reasons: Mapping[ir.Node, str]) -> str:
    """What gives a value that comes of no quantiser: what rounds on the way to it, and is none, if there is such a node."""
    todo, seen = [value], {value}
    while todo:
        maker = todo.pop(0).producer()
        if maker in reasons and maker is not None:
            return f"{maker.op_type} {maker.name}: {reasons[maker]}"
        if maker is not None and not maker.domain and maker.op_type in ELEMENTWISE | MOVES:
            before = [each for each in maker.inputs if each is not None and each not in seen]
            seen.update(before)
            todo += before
    maker = value.producer()
    if value in constants:
        return "it is a constant, and the first operand"
    return "it is an input of the model" if maker is None else f"it comes of {maker.op_type} {maker.name}"


def _reason(product: Product, constants: Constants, steps: Mapping[ir.Value, Quantizer]) -> str:
    """Why a product stays in float, "" where nothing stands in the way; its bias and normalization are looked up on the way."""
    node = product.node
    if _scales(node):
        return _SCALES
    if product.weight is None:
        return "" if node.op_type == "MatMul" else "its weight is computed by the model"
    if node.op_type != "Conv":
        return ""
    if len(node.inputs) > 2 and (value := node.inputs[2]) is not None:
        if value not in constants:
            return "its bias is computed by the model"
        product.bias = constants.array(value).reshape(-1)
    if why := _folded(product, constants, steps):
        return why
    if product.bias is not None:
        product.weight = finer(product.weight)
        if np.abs(np.rint(product.bias.astype(np.float64) / product.bias_scale)).max() > _LARGEST:
            return "its bias is too large for int32 in steps of the activation times the weight"
    behind = _quantized_by(product.result, steps)
    if not behind:
        norms = [each for each in node.outputs[0].consumers() if each.op_type == "BatchNormalization" and attr(each, "training_mode", 0)]
        return STATISTICS if norms else UNQUANTIZED
    if product.bias is not None:
        bias = product.bias.astype(np.float64)
        product.moved = float(np.abs(np.rint(bias / product.bias_scale) * product.bias_scale - bias).mean() / behind)
    return ""


def _derived(value: ir.Value, results: Mapping[ir.Value, Quantizer]) -> Quantizer | None:
    """A quantiser of what is on a grid already: of a Concat, that of all that it joins; of a Relu, the one before it from 0.0 on."""
    node = value.producer()
    if value in results or node is None or node.domain or node.op_type not in ("Concat", "Relu"):
        return None
    found = []
    for each in node.inputs:
        source = list(sources_of(each, results))[-1]
        found.append(results.get(source) or _derived(source, results))
    first = found[0]
    if first is None or any(one is None or (one.grid.scale, one.grid.zero) != (first.grid.scale, first.grid.zero) for one in found):
        return None
    low, high = (end(getattr(one.grid, name) for one in found if one is not None) for end, name in ((min, "low"), (max, "high")))
    if node.op_type == "Relu":
        source = first.source if node.inputs[0] is first.result else value
        return Quantizer(source, value, replace(first.grid, low=max(low, first.grid.zero)), node)
    return Quantizer(value, value, replace(first.grid, low=low, high=high, floats=0, moved=0), node)


def _quantized_by(value: ir.Value, steps: Mapping[ir.Value, Quantizer]) -> float:
    """The step of the quantiser that takes a value, where nothing else does; 0.0 where there is none."""
    while value not in steps:
        reader = only_reader(value)
        if reader is None or reader.domain or reader.op_type not in {*MOVES, "Relu"}:
            return 0.0
        value = reader.outputs[0]
    inside = set(nodes_between([value], [steps[value].result]))
    alone = not value.is_graph_output() and all(reader in inside for reader in value.consumers())
    return float(steps[value].grid.scale) if alone else 0.0


def only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads a value, None where several do, or it is an output of the model."""
    readers = value.consumers()
    return next(iter(readers)) if len(readers) == 1 and not value.is_graph_output() else None
