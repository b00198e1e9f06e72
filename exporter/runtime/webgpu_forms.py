"""Forms for WebGPU: what its provider has no kernels for, by operators that it has (onnxruntime-web 1.30).

It computes in float32, float16, int32 and uint32. Of int64 it takes indices (Gather, GatherElements, ScatterND, ScatterElements) and what says shapes and
axes, which stay on the CPU's side; integers that are computed with are in int32 after `exporter.runtime.narrow`. Of booleans it takes few operators.
What is missing runs on the CPU, and a tensor goes there and back for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, fact_of, find_facts
from exporter.runtime.narrow import schema_of
from symbolics.graph.copies import function_body, inline, inline_body, replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import array_of, attr, made_by, trains
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.names import GRADIENT_DOMAIN, ROWS_DOMAIN

__all__ = [
    "batches_normalized",
    "booleans_as_numbers",
    "channels_in_fours",
    "fences_by_comparison",
    "fills_by_expand",
    "functions_written_out",
    "in_older_opset",
    "logarithms_of_softmax",
    "passes_unrolled",
    "remainders_by_division",
    "signs_by_comparisons",
    "sums_in_pairs",
]  # fmt: skip

_BOOL, _FLOAT, _I32 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32

#: Nodes of the passes of a Scan or Loop together, of which it is written pass by pass; of more it stays.
MOST_UNROLLED = 8192
#: Opset of the provider's kernels.
OPSET = 21
#: Losses, which are functions of the standard: their bodies have operators that WebGPU lacks.
_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
#: Operators that move booleans about.
_MOVES = frozenset(
    "Concat Flatten GatherElements GatherND Identity Reshape ScatterElements ScatterND Slice Split Squeeze Tile Transpose".split()
)

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional

_Write = Callable[[Emitter, ir.Node], "Sequence[ir.Value | None] | None"]


def _rewritten(model: ir.Model, found: Iterable[ir.Node], write: _Write) -> int:
    """Put what ``write`` makes of nodes in their place, one value for each output; None: the node stays. How many were written."""
    scope = Scope(free_prefix(model.graph, "form/gpu/"), lambda value: False)
    scope.opset = model.opset_imports.get("", 18)
    count = 0
    for node in list(found):
        op = Emitter(scope)
        if (values := write(op, node)) is not None:
            replace(scope, node, op.nodes, values)
            count += 1
    scope.register(model.graph)
    return count


def _standard(model: ir.Model, *op_types: str) -> list[ir.Node]:
    """The nodes of these operators that have what the standard wants of them; the others are onnxruntime's to refuse."""
    opset = model.opset_imports.get("", 18)
    return [node for node in walk(model.graph) if node.op_type in op_types and _is_sound(node, opset)]


def _is_sound(node: ir.Node, opset: int) -> bool:
    schema = schema_of(node, opset)
    if schema is None:
        return False
    needed = [value for value, formal in zip(node.inputs, schema.inputs, strict=False) if formal.option != _OPTIONAL]
    if not schema.min_input <= len(node.inputs) <= schema.max_input or None in needed:
        return False
    return len(node.outputs) <= schema.max_output and all(
        str(formal.type) == f"AttrType.{node.attributes[name].type.name}" if name in node.attributes else not formal.required
        for name, formal in schema.attributes.items()
    )


def functions_written_out(model: ir.Model) -> int:
    """Bodies in the place of calls: of the model's functions, and of the losses that are functions of the standard.

    Named gradients and rows added to rows stay: other forms know them by name.

    Returns:
        How many calls were written out.
    """
    known = {key: function for key, function in model.functions.items() if key[0] not in (GRADIENT_DOMAIN, ROWS_DOMAIN)}
    opset, count, stays = model.opset_imports.get("", 18), 0, set[ir.Node]()
    while found := [n for n in walk(model.graph) if (n.op_identifier() in known or _is_loss(n)) and n not in stays]:
        if any(map(_is_loss, found)):  # its body depends on the types of what it takes
            _say_types(model)
        scope = Scope(free_prefix(model.graph, "form/call/"), lambda value: False)
        for node in found:
            body = function_body(node, known, opset)
            if body is None:
                stays.add(node)
            else:
                replace(scope, node, *inline(scope, node, body))
                count += 1
    for key in known:
        del model.functions[key]
    used = {node.domain for part in (model.graph, *model.functions.values()) for node in walk(part)}
    for domain in {key[0] for key in known} - used:
        model.graph.opset_imports.pop(domain, None)
    return count


