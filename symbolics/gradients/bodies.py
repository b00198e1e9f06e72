"""Bodies of If, Loop and Scan, copied for a backward.

Only pure nodes are replayed. What draws random numbers or calls Python (`_is_impure`) ran once, in the forward: its outputs
leave the body as further outputs of the forward node (`expose`), stacked by iteration, and the backward reads those.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.copies import clone_nodes
from symbolics.graph.presence import Conditions, conditions_of, gate, holds, sum_of
from symbolics.graph.values import RANDOM, attr, is_python_op, is_python_op_tangent, unsupported
from symbolics.graph.walk import captured, prune, subgraphs
from symbolics.node.backward import is_backward, is_python_op_grad

__all__ = [
    "EXPOSED",
    "OWN_RULE",
    "Iteration",
    "Reader",
    "Replay",
    "drop_impure",
    "expose",
    "is_function_of_torch",
    "plain_outputs",
    "replay_of",
]

EXPOSED = "pythonop.exposed"  # node.meta: key -> index of the output that carries it
OWN_RULE = "pythonop.rule"  # node.meta: the rule of a call of a named function that was written together with its backward


def is_function_of_torch(node: ir.Node) -> bool:
    """Whether a node is torch.cond, while_loop or scan: in eager mode each is one Function, whose backward takes zeros for what is absent."""
    return "torch.ops.higher_order." in node.metadata_props.get("pkg.torch.onnx.fx_node", "")


# ------------------------------------------------------------------------------------------------- what runs only once
def _is_impure(op: Builder, node: ir.Node) -> bool:
    """Whether running the node again could give something else, or do something twice."""
    if is_python_op(node) or is_backward(node) or is_python_op_tangent(node) or is_python_op_grad(node):
        return True
    if node.domain == "" and node.op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        known = op.const(mode)
        return mode is not None and (known is None or bool(known.any()))
    if node.domain == "" and node.op_type in RANDOM:
        return True
    return any(_is_impure(op, n) for graph in subgraphs(node) for n in graph)


def _complete(op: Builder, node: ir.Node) -> None:
    """Let an impure node make all that its rule will read."""
    if node.op_type == "Dropout":
        residual(op, node, 1, "mask", ir.DataType.BOOL, node.outputs[0].shape)
    if is_python_op(node):
        residual(op, node, 0, "context", ir.DataType.INT64, ir.Shape(()))
    if subgraphs(node):
        _prepare(op, node)


def _prepare(op: Builder, node: ir.Node) -> None:
    """Expose all that a backward could need of a node that cannot be replayed within an outer body."""
    for b, body in enumerate(subgraphs(node)):
        for i, n in enumerate(list(body)):
            if _is_impure(op, n):
                _complete(op, n)
                for o, out in enumerate(n.outputs):
                    if out.name:
                        expose(op, node, (b, i, o), b, out)
    if node.op_type in ("Loop", "Scan"):
        for i, value in enumerate(Iteration.of(op, node).entries):
            expose(op, node, ("entry", i), 0, value)


def expose(op: Builder, node: ir.Node, key: Hashable, branch: int, value: Value) -> Value:
    """The output of a control flow node that carries a value of its body; for Loop and Scan one per iteration, stacked."""
    known: dict[Hashable, int] = node.meta.get(EXPOSED, {})
    if key in known:
        return node.outputs[known[key]]
    if not isinstance(value.type, ir.TensorType):
        raise unsupported(node, f"its backward needs {value.name!r} of each iteration, which is no tensor")
    bodies, beside = subgraphs(node), captured(node)
    for b, body in enumerate(bodies):
        inside = op.child()
        if b != branch:  # the branch not taken has to give something, in a loop of the same shape
            sizes = _sizes(inside, value, beside)
            nothing = inside.i64(0) if sizes is None else inside.zeros(sizes, ir.DataType.INT64)
            leaf = inside.Cast(inside.Identity(nothing), to=value.dtype)
        else:
            maker = value.producer()
            leaf = inside.Identity(value) if maker is None or maker.graph is not body or value.is_graph_output() else value
        leaf.type = value.type
        body.extend(inside.nodes)
        body.outputs.append(leaf)
    node.resize_outputs(len(node.outputs) + 1)
    out = node.outputs[-1]
    out.name = op.scope.residual_name(value.name or "exposed", node)
    out.type = value.type
    stacked = node.op_type in ("Loop", "Scan")
    if stacked:
        out.shape = None if value.shape is None else ir.Shape([None, *value.shape])
    elif _sizes(op.child(), value, beside) is not None:
        out.shape = value.shape
    if node.op_type == "Scan":
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].value, 0])
    node.meta[EXPOSED] = {**known, key: len(node.outputs) - 1}
    return out


def _sizes(inside: Builder, value: Value, beside: Sequence[Value]) -> Value | list[int] | None:
    """The shape of a value by what stands beside it; None where a size is not to be had.

    An open size is that of the same name, or else that of the same place in a value whose known sizes are equal. That may be another one, and is harmless:
    onnxruntime refuses iterations of different shapes, and nobody reads the numbers.
    """
    if value.shape is None:
        return None
    alike = [v for v in beside if v.shape is not None and _may_equal(v.shape, value.shape)]
    dims: list[int | Value] = []
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, int):
            dims.append(dim)
            continue
        named = [(v, i) for v in beside for i, d in enumerate(v.shape or ()) if d == dim and dim.value is not None]
        places = [*named, *((v, axis) for v in alike)]
        if not places:
            return None
        dims.append(inside.dim(*places[0]))
    numbers = [d for d in dims if isinstance(d, int)]
    return numbers if len(numbers) == len(dims) else inside.vector(dims)


def _may_equal(shape: ir.Shape, other: ir.Shape) -> bool:
    return len(shape) == len(other) and all(
        isinstance(a, int) == isinstance(b, int) and (a == b or not isinstance(a, int)) for a, b in zip(shape, other)
    )


def plain_outputs(node: ir.Node) -> int:
    """The number of outputs before anything was exposed."""
    return min(node.meta.get(EXPOSED, {None: len(node.outputs)}).values())


# --------------------------------------------------------------------------------------------------------------- replay
@dataclass
class Replay:
    """A copy of a body with its backward behind it, in ``inside``."""

    inside: Builder
    copies: list[ir.Node]
    gradients: dict[Value, Value]
    impure: list[tuple[Hashable, Value, Value]] = field(default_factory=list)  # key, value of the body, its copy

    def presence(self, value: Value) -> Conditions:
        """Where the gradient of a value is there: nowhere, where no condition is."""
        g = self.gradients.get(value)
        return frozenset() if g is None else conditions_of(self.inside, g)

    def holds(self, value: Value) -> Value:
        """Whether it is there, as a boolean scalar."""
        return holds(self.inside, self.presence(value))

    def gradient(self, value: Value, like: Value) -> Value:
        """The gradient of a value in the type of another, zeros where it is not there."""
        g = self.gradients.get(value)
        return self.inside.zeros_like(like) if g is None else self.inside.Cast(gate(self.inside, g), to=like.dtype)

    def graph(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> ir.Graph:
        """The copy with its backward as a body, which makes each output once."""
        ends = []
        made = {o for n in (*self.copies, *self.inside.nodes) for o in n.outputs}
        for v in outputs:
            ends.append(v if v in made and v not in ends else self.inside.Identity(v))
        return ir.Graph(inputs, ends, nodes=prune([*self.copies, *self.inside.nodes], ends), name=name)


def replay_of(
    op: Builder,
    branch: int,
    body: ir.Graph,
    mapping: dict[Value, Value | None],
    seeds: Sequence[tuple[Value, Value | None]],
    targets: Sequence[Value],
) -> Replay:
    """Copy a body and differentiate the copy: seeds and targets are values of the body, or captured ones; a seed that is None is zeros."""
    originals = list(body)
    for n in originals:
        if _is_impure(op, n):
            _complete(op, n)
    copies = clone_nodes(op.scope, originals, mapping)
    inside = op.child()
    parts: dict[Value, list[Value]] = {}
    for value, g in seeds:
        copied = mapping.get(value) or value
        parts.setdefault(copied, []).append(inside.zeros_like(copied) if g is None else g)
    summed = {value: gs[0] if len(gs) == 1 else sum_of(inside, gs, value) for value, gs in parts.items()}
    copied_targets = [mapping.get(t) or t for t in targets]
    gradients = op.scope.backward(inside, copies, summed, copied_targets)
    replay = Replay(inside, copies, {t: gradients[c] for t, c in zip(targets, copied_targets) if c in gradients})
    for i, (n, copy) in enumerate(zip(originals, copies)):
        if _is_impure(op, n):
            replay.impure += [((branch, i, o), v, c) for o, (v, c) in enumerate(zip(n.outputs, copy.outputs)) if c.uses()]
    return replay


def drop_impure(replay: Replay) -> None:
    """Remove the copies of impure nodes; what read their outputs reads something else by now."""
    for copy in {maker: None for _, _, c in replay.impure if (maker := c.producer()) is not None}:
        for i in range(len(copy.inputs)):
            copy.replace_input_with(i, None)
        replay.copies.remove(copy)


# ----------------------------------------------------------------------------------------------------- Loop and Scan alike
@dataclass
class Iteration:
    """Loop and Scan alike.

    Attributes:
        entries: Body inputs that the backward can only read where they are exposed: the states, and Loop's counter.
        states: (body input, body output, initial value, index of the final value) of each state.
        reads: (body input, value, axis, direction) of each scanned input.
        writes: (body output, index of the output, axis, direction) of each scanned output.
    """

    body: ir.Graph
    entries: list[Value]
    states: list[tuple[Value, Value, Value, int]]
    reads: list[tuple[Value, Value, int, int]]
    writes: list[tuple[Value, int, int, int]]
    always_true: Value | None = None

    def __post_init__(self) -> None:
        together = [*(s[:3] for s in self.states), *(r[:2] for r in self.reads)]
        for values in ([v for v in group if v is not None] for group in together):  # what one of them is, all are
            kind = next((v.type for v in values if v.type is not None), None)
            for v in values:
                v.type = v.type or kind

    @classmethod
    def of(cls, op: Builder, node: ir.Node) -> Iteration:
        """What a Loop or a Scan iterates over."""
        body, plain = attr(node, "body"), plain_outputs(node)
        given: Any = node.inputs  # a Loop's first two may be missing
        if node.op_type == "Loop":
            count, condition, *states = body.inputs
            n = len(states)
            carried = list(zip(states, body.outputs[1 : n + 1], given[2:], range(n)))
            writes = [(body.outputs[i + 1], i, 0, 0) for i in range(n, plain)]
            return cls(body, [*states, count], carried, [], writes, condition)
        m = attr(node, "num_scan_inputs")
        n = len(given) - m
        axes, directions = attr(node, "scan_input_axes") or [0] * m, attr(node, "scan_input_directions") or [0] * m
        out_axes, out_directions = (
            attr(node, "scan_output_axes") or [0] * (plain - n),
            attr(node, "scan_output_directions") or [0] * (plain - n),
        )
        carried = list(zip(body.inputs[:n], body.outputs[:n], given[:n], range(n)))
        reads = list(zip(body.inputs[n:], given[n:], axes, directions))
        writes = [(body.outputs[i], i, out_axes[i - n], out_directions[i - n]) for i in range(n, plain)]
        return cls(body, list(body.inputs[:n]), carried, reads, writes)


class Reader:
    """What a backward iteration reads: slices of stacked values, at the place of the forward iteration it undoes."""

    def __init__(self, op: Builder, inside: Builder) -> None:
        self.op, self.inside = op, inside
        self.counter = Value(name=op.scope.name("iteration"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
        self.count: Value | None = None  # of iterations
        self._index: Value | None = None
        self._backwards: Value | None = None
        self.nodes: list[ir.Node] = []

    def slot(self, like: Value) -> Value:
        """A stand-in in the copy of the body, for a slice that may turn out to be read."""
        return Value(name=self.op.scope.name(like.name or "slice"), type=like.type, shape=like.shape)

    def read(self, stack: Value, axis: int, direction: int, like: Value) -> Value:
        """The slice of this iteration."""
        if self.count is None:
            size = self.op.dim(stack, axis) if stack.shape is not None else self.op.Shape(stack, start=axis, end=axis + 1 or None)
            self.count = self.op.i64(size) if isinstance(size, int) else self.op.Squeeze(size, [0])
        if self._index is None:  # a scalar, also where an evaluator counts in vectors of one element
            self._index = self._emit("Reshape", self.counter, self.op.constant([], ir.DataType.INT64))
        if direction:  # written from the end: the last iteration is at 0
            index = self._index
        else:
            if self._backwards is None:
                self._backwards = self._emit("Sub", self.op.Sub(self.count, self.op.i64(1)), self._index)
            index = self._backwards
        out = self._emit("Gather", stack, index, axis=axis)
        out.type, out.shape = like.type, like.shape
        return out

    def _emit(self, op_type: str, *inputs: Value, **attributes: Any) -> Value:
        """A node in front of the body."""
        scope = self.inside.child()
        out = scope.node(op_type, inputs, **attributes)
        self.nodes += scope.nodes
        return out
