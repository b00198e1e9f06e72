"""If, Loop and Scan. Their backward replays the body (`symbolics.gradients.bodies`), and for Loop and Scan goes from the last iteration to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx_ir import Value

from symbolics.errors import UnsupportedOperatorError
from symbolics.gradients.bodies import (
    Iteration,
    Reader,
    Replay,
    drop_impure,
    expose,
    is_function_of_torch,
    plain_outputs,
    replay_of,
)
from symbolics.gradients.registry import Grads, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.presence import Conditions, conditions_of, gate, holds, mark, sum_of
from symbolics.graph.values import describe, is_float_tensor, may_be_float, unsupported
from symbolics.graph.walk import captured, discard, prune, reads as graph_reads, subgraphs

__all__: list[str] = []

_OF_THE_BRANCH: Conditions = frozenset([Value(name="of the branch")])


def _wanted(op: Builder, node: ir.Node) -> tuple[list[Value], list[Value]]:
    """The values that the bodies capture and that have gradients; and those that may have, for they are no tensors, or of unknown type."""
    active = [v for v in captured(node) if v in op.scope.active]
    return [v for v in active if is_float_tensor(v)], [v for v in active if may_be_float(v) and not is_float_tensor(v)]


def _check_unwanted(node: ir.Node, replay: Replay, values: Sequence[Value]) -> None:
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
    """An If of the backwards of its branches, with an output for each value that they captured and one of them gives a gradient to."""
    wanted, unsuited = _wanted(op, node)
    replays: list[Replay] = []
    for position, body in ((subgraphs(node).index(body), body) for body in (then_branch, else_branch)):
        replay = replay_of(op, position, body, {}, [(body.outputs[i], g) for i, g in _seeds(node, gs)], [*wanted, *unsuited])
        _check_unwanted(node, replay, unsuited)
        for key, value, copy in replay.impure:
            copy.replace_all_uses_with(expose(op, node, key, position, value))
        drop_impure(replay)
        replays.append(replay)
    if not is_function_of_torch(node):
        wanted = [v for v in wanted if any(v in replay.gradients for replay in replays)]
    if not wanted:
        return {}
    presences = {v: [None if is_function_of_torch(node) else replay.presence(v) for replay in replays] for v in wanted}
    known = {v: _of_branches(op, condition, found) for v, found in presences.items()}
    told = [v for v in wanted if known[v] is _OF_THE_BRANCH]
    branches: dict[str, Any] = {}
    for name, replay in zip(("then_branch", "else_branch"), replays):
        ends = [*(replay.gradient(v, v) for v in wanted), *(replay.holds(v) for v in told)]
        branches[name] = replay.graph(op.scope.name(name), [], ends)
    made = op.node("If", [condition], outputs=len(wanted) + len(told), **branches)
    results = made if isinstance(made, tuple) else (made,)
    flags = dict(zip(told, results[len(wanted) :]))
    for v, g in zip(wanted, results):
        mark(op, g, frozenset([flags[v]]) if v in flags else known[v], zeros_elsewhere=True)
    return _typed(results, wanted)


def _seeds(node: ir.Node, gs: Sequence[Value | None]) -> list[tuple[int, Value | None]]:
    """The outputs that start the backward of a branch, with their gradients; None for zeros."""
    plain = list(enumerate(gs[: plain_outputs(node)]))
    if is_function_of_torch(node):
        return [(i, g) for i, g in plain if g is not None or is_float_tensor(node.outputs[i])]
    return [(i, g) for i, g in plain if g is not None]


def _of_branches(op: Builder, condition: Value, presences: Sequence[Conditions]) -> Conditions:
    """Where the gradient of a value is there, of where it is within each branch; `_OF_THE_BRANCH` where a branch has to say it."""
    then, other = presences
    if then is None and other is None:
        return None
    if {then, other} != {None, frozenset()}:
        return _OF_THE_BRANCH
    taken = (
        condition if condition.shape is not None and not len(condition.shape) else op.Reshape(condition, op.constant([], ir.DataType.INT64))
    )
    return frozenset([taken if then is None else op.Not(taken)])


def _typed(results: Sequence[Value], values: Sequence[Value]) -> dict[Value, Value]:
    for g, v in zip(results, values):
        g.type, g.shape = v.type, v.shape
    return dict(zip(values, results))


# -------------------------------------------------------------------------------------------------------- Loop and Scan
@gradient("Loop", "Scan")
def iterate(op: Builder, gs: Sequence[Value | None], *xs: Value, node: ir.Node) -> Grads:
    """A Loop from the last iteration to the first: carries the gradients of the states, sums those of captured values.

    Where the gradient of a state is not always there, whether it is goes along: a state that nobody uses has none in the last iteration.
    """
    iteration = Iteration.of(op, node)
    targets = _targets(op, node, iteration, gs)
    turn = _turn_back(op, node, iteration, gs, targets)
    _check_unwanted(node, turn.replay, targets.unsuited)
    targets = targets.reached(turn.replay)
    carried = _carry(op, targets, turn)
    stacks = [turn.replay.gradient(r[0], turn.slots[r[0]]) for r in targets.reads]
    if not carried.ends and not stacks:
        return {}
    _tell_presence(op, targets, turn, carried)
    ends = [*carried.ends, *stacks]

    reader, replay = turn.reader, turn.replay
    for key, value, copy in replay.impure:
        copy.replace_all_uses_with(reader.read(expose(op, node, key, 0, value), 0, 0, value))
    drop_impure(replay)
    kept = Value(name=op.scope.name("go"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
    graph = replay.graph(op.scope.name("backward"), [reader.counter, kept, *(inner for inner, _ in carried.states)], [kept, *ends])
    _read_forward(op, node, iteration, turn)
    front = prune(reader.nodes, ())
    if front:
        graph.insert_before(graph[0], front)
    given = [reader.count, op.constant(True, ir.DataType.BOOL), *(outer for _, outer in carried.states)]
    out = op.node("Loop", given, outputs=len(ends), body=graph)
    results = list(out) if isinstance(out, tuple) else [out]
    for k, (_, value, axis, direction) in enumerate(targets.reads, len(carried.states)):  # stacked from the last iteration on
        results[k] = _as_read(op, results[k], value, axis, direction)
    return _of_each_value(op, targets, carried, reader.count, results)


class _Targets(NamedTuple):
    """What a backward of a Loop or a Scan may have gradients of.

    Attributes:
        states, reads: As `Iteration` has them.
        last: The gradients of the states' final values.
        wanted: Captured values.
        unsuited: What can have no gradient: no tensors, or of unknown type.
        by_torch: Whether zeros take the place of a gradient that is absent.
    """

    states: list[tuple[Value, Value, Value, int]]
    reads: list[tuple[Value, Value, int, int]]
    last: list[Value | None]
    wanted: list[Value]
    unsuited: list[Value]
    by_torch: bool

    def reached(self, replay: Replay) -> _Targets:
        """The same, without what no gradient reaches."""
        reads, wanted = ([each for each in self.reads if each[0] in replay.gradients], [v for v in self.wanted if v in replay.gradients])
        return self._replace(reads=reads, wanted=wanted)


def _targets(op: Builder, node: ir.Node, iteration: Iteration, gs: Sequence[Value | None]) -> _Targets:
    wanted, unsuited = _wanted(op, node)
    by_torch = is_function_of_torch(node)
    states = [s for s in iteration.states if _is_float_state(s)] if by_torch else _with_gradient(iteration, gs)
    open_states = [s for s in iteration.states if may_be_float(s[0]) and not _is_float_state(s)]
    for _, _, initial, index in open_states:
        if gs[index] is not None:
            raise _unsuited(node, initial)
    active = [r for r in iteration.reads if r[1] in op.scope.active]
    unsuited += [s[0] for s in open_states]
    unsuited += [r[0] for r in active if may_be_float(r[1]) and not is_float_tensor(r[1])]
    reads = [r for r in active if is_float_tensor(r[1])]
    return _Targets(states, reads, [gs[s[3]] for s in states], wanted, unsuited, by_torch)


@dataclass
class _Turn:
    """The body of a backward: an iteration, undone.

    Attributes:
        reader: Reads what the forward iteration made.
        slots: What stands in the copy for what the iteration was given.
        lasting: Of each state, whether its gradient is there in every iteration.
        flags: Of each state, whether it is there in this one.
        entering: Of each state, its gradient as it comes in.
        replay: The copy, with its backward.
    """

    reader: Reader
    slots: dict[Value, Value]
    lasting: list[bool]
    flags: list[Value]
    entering: list[Value]
    replay: Replay


def _turn_back(op: Builder, node: ir.Node, iteration: Iteration, gs: Sequence[Value | None], targets: _Targets) -> _Turn:
    by_torch = targets.by_torch
    asked = [*[s[0] for s in targets.states], *[r[0] for r in targets.reads], *targets.wanted, *targets.unsuited]
    lasting = [by_torch or (g is not None and conditions_of(op, g) is None) for g in targets.last]
    while True:
        reader = Reader(op, op.child())
        slots = {v: reader.slot(v) for v in (*iteration.entries, *[r[0] for r in iteration.reads])}
        mapping: dict[Value, Value | None] = {**slots}
        if iteration.always_true is not None:
            mapping[iteration.always_true] = op.constant(True, ir.DataType.BOOL)
        flags = [_flag(op, "is_there") for _ in targets.states]
        entering = []
        for (inner, _, initial, _), flag, always in zip(targets.states, flags, lasting):
            g = Value(name=op.scope.name("carried"), type=initial.type, shape=inner.shape or initial.shape)
            entering.append(mark(op, g, None if always else frozenset([flag]), zeros_elsewhere=True))
        seeds: list[tuple[Value, Value | None]] = [(s[1], g) for s, g in zip(targets.states, entering)]
        for result, index, axis, direction in iteration.writes:
            if (stacked := gs[index]) is not None:
                seeds.append((result, mark(op, reader.read(stacked, axis, direction, result), conditions_of(op, stacked))))
            elif by_torch and is_float_tensor(result):
                seeds.append((result, None))
        replay = replay_of(op, 0, iteration.body, mapping, seeds, asked)
        found = [always and (by_torch or replay.presence(s[0]) is None) for s, always in zip(targets.states, lasting)]
        if found == lasting:
            return _Turn(reader, slots, lasting, flags, entering, replay)
        lasting = found
        for each in (*replay.copies, *replay.inside.nodes, *reader.nodes):
            discard(each)


def _flag(op: Builder, name: str) -> Value:
    return Value(name=op.scope.name(name), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))


@dataclass
class _Carried:
    """What goes from one iteration of a backward to the next.

    Attributes:
        states: (value of the body, what it is at first).
        ends: What each becomes.
        told: A state, a read or a captured value -> the place among these of whether its gradient is there once the loop is over.
        after_one: Those whose gradient is there once an iteration ran.
    """

    states: list[tuple[Value, Value]]
    ends: list[Value]
    told: dict[Value, int] = field(default_factory=dict)
    after_one: set[Value] = field(default_factory=set)

    def tell(self, of: Value, flag: Value, first: Value, end: Value) -> None:
        """Carry along whether a gradient is there."""
        self.told[of] = len(self.states)
        self.states.append((flag, first))
        self.ends.append(end)


def _carry(op: Builder, targets: _Targets, turn: _Turn) -> _Carried:
    replay, inside = turn.replay, turn.replay.inside
    states = [(v, op.zeros_like(s[2]) if g is None else gate(op, g)) for s, v, g in zip(targets.states, turn.entering, targets.last)]
    ends = [replay.gradient(s[0], v) for s, v in zip(targets.states, turn.entering)]
    for value in targets.wanted:
        total = Value(name=op.scope.name("total"), type=value.type, shape=value.shape)
        states.append((total, op.zeros_like(value)))
        ends.append(inside.Add(total, gate(inside, replay.gradients[value])))
    return _Carried(states, ends)


def _tell_presence(op: Builder, targets: _Targets, turn: _Turn, carried: _Carried) -> None:
    """Let the loop say which gradients are there once it is over: of a state what its flag says, of others whether any iteration had it."""
    replay, never = turn.replay, op.constant(False, ir.DataType.BOOL)
    others = [*targets.wanted, *[r[0] for r in targets.reads]]
    read = {flag for value in (*[s[0] for s in targets.states], *others) for flag in replay.presence(value) or ()}
    for (inner, *_), flag, always, given in zip(targets.states, turn.flags, turn.lasting, targets.last):
        if always:
            continue
        if given is None and replay.presence(inner) is None:
            carried.after_one.add(inner)
        if inner not in carried.after_one or flag in read or flag.uses():
            carried.tell(inner, flag, never if given is None else holds(op, conditions_of(op, given)), replay.holds(inner))
    if targets.by_torch:
        return
    for value in others:
        if replay.presence(value) is not None:
            flag = _flag(op, "was_there")
            carried.tell(value, flag, never, replay.inside.Or(flag, replay.holds(value)))
        elif value in targets.wanted:
            carried.after_one.add(value)


def _read_forward(op: Builder, node: ir.Node, iteration: Iteration, turn: _Turn) -> None:
    """Let each backward iteration read what its forward one was given, and find out how many there are."""
    reader, slots = turn.reader, turn.slots
    stacks = [(inner, outer, axis, direction) for inner, outer, axis, direction in iteration.reads if slots[inner].uses()]
    for i, value in enumerate(iteration.entries):
        if slots[value].uses():
            stacks.append((value, expose(op, node, ("entry", i), 0, value), 0, 0))
    for inner, outer, axis, direction in stacks:
        slots[inner].replace_all_uses_with(reader.read(outer, axis, direction, inner))
    if reader.count is None:  # nothing is read: any stack tells how often
        if iteration.reads:
            _, stack, axis, _ = iteration.reads[0]
        else:
            end = len(iteration.entries) - 1
            stack, axis = expose(op, node, ("entry", end), 0, iteration.entries[end]), 0
        reader.count = op.Squeeze(op.Shape(stack, start=axis, end=axis + 1 or None), [0])


def _of_each_value(op: Builder, targets: _Targets, carried: _Carried, count: Value | None, results: Sequence[Value]) -> dict[Value, Value]:
    """The gradient of each value outside, of the results of a backward of so many iterations: one value may start several states."""
    values = [(s[0], s[2]) for s in targets.states] + [(v, v) for v in targets.wanted] + [r[:2] for r in targets.reads]
    gradients = [*results[: len(targets.states) + len(targets.wanted)], *results[len(carried.states) :]]
    runs = op.const(count)
    parts: dict[Value, list[Value]] = {}
    for (inner, value), g in zip(values, gradients):
        if inner in carried.after_one:
            if runs is None or not runs:
                mark(op, g, frozenset([op.Greater(count, 0)]), zeros_elsewhere=True)
        elif inner in carried.told:
            mark(op, g, frozenset([results[carried.told[inner]]]), zeros_elsewhere=True)
        g.type, g.shape = value.type, value.shape
        parts.setdefault(value, []).append(g)
    return {value: found[0] if len(found) == 1 else sum_of(op, found, value) for value, found in parts.items()}


def _is_float_state(state: tuple[Value, Value, Value, int]) -> bool:
    return is_float_tensor(state[0]) or is_float_tensor(state[2])


def _with_gradient(iteration: Iteration, gs: Sequence[Value | None]) -> list[tuple[Value, Value, Value, int]]:
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
