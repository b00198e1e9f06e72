"""If, Loop and Scan. Their backward replays the body, and for Loop and Scan goes from the last iteration to the first.

Only pure nodes are replayed. What draws random numbers or calls Python (`_is_impure`) ran once, in the forward: its outputs
leave the body as further outputs of the forward node (`_expose`), stacked by iteration, and the backward reads those.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.errors import UnsupportedOperatorError
from symbolics.gradients.registry import Grads, gradient
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.copies import clone_nodes
from symbolics.graph.values import (
    RANDOM,
    attr,
    describe,
    is_float_tensor,
    is_python_op,
    is_python_op_tangent,
    may_be_float,
    static_shape,
    unsupported,
)
from symbolics.graph.walk import captured, prune, reads as graph_reads, subgraphs
from symbolics.node.backward import is_backward
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP_GRAD

__all__ = ["EXPOSED", "OWN_BACKWARD"]

EXPOSED = "pythonop.exposed"  # node.meta: key -> index of the output that carries it
OWN_BACKWARD = "pythonop.backward"  # node.meta: the rule of a Scan that was written together with its backward


# ------------------------------------------------------------------------------------------------- what runs only once
def _is_impure(op: Builder, node: ir.Node) -> bool:
    """Whether running the node again could give something else, or do something twice."""
    if (
        is_python_op(node)
        or is_backward(node)
        or is_python_op_tangent(node)
        or (node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP_GRAD)
    ):
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
                        _expose(op, node, (b, i, o), b, out)
    if node.op_type in ("Loop", "Scan"):
        for i, value in enumerate(_Iteration.of(op, node).entries):
            _expose(op, node, ("entry", i), 0, value)


def _expose(op: Builder, node: ir.Node, key: Hashable, branch: int, value: Value) -> Value:
    """The output of a control flow node that carries a value of its body; for Loop and Scan one per iteration, stacked."""
    known: dict[Hashable, int] = node.meta.get(EXPOSED, {})
    if key in known:
        return node.outputs[known[key]]
    if not isinstance(value.type, ir.TensorType):
        raise unsupported(node, f"its backward needs {value.name!r} of each iteration, which is no tensor")
    bodies, shape = subgraphs(node), static_shape(value)
    for b, body in enumerate(bodies):
        inside = op.child()
        if b != branch:  # the branch not taken has to give something, in a loop of the same shape
            nothing = inside.i64(0) if shape is None else inside.zeros(shape, ir.DataType.INT64)
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
    else:
        out.shape = None if shape is None else ir.Shape(shape)
    if node.op_type == "Scan":
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].value, 0])
    node.meta[EXPOSED] = {**known, key: len(node.outputs) - 1}
    return out


def _plain(node: ir.Node) -> int:
    """The number of outputs before anything was exposed."""
    return min(node.meta.get(EXPOSED, {None: len(node.outputs)}).values())


# --------------------------------------------------------------------------------------------------------------- replay
@dataclass
class _Replay:
    """A copy of a body with its backward behind it, in ``inside``."""

    inside: Builder
    copies: list[ir.Node]
    gradients: dict[Value, Value]
    impure: list[tuple[Hashable, Value, Value]] = field(default_factory=list)  # key, value of the body, its copy

    def graph(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> ir.Graph:
        ends = []
        made = {o for n in (*self.copies, *self.inside.nodes) for o in n.outputs}
        for v in outputs:  # each output is made in the body, and once
            ends.append(v if v in made and v not in ends else self.inside.Identity(v))
        return ir.Graph(inputs, ends, nodes=prune([*self.copies, *self.inside.nodes], ends), name=name)


def _replay(
    op: Builder,
    branch: int,
    body: ir.Graph,
    mapping: dict[Value, Value | None],
    seeds: Sequence[tuple[Value, Value]],
    targets: Sequence[Value],
) -> _Replay:
    """Copy a body and differentiate the copy: seeds and targets are values of the body, or captured ones."""
    originals = list(body)
    for n in originals:
        if _is_impure(op, n):
            _complete(op, n)
    copies = clone_nodes(op.scope, originals, mapping)
    inside = op.child()
    summed: dict[Value, Value] = {}
    for value, g in seeds:
        copied = mapping.get(value) or value
        summed[copied] = inside.Add(summed[copied], g) if copied in summed else g
    copied_targets = [mapping.get(t) or t for t in targets]
    gradients = op.scope.backward(inside, copies, summed, copied_targets)
    replay = _Replay(inside, copies, {t: gradients[c] for t, c in zip(targets, copied_targets) if c in gradients})
    for i, (n, copy) in enumerate(zip(originals, copies)):
        if _is_impure(op, n):
            replay.impure += [((branch, i, o), v, c) for o, (v, c) in enumerate(zip(n.outputs, copy.outputs)) if c.uses()]
    return replay


def _drop_impure(replay: _Replay) -> None:
    """Remove the copies of impure nodes; what read their outputs reads something else by now."""
    for copy in {maker: None for _, _, c in replay.impure if (maker := c.producer()) is not None}:
        for i in range(len(copy.inputs)):
            copy.replace_input_with(i, None)
        replay.copies.remove(copy)


def _wanted(op: Builder, node: ir.Node) -> tuple[list[Value], list[Value]]:
    """The values that the bodies capture and that have gradients; and those that may have, for they are no tensors, or of unknown type."""
    active = [v for v in captured(node) if v in op.scope.active]
    return [v for v in active if is_float_tensor(v)], [v for v in active if may_be_float(v) and not is_float_tensor(v)]


def _check_unwanted(node: ir.Node, replay: _Replay, values: Sequence[Value]) -> None:
    """Refuse a gradient of what cannot be carried from iteration to iteration, or has no zeros for the other branch.

    Raises:
        UnsupportedOperatorError: The value is no tensor, or of unknown type; it names the node that made it.
    """
    for value in values:
        if value in replay.gradients:
            raise _unsuited(node, value)


def _unsuited(node: ir.Node, value: Value) -> UnsupportedOperatorError:
    maker, what = value.producer(), "is no tensor" if value.type else "is of unknown type: add it to the value_info of the file"
    made = f", which {describe(maker)} makes," if maker is not None and maker is not node else ""
    return unsupported(node, f"its backward needs a gradient of {value.name!r}{made} and that {what}")


# ------------------------------------------------------------------------------------------------------------------- If
@gradient("If")
def if_(op: Builder, gs: Sequence[Value | None], condition: Value, *, node: ir.Node, then_branch: ir.Graph, else_branch: ir.Graph) -> Grads:
    """An If of the backwards of its branches, with an output for each value that they captured."""
    wanted, unsuited = _wanted(op, node)
    live = list(enumerate(gs[: _plain(node)]))
    branches: dict[str, Any] = {}
    for name, body in (("then_branch", then_branch), ("else_branch", else_branch)):
        position = subgraphs(node).index(body)
        replay = _replay(op, position, body, {}, [(body.outputs[i], g) for i, g in live if g is not None], [*wanted, *unsuited])
        _check_unwanted(node, replay, unsuited)
        for key, value, copy in replay.impure:
            copy.replace_all_uses_with(_expose(op, node, key, position, value))
        _drop_impure(replay)
        ends = [replay.gradients.get(v) or replay.inside.zeros_like(v) for v in wanted]
        ends = [replay.inside.Cast(g, to=v.dtype) for g, v in zip(ends, wanted)]
        branches[name] = replay.graph(op.scope.name(name), [], ends)
    if not wanted:
        return {}
    results = op.node("If", [condition], outputs=len(wanted), **branches)
    return _typed(results if isinstance(results, tuple) else (results,), wanted)


def _typed(results: Sequence[Value], values: Sequence[Value]) -> dict[Value, Value]:
    for g, v in zip(results, values):
        g.type, g.shape = v.type, v.shape
    return dict(zip(values, results))


# -------------------------------------------------------------------------------------------------------- Loop and Scan
@dataclass
class _Iteration:
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
    def of(cls, op: Builder, node: ir.Node) -> _Iteration:
        body, plain = attr(node, "body"), _plain(node)
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


class _Reader:
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


@gradient("Loop", "Scan")
def iterate(op: Builder, gs: Sequence[Value | None], *xs: Value, node: ir.Node) -> Grads:
    """A Loop from the last iteration to the first: carries the gradients of the states, sums those of captured values."""
    if OWN_BACKWARD in node.meta:
        return node.meta[OWN_BACKWARD](op, node, gs)
    iteration = _Iteration.of(op, node)
    wanted, unsuited = _wanted(op, node)
    states = _with_gradient(iteration, gs)
    reads = [r for r in iteration.reads if r[1] in op.scope.active and is_float_tensor(r[1])]
    open_states = [s for s in iteration.states if may_be_float(s[0]) and not _is_float_state(s)]
    for _, _, initial, index in open_states:
        if gs[index] is not None:
            raise _unsuited(node, initial)
    unsuited += [s[0] for s in open_states]
    unsuited += [r[0] for r in iteration.reads if r[1] in op.scope.active and may_be_float(r[1]) and not is_float_tensor(r[1])]
    reader = _Reader(op, op.child())
    slots = {v: reader.slot(v) for v in (*iteration.entries, *[r[0] for r in iteration.reads])}
    mapping: dict[Value, Value | None] = {**slots}
    if iteration.always_true is not None:
        mapping[iteration.always_true] = op.constant(True, ir.DataType.BOOL)

    seeds, carried = [], []
    for inner, result, initial, index in states:
        g = Value(name=op.scope.name("carried"), type=initial.type, shape=inner.shape or initial.shape)
        carried.append((g, g_last if (g_last := gs[index]) is not None else op.zeros_like(initial)))
        seeds.append((result, g))
    for result, index, axis, direction in iteration.writes:
        if (stacked := gs[index]) is not None:
            seeds.append((result, reader.read(stacked, axis, direction, result)))
    targets = [*[s[0] for s in states], *[r[0] for r in reads], *wanted]
    replay = _replay(op, 0, iteration.body, mapping, seeds, [*targets, *unsuited])
    _check_unwanted(node, replay, unsuited)
    inside = replay.inside
    wanted = [value for value in wanted if value in replay.gradients]
    reads = [read for read in reads if read[0] in replay.gradients]

    def gradient_of(value: Value, like: Value) -> Value:
        g = replay.gradients.get(value)
        return inside.zeros_like(like) if g is None else inside.Cast(g, to=like.dtype)

    ends = [gradient_of(s[0], g) for s, (g, _) in zip(states, carried)]
    for value in wanted:
        total = Value(name=op.scope.name("total"), type=value.type, shape=value.shape)
        carried.append((total, op.zeros_like(value)))
        ends.append(inside.Add(total, replay.gradients[value]) if value in replay.gradients else total)
    ends += [gradient_of(r[0], slots[r[0]]) for r in reads]
    if not ends:
        return {}

    for key, value, copy in replay.impure:
        copy.replace_all_uses_with(reader.read(_expose(op, node, key, 0, value), 0, 0, value))
    _drop_impure(replay)
    kept = Value(name=op.scope.name("go"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
    graph = replay.graph(op.scope.name("backward"), [reader.counter, kept, *[g for g, _ in carried]], [kept, *ends])
    stacks = [(inner, outer, axis, direction) for inner, outer, axis, direction in iteration.reads if slots[inner].uses()]
    for i, value in enumerate(iteration.entries):
        if slots[value].uses():
            stacks.append((value, _expose(op, node, ("entry", i), 0, value), 0, 0))
    for inner, outer, axis, direction in stacks:
        slots[inner].replace_all_uses_with(reader.read(outer, axis, direction, inner))
    if reader.count is None:  # nothing is read: any stack tells how often
        if iteration.reads:
            _, stack, axis, _ = iteration.reads[0]
        else:
            last = len(iteration.entries) - 1
            stack, axis = _expose(op, node, ("entry", last), 0, iteration.entries[last]), 0
        reader.count = op.Squeeze(op.Shape(stack, start=axis, end=axis + 1 or None), [0])
    front = prune(reader.nodes, ())
    if front:
        graph.insert_before(graph[0], front)
    out = op.node("Loop", [reader.count, op.constant(True, ir.DataType.BOOL), *[v for _, v in carried]], outputs=len(ends), body=graph)
    results = list(out) if isinstance(out, tuple) else [out]
    for k, (_, value, axis, direction) in enumerate(reads, len(carried)):  # stacked from the last iteration on
        results[k] = _as_read(op, results[k], value, axis, direction)
    values = [*[s[2] for s in states], *wanted, *[r[1] for r in reads]]
    summed: dict[Value, Value] = {}
    for value, g in zip(values, results):  # one value may start several states
        g.type, g.shape = value.type, value.shape
        summed[value] = op.Add(summed[value], g) if value in summed else g
    return summed


def _is_float_state(state: tuple[Value, Value, Value, int]) -> bool:
    return is_float_tensor(state[0]) or is_float_tensor(state[2])


def _with_gradient(iteration: _Iteration, gs: Sequence[Value | None]) -> list[tuple[Value, Value, Value, int]]:
    """The states that may get a gradient: from behind the loop, or within it from what has one. Those that nobody uses have none."""
    states = [s for s in iteration.states if _is_float_state(s)]
    makers = {value: node for node in iteration.body for value in node.outputs}
    reached: set[Value] = set()
    todo = [w[0] for w in iteration.writes if gs[w[1]] is not None] + [s[1] for s in states if gs[s[3]] is not None]
    while todo:
        value = todo.pop()
        if value in reached:
            continue
        reached.add(value)
        if (maker := makers.get(value)) is not None:
            todo += graph_reads(maker)
        todo += [s[1] for s in states if s[0] is value]
    return [s for s in states if gs[s[3]] is not None or s[0] in reached]


def _as_read(op: Builder, stack: Value, value: Value, axis: int, direction: int) -> Value:
    """A stack of gradients in the order and along the axis in which the forward read its slices."""
    if not direction:
        smallest = -(2**63) + 1
        stack = op.Slice(stack, [-1], [smallest], [0], [-1])
    rank = None if value.shape is None else len(value.shape)
    if axis and rank:
        perm = list(range(1, rank))
        perm.insert(axis % rank, 0)
        stack = op.Transpose(stack, perm=perm)
    stack.type = value.type
    return stack
