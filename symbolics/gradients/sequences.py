"""Sequences and optionals: tensors under another name, as long as lengths and positions are known."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, composite, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.copies import inline_body
from symbolics.graph.values import attr, check_unrolled, rank_of, unsupported

__all__: list[str] = []


gradient("Optional", "OptionalGetElement")(lambda op, g, x: g)


@composite("OptionalGetElement")
def optional_get_element(op: Builder, x: Value) -> Value | None:
    maker = x.producer()
    while maker is not None and (maker.domain, maker.op_type) == ("", "Identity") and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker.inputs[0] if maker is not None and (maker.domain, maker.op_type) == ("", "Optional") and maker.inputs else None


def _elements(op: Builder, sequence: Value | None) -> list[Value] | None:
    """The tensors of a sequence whose length and positions are known, None of any other."""
    node = None if sequence is None else sequence.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "SequenceConstruct":
        return [v for v in node.inputs if v is not None]
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SplitToSequence":
        return _split_elements(op, node)
    if node.op_type not in ("SequenceInsert", "SequenceErase", "Identity"):
        return None
    elements = _elements(op, node.inputs[0])
    if elements is None or node.op_type == "Identity":
        return elements
    new = node.inputs[1:2] if node.op_type == "SequenceInsert" else []
    given = [*node.inputs[1 + len(new) :], None][0]
    position = op.ints(given) if given is not None else [len(elements) if new else -1]
    if position is None:
        return None
    at = position[0] + len(elements) if position[0] < 0 else position[0]
    return [*elements[:at], *[v for v in new if v is not None], *elements[at + (not new) :]]


def _split_elements(op: Builder, node: ir.Node) -> list[Value] | None:
    x, split = [*node.inputs, None][:2]
    axis, lengths = attr(node, "axis"), [1] if split is None else op.ints(split)
    if lengths is None or x is None:
        return None
    if split is None or rank_of(split) == 0:  # equal parts, the last may be shorter
        size = None if x.shape is None else x.shape[axis]
        if not isinstance(size, int):
            return None
        check_unrolled(node, size // max(lengths[0], 1))
        lengths = [min(lengths[0], size - i) for i in range(0, size, lengths[0])]
    parts = op.Split(x, lengths, axis=axis, outputs=len(lengths))
    parts = [parts] if isinstance(parts, Value) else list(parts)
    return [op.Squeeze(p, [axis]) for p in parts] if split is None and not attr(node, "keepdims") else parts


@composite("SequenceAt")
def sequence_at(op: Builder, sequence: Value, position: Value) -> Value | None:
    elements, at = _elements(op, sequence), op.ints(position)
    return None if elements is None or at is None or not -len(elements) <= at[0] < len(elements) else elements[at[0]]


@composite("ConcatFromSequence")
def concat_from_sequence(op: Builder, sequence: Value, *, axis: int, new_axis: int) -> Value | None:
    elements = _elements(op, sequence)
    return op.Concat(*([op.Unsqueeze(e, [axis]) for e in elements] if new_axis else elements), axis=axis) if elements else None


@composite("SequenceMap")
def sequence_map(op: Builder, *xs: Value, body: ir.Graph) -> Sequence[Value] | None:
    """The body once for each element."""
    mapped = [_elements(op, v) or v for v in xs]
    first = mapped[0]
    if not isinstance(first, list) or any(isinstance(v, Value) and isinstance(v.type, ir.SequenceType) for v in mapped):
        return None
    results: list[list[Value | None]] = [[] for _ in body.outputs]
    for i in range(len(first)):
        nodes, made = inline_body(op, body, [each[i] if isinstance(each, list) else each for each in mapped])
        op.nodes += nodes
        for out, value in zip(results, made):
            out.append(value)
    return [op.SequenceConstruct(*out) for out in results]


@gradient("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SplitToSequence", "ConcatFromSequence")
def sequence(op: Builder, node: ir.Node, *_: Value | None) -> Grads:
    raise unsupported(node, "a sequence whose length or positions are known only at run time has no gradient")
