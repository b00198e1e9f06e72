"""What a graph hands out behind a Reshape, handed out before it.

Within a session a Reshape is free: its result lies where what it reads lies. As an output of the graph it is a copy. The gradient for the
weights of a convolution is such an output, of a product: nine megabytes for 512 x 512 x 3 x 3, where the copy takes half as long as the product.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, fact_of, fixed_shape
from symbolics.graph.values import fixed_array, made_by, name_of

__all__ = ["before_reshape", "hand_out_as_made"]

_FEW_ELEMENTS = 2**12  # of fewer, the copy costs less than to look at the result in another shape
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}


def before_reshape(value: ir.Value, facts: Mapping[ir.Value, ShapeAndType]) -> ir.Value | None:
    """What a Reshape makes a value of; None where nothing does, where sizes are not known, and where a session would gain nothing.

    Args:
        value: Of a graph.
        facts: Shapes and element types of values that do not say it themselves.
    """
    reshape = made_by(value, "Reshape")
    source, given = reshape.inputs if reshape is not None and len(reshape.inputs) == 2 else (None, None)
    if source is None or source.producer() is None or source.is_graph_output():
        return None
    sizes, made, kinds = fixed_shape(value, facts), fixed_shape(source, facts), {fact_of(v, facts)[1] for v in (value, source)}
    if sizes is None or made is None or len(kinds) != 1 or not kinds <= _FLOATS or not _says(given, sizes):
        return None
    return source if math.prod(sizes) == math.prod(made) >= _FEW_ELEMENTS else None


def _says(given: ir.Value | None, sizes: tuple[int, ...]) -> bool:
    """Whether what a Reshape is given means these sizes: what a file says of its result may be wrong."""
    array = fixed_array(given)
    if array is None or array.shape != (len(sizes),):
        return False
    listed = array.tolist()
    return listed.count(-1) <= 1 and all(size in (-1, known) for size, known in zip(listed, sizes, strict=True))


def hand_out_as_made(model: ir.Model, facts: Mapping[ir.Value, ShapeAndType]) -> dict[str, tuple[int, ...]]:
    """Let a graph hand out what Reshapes read in the place of what they make, under the same names.

    Args:
        model: Changed.
        facts: As `before_reshape` has it.

    Returns:
        name of an output -> the shape that it had.
    """
    graph = model.graph
    had: dict[str, tuple[int, ...]] = {}
    times = Counter(graph.outputs)
    for place, output in enumerate(list(graph.outputs)):
        source, shape, kind = before_reshape(output, facts), fixed_shape(output, facts), fact_of(output, facts)[1]
        if source is None or shape is None or kind is None or times[output] > 1:
            continue
        reshape = output.producer()
        source.type, source.shape = ir.TensorType(kind), ir.Shape(fixed_shape(source, facts) or ())
        had[name_of(output)] = shape
        source.name, output.name = output.name, source.name
        graph.outputs[place] = source
        if reshape is not None and not output.uses():
            graph.remove(reshape, safe=True)
    return had