def _is_loss(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _LOSSES


def _say_types(model: ir.Model) -> None:
    facts: dict[ir.Value, ShapeAndType] = {}
    find_facts(model, facts)
    for node in walk(model.graph):
        for value in node.outputs:
            if value.type is None and (kind := fact_of(value, facts)[1]) is not None:
                value.type = ir.TensorType(kind)


def logarithms_of_softmax(model: ir.Model) -> int:
    """LogSoftmax as x - max - log(sum(exp(x - max))), which does not overflow.

    Returns:
        How many were written so.
    """

    def write(op: Emitter, node: ir.Node) -> list[ir.Value]:
        x, axis = node.inputs[0], op.i64([attr(node, "axis")])
        z = op.Sub(x, op.ReduceMax(x, axis, keepdims=1))
        return [op.Sub(z, op.Log(op.ReduceSum(op.Exp(z), axis, keepdims=1)))]

    return _rewritten(model, _standard(model, "LogSoftmax"), write)


def sums_in_pairs(model: ir.Model) -> int:
    """Sum and Mean of several tensors by Add.

    Returns:
        How many were written so.
    """

    def write(op: Emitter, node: ir.Node) -> list[ir.Value]:
        total = node.inputs[0]
        for value in node.inputs[1:]:
            total = op.Add(total, value)
        assert total is not None
        if node.op_type == "Mean":
            total = op.Div(total, float(len(node.inputs)))
        return [total]

    return _rewritten(model, _standard(model, "Sum", "Mean"), write)


def fills_by_expand(model: ir.Model) -> int:
    """Tensors of one number by Expand, which takes a size that is computed, in place of ConstantOfShape.

    Returns:
        How many were written so.
    """

    def write(op: Emitter, node: ir.Node) -> list[ir.Value] | None:
        value = attr(node, "value", None)
        kind, number = (_FLOAT, 0.0) if value is None else (value.dtype, value.numpy().reshape(-1)[0])
        return None if kind is ir.DataType.INT64 else [op.Expand(op.constant(number, kind), node.inputs[0])]

    return _rewritten(model, _standard(model, "ConstantOfShape"), write)


def booleans_as_numbers(model: ir.Model) -> int:
    """Booleans that are moved, or compared, as numbers 0 and 1; Or and Xor by And, Not and comparisons.

    Returns:
        How many operators were written so.
    """
    facts: dict[ir.Value, ShapeAndType] = {}
    find_facts(model, facts)

    def number(op: Emitter, value: ir.Value | None) -> ir.Value | None:
        if value is None or fact_of(value, facts)[1] is not _BOOL:
            return value
        made: ir.Value = op.Cast(value, to=_FLOAT)
        return made

    def write(op: Emitter, node: ir.Node) -> list[ir.Value] | None:
        if node.inputs[0] is None or fact_of(node.inputs[0], facts)[1] is not _BOOL:
            return None
        if node.op_type == "Or":
            return [op.Not(op.And(*(op.Not(value) for value in node.inputs)))]
        given = [number(op, value) for value in node.inputs]
        if node.op_type in ("Equal", "Xor"):
            same = op.Equal(*given)
            return [same if node.op_type == "Equal" else op.Not(same)]
        moved = op.node(node.op_type, given, outputs=len(node.outputs), **{name: each.value for name, each in node.attributes.items()})
        return [op.Cast(value, to=_BOOL) for value in ([moved] if len(node.outputs) == 1 else moved)]

    return _rewritten(model, _standard(model, "Equal", "Or", "Xor", *_MOVES), write)


def batches_normalized(model: ir.Model) -> int:
    """BatchNormalization in training by means: WebGPU claims it, and fails when it runs.

    Returns:
        How many were written so.
    """
    found = [node for node in _standard(model, "BatchNormalization") if trains(node)]
    facts: dict[ir.Value, ShapeAndType] = {}
    if found:
        find_facts(model, facts)

    def write(op: Emitter, node: ir.Node) -> list[ir.Value | None] | None:
        x, *others = node.inputs
        shape = None if x is None else fact_of(x, facts)[0]
        if x is None or shape is None or len(others) != 4:
            return None
        axes, ones = [0, *range(2, len(shape))], op.i64([1, -1, *[1] * (len(shape) - 2)])
        scale, bias = (op.Reshape(value, ones) for value in others[:2])
        mean = op.ReduceMean(x, op.i64(axes), keepdims=1)
        centred = op.Sub(x, mean)
        variance = op.ReduceMean(op.Mul(centred, centred), op.i64(axes), keepdims=1)
        deviation = op.Sqrt(op.Add(variance, op.number(attr(node, "epsilon"), x)))
        made: list[ir.Value | None] = [op.Add(op.Mul(op.Div(centred, deviation), scale), bias)]
        share = attr(node, "momentum")
        for old, batch, output in zip(others[2:], (mean, variance), node.outputs[1:], strict=False):
            flat = op.Reshape(batch, op.i64([-1]))
            old_share = op.Mul(old, op.number(share, flat)) if share else None
            new = flat if old_share is None else op.Add(old_share, op.Mul(flat, op.number(1 - share, flat)))
            made.append(new if output.uses() or output.is_graph_output() else None)
        return made

    return _rewritten(model, found, write)


def channels_in_fours(model: ir.Model) -> int:
    """Channels of zeros beside those of a Conv: of 6, 9, 15 and other multiples of 3, the kernel of onnxruntime-web 1.30 gives wrong numbers, without a word.

    It reads them three at a time where a shader reads four; outputs that are no multiple of 4, kernels of one position and 12 channels are right.

    Returns:
        How many were written so.
    """
    found = [node for node in _standard(model, "Conv") if attr(node, "group", 1) == 1]
    facts: dict[ir.Value, ShapeAndType] = {}
    if found:
        find_facts(model, facts)

    def write(op: Emitter, node: ir.Node) -> list[ir.Value | None] | None:
        x, weight, *rest = node.inputs
        shape = None if weight is None else fact_of(weight, facts)[0]
        if shape is None or len(shape) not in (3, 4):
            return None
        outputs, channels, *kernel = shape
        if type(channels) is not int or channels in (0, 3) or channels % 3 or not channels % 4:
            return None
        if (type(outputs) is int and outputs % 4) or all(size == 1 for size in kernel):
            return None
        pads = op.i64([0] * (len(shape) + 1) + [-channels % 4] + [0] * (len(shape) - 2))
        return [
            op.node("Conv", [op.Pad(x, pads), op.Pad(weight, pads), *rest], **{name: each.value for name, each in node.attributes.items()})
        ]

    return _rewritten(model, found, write)


def remainders_by_division(model: ir.Model) -> int:
    """Mod of an int32, and its neighbouring bits, by divisions: BitwiseAnd with constants that are ones and then zeros (0xFFF000).

    Returns:
        How many were written so.
    """

    def write(op: Emitter, node: ir.Node) -> list[ir.Value] | None:
        first, second = node.inputs
        if node.op_type == "Mod":
            divisor = array_of(second)
            small = divisor is not None and divisor.dtype == np.int32 and divisor.size and divisor.min() > 0 and not attr(node, "fmod")
            return [_rest(op, first, second)] if small and first is not None and second is not None else None
        masks = array_of(second)
        x, masks = (second, array_of(first)) if masks is None else (first, masks)
        if x is None or masks is None or masks.dtype != np.int32 or not masks.size or masks.min() <= 0:
            return None
        low = masks & -masks
        wide = masks.astype(np.int64) // low + 1  # 2**(number of bits)
        if np.any(wide & (wide - 1)) or wide.max() > 2**30:
            return None
        low, wide = (op.constant(numbers, _I32) for numbers in (low, wide))
        above = op.Div(op.Sub(x, _rest(op, x, low)), low)
        return [op.Mul(_rest(op, above, wide), low)]

    return _rewritten(model, _standard(model, "BitwiseAnd", "Mod"), write)


def _rest(op: Emitter, x: ir.Value, divisor: ir.Value) -> ir.Value:
    """What a division to below leaves: a division of integers here rounds to zero."""
    rest = op.Sub(x, op.Mul(op.Div(x, divisor), divisor))
    found: ir.Value = op.Where(op.Less(rest, op.constant(0, _I32)), op.Add(rest, divisor), rest)
    return found


def signs_by_comparisons(model: ir.Model) -> int:
    """Sign, and Round to the nearest and of two to the even number, by comparisons.

    Returns:
        How many were written so.
    """

    def write(op: Emitter, node: ir.Node) -> list[ir.Value] | None:
        x = node.inputs[0]
        assert x is not None
        if node.op_type == "Sign":
            return [op.Where(op.Greater(x, 0.0), op.number(1, x), op.Where(op.Less(x, 0.0), op.number(-1, x), x))]
        if x.dtype not in (_FLOAT, ir.DataType.FLOAT16):
            return None
        below = op.Floor(x)
        left = op.Sub(x, below)
        odd = op.Greater(op.Sub(below, op.Mul(op.Floor(op.Mul(below, 0.5)), 2.0)), 0.5)
        half = x.dtype.numpy().type(0.5)
        up = op.GreaterOrEqual(left, op.Where(odd, op.number(half, x), op.number(np.nextafter(half, half + half), x)))
        return [op.Add(below, op.Cast(up, to=x.dtype))]

    return _rewritten(model, _standard(model, "Sign", "Round"), write)


def fences_by_comparison(model: ir.Model) -> int:
    """IsNaN that chooses between two equal values, by Less of a value with itself: it is there for the order of the nodes.

    Who asks for the answer has it from the CPU: a graphics card may take it that there is no NaN.

    Returns:
        How many were written so.
    """

    def same(one: ir.Value | None, other: ir.Value | None) -> bool:
        known = array_of(one)
        return one is other or (known is not None and np.array_equal(known, array_of(other)))  # type: ignore[arg-type]

    def is_fence(node: ir.Node) -> bool:
        uses = list(node.outputs[0].uses())
        return all(use.idx == 0 and use.node.op_type == "Where" and same(*use.node.inputs[1:]) for use in uses) and bool(uses)

    def write(op: Emitter, node: ir.Node) -> list[ir.Value] | None:
        return [op.Less(node.inputs[0], node.inputs[0])] if is_fence(node) else None

    return _rewritten(model, _standard(model, "IsNaN"), write)


def in_older_opset(model: ir.Model) -> int:
    """The opset of most of the provider's kernels, where every operator was there, with these attributes and types: since then they take more types.

    A kernel of onnxruntime is for one version of its operator, and WebGPU's for Cos, Conv or Transpose are not for the newest.

    Returns:
        1 where the opset is another one now.
    """
    opset = model.graph.opset_imports.get("", 0)
    if opset <= OPSET or any(key[0] != ROWS_DOMAIN for key in model.functions) or not all(_was_there(node) for node in walk(model.graph)):
        return 0
    model.graph.opset_imports[""] = OPSET
    for function in model.functions.values():
        function.opset_imports[""] = OPSET
    return 1


def _was_there(node: ir.Node) -> bool:
    if node.domain != "":
        return True
    schema = schema_of(node, OPSET)
    if (
        schema is None
        or len(node.inputs) > schema.max_input
        or len(node.outputs) > schema.max_output
        or not node.attributes.keys() <= schema.attributes.keys()
    ):
        return False
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    for formal, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for place, value in enumerate(values):
            kinds = allowed.get(formal[min(place, len(formal) - 1)].type_str)
            if kinds and value is not None and value.dtype is not None and f"tensor({value.dtype.name.lower()})" not in kinds:
                return False
    return True


def passes_unrolled(model: ir.Model) -> int:
    """A Scan or Loop of a known number of passes as its passes, one after the other: WebGPU has neither.

    Returns:
        How many were written so.
    """
    facts: dict[ir.Value, ShapeAndType] = {}
    total = 0
    while True:  # those in a body come out with it
        found = [node for node in _standard(model, "Scan", "Loop") if node.graph is model.graph]
        if found:
            find_facts(model, facts)
        count = _rewritten(model, found, lambda op, node: (_scanned if node.op_type == "Scan" else _looped)(op, node, facts))
        total += count
        if not count:
            return total


def _scanned(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Value | None] | None:
    (body,) = subgraphs(node)
    scanned = attr(node, "num_scan_inputs")
    if not 0 < scanned <= len(node.inputs):
        return None
    states, inputs = list(node.inputs[: len(node.inputs) - scanned]), node.inputs[len(node.inputs) - scanned :]
    axes, backward = (list(attr(node, name, None) or [0] * scanned) for name in ("scan_input_axes", "scan_input_directions"))
    ends = len(node.outputs) - len(states)
    axes_out, backward_out = (list(attr(node, name, None) or [0] * ends) for name in ("scan_output_axes", "scan_output_directions"))
    shape = None if not inputs or inputs[0] is None else fact_of(inputs[0], facts)[0]
    length = shape[axes[0]] if shape and axes and -len(shape) <= axes[0] < len(shape) else None
    if not isinstance(length, int) or not _is_short(body, length) or len(body.inputs) != len(node.inputs):
        return None
    if (
        len(body.outputs) != len(node.outputs)
        or not len(axes) == len(backward) == scanned
        or not len(axes_out) == len(backward_out) == ends
    ):
        return None
    collected: list[list[ir.Value]] = []
    for place in range(length):
        given = [
            op.Gather(x, op.i64(length - 1 - place if back else place), axis=axis)
            for x, axis, back in zip(inputs, axes, backward, strict=True)
        ]
        results = _passed(op, body, [*states, *given])
        states[:] = results[: len(states)]
        collected.append(results[len(states) :])
    stacked = [
        _stacked(op, [each[k] for each in (collected[::-1] if back else collected)], axis)
        for k, (axis, back) in enumerate(zip(axes_out, backward_out, strict=True))
    ]
    return [*states, *stacked]


def _looped(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Value | None] | None:
    (body,) = subgraphs(node)
    if len(body.inputs) != len(node.inputs) or len(body.outputs) != len(node.outputs) + 1 or len(node.inputs) < 2:
        return None
    limit, condition, *states = node.inputs
    count, goes_on, on = array_of(limit), array_of(condition), body.outputs[0]
    source = on if (inner := made_by(on, "Identity")) is None else inner.inputs[0]
    known = array_of(source)
    always = source is body.inputs[1] or (known is not None and bool(known.all()))
    if (
        count is None
        or count.size != 1
        or not always
        or (condition is not None and (goes_on is None or not goes_on.all()))
        or not _is_short(body, count.item())
    ):
        return None
    collected: list[list[ir.Value]] = []
    for place in range(count.item()):
        _, *results = _passed(op, body, [op.i64(place), op.constant(True, _BOOL), *states])
        states[:] = results[: len(states)]
        collected.append(results[len(states) :])
    return [*states, *(_stacked(op, [each[k] for each in collected], 0) for k in range(len(node.outputs) - len(states)))]


def _is_short(body: ir.Graph, count: int) -> bool:
    return 0 < count * len(list(walk(body))) <= MOST_UNROLLED


def _passed(op: Emitter, body: ir.Graph, given: Sequence[ir.Value | None]) -> list[ir.Value]:
    """What a body gives of these inputs."""
    nodes, results = inline_body(op, body, given)  # type: ignore[arg-type]
    op.nodes += nodes
    return results


def _stacked(op: Emitter, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    made: ir.Value = op.Concat(*(op.Unsqueeze(part, op.i64([axis])) for part in parts), axis=axis)
    return made
