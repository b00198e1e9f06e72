"""Which values the forward keeps for the backward, and which are computed again: less memory for more time."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from exporter.gradient_graph.costs import Kind, Sizes, is_fused, is_operand, is_product, kind_of, seconds_as_bytes
from exporter.gradient_graph.min_cut import UNCUT, Network
from exporter.gradient_graph.partition import ancestors
from symbolics.errors import ArgumentError
from symbolics.graph.builder import Builder
from symbolics.graph.copies import clone_nodes
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import is_float, made_by, name_of, trains
from symbolics.graph.walk import discard, reads, walk
from symbolics.node.metadata import pairing_of, results_of
from symbolics.users import warn

__all__ = ["Recompute", "checked", "recompute"]

#: None: keep all that the backward reads. "auto": compute again what is cheap. A number: keep so many bytes at most.
Recompute = Literal["auto"] | int | None

_SMALL = 256  # bytes: sizes and counters are kept
_AUTO = 1 / 32  # a byte that is not kept is worth as much as 32 that memory moves to compute it again
_UNIT = 1024  # of the network's integers, for a byte
_TRIES, _CLOSE = 16, 0.97
_EARLIER = 0.1  # of equal blocks the first ones are computed again first: their backward runs last, when most is freed


def checked(given: Any) -> Recompute:
    """The argument ``recompute`` of a public function.

    Raises:
        ArgumentError: It is neither None, "auto" nor a number of bytes.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "auto":
        return "auto"
    try:
        if isinstance(given, (bool, str)) or (most := operator.index(given)) < 0:
            raise TypeError
    except TypeError:
        raise ArgumentError(
            f'recompute is {given!r}: give None (keep all that the backward reads), "auto" (compute again what is cheap), or how many bytes '
            "the forward may keep, 0 or more, as an int"
        ) from None
    return most


def recompute(
    model: ir.Model,
    choice: Literal["auto"] | int,
    example: Mapping[str, Sequence[int]],
    extra: Iterable[str] = (),
    *,
    late: bool,
    views: bool = False,
) -> None:
    """Let the gradient graph compute values of the forward again, in place.

    The nodes that compute them are copied, and the gradient graph reads the copies; the values that they start from are kept. Which
    ones, a cheapest cut between forward and backward says, as in torch's partitioner (torch._functorch.partitioners.solve_min_cut): an
    edge through each value has its bytes as capacity, an edge from the source to each node what the node costs, and those from values
    to their readers cannot be cut. What must not run twice is behind such an edge, too: calls of Functions and of anything that is
    not standard ONNX, random draws and dropout's masks, control flow. So is a light node that reads a value behind a heavy one that
    reads it as well (torch's ban_if_used_far_apart), as the sum of a residual connection: without that, all blocks would be computed
    again at once, from the first one's input.

    * "auto" bans what torch bans: results of products, convolutions, recurrences and reductions are kept.
    * A limit bans nothing more. Costs count ``x`` times, the largest power ``x`` whose cut keeps no more than the limit: bytes kept +
      x * cost is the Lagrangian of the knapsack (H. Everett, Operations Research 11, 1963).

    Args:
        model: A training graph, without marks.
        choice: What `checked` returned.
        example: Shapes of inputs, for `Sizes`.
        extra: Values of the forward that something beside the gradient graph reads.
        late: Both run as one graph: the copies wait for the gradient at which they are read, so that they run behind it.
        views: The graph is for onnxruntime's CPU alone: what parts nodes may move nothing.

    Warns:
        PythonopWarning: More than the limit has to stay.
    """
    graph = _Parts.of(model, extra)
    found = _Choice(model, graph, Sizes(model, example), light=choice == "auto")
    again = found.cut(_AUTO) if choice == "auto" else found.below(choice)
    if again:
        _Copies(model, graph, again, set(found.needed), late, views).write()


@dataclass(frozen=True)
class _Parts:
    """The nodes of a training graph.

    Attributes:
        nodes: All, in order.
        forward: Those that the model's outputs depend on.
        idle: Those that only gradients depend on, and that depend on no cotangent.
        backward: The others.
        moved: The cotangents, and what depends on one.
        loss: The first output that has a cotangent.
    """

    nodes: list[ir.Node]
    forward: set[ir.Node]
    idle: set[ir.Node]
    backward: list[ir.Node]
    moved: set[ir.Value]
    loss: ir.Value

    @classmethod
    def of(cls, model: ir.Model, extra: Iterable[str]) -> _Parts:
        pairing = pairing_of(model)
        assert pairing is not None
        nodes = list(model.graph)
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        gradients = set(pairing.outputs.values())
        forward = ancestors(nodes, [*(v for v in results_of(model) if name_of(v) not in gradients), *(values[name] for name in extra)])
        moved = {values[name] for name in pairing.inputs.values()}
        backward = []
        for node in nodes:
            if node not in forward and any(value in moved for value in reads(node)):
                moved.update(node.outputs)
                backward.append(node)
        idle = set(nodes) - forward - set(backward)
        return cls(nodes, forward, idle, backward, moved, values[next(iter(pairing.inputs))])


class _Choice:
    """The network of a training graph: which values of the forward are computed again, by what a cut says.

    Args:
        light: Only what is light may run again.
    """

    def __init__(self, model: ir.Model, parts: _Parts, sizes: Sizes, *, light: bool) -> None:
        self.parts = parts
        self.sizes = sizes
        self.needed = dict.fromkeys(
            value for node in parts.nodes if node not in parts.forward for value in reads(node) if value.producer() in parts.forward
        )
        self.order = {node: place for place, node in enumerate(parts.nodes)}
        kinds = {node: kind_of(node, model.functions) for node in parts.forward}
        allowed = (Kind.LIGHT,) if light else (Kind.LIGHT, Kind.HEAVY)
        far = self._far_apart(kinds)
        self.costs = {
            node: seconds_as_bytes(node, sizes) * (1 + _EARLIER * self.order[node] / len(self.order))
            for node in parts.forward
            if kinds[node] in allowed and node not in far and not any(_is_computed(read.producer(), node) for read in reads(node))
        }

    def _far_apart(self, kinds: Mapping[ir.Node, Kind]) -> set[ir.Node]:
        """Readers of a value behind a node that is not light and that the same value leads to."""
        found: set[ir.Node] = set()
        for node in self.parts.nodes:
            for value in node.outputs if node in self.parts.forward else ():
                readers = {user for user in value.consumers() if user in self.parts.forward}
                if len(readers) > 1:
                    last = max(map(self.order.__getitem__, readers))
                    heavy = self._first_heavy(readers, last, kinds)
                    found |= {user for user in readers if self.order[user] > heavy}
        return found

    def _first_heavy(self, start: Iterable[ir.Node], last: int, kinds: Mapping[ir.Node, Kind]) -> int:
        waiting = [self.order[node] for node in start]
        seen = set(waiting)
        heapq.heapify(waiting)
        while waiting:
            node = self.parts.nodes[place := heapq.heappop(waiting)]
            if kinds.get(node) is not Kind.LIGHT:
                return place
            for user in (user for value in node.outputs for user in value.consumers()):
                if user in self.parts.forward and (after := self.order[user]) <= last and after not in seen:
                    seen.add(after)
                    heapq.heappush(waiting, after)
        return last

    def _may(self, value: ir.Value) -> bool:
        """Whether a value may be computed again. Of a BatchNormalization that trains, the statistics may not: they count."""
        maker = value.producer()
        return maker in self.costs and (self.sizes.bytes(value) > _SMALL or _is_copy(value)) and not (trains(maker) and value.index())

    def cut(self, price: float) -> set[ir.Value]:
        """The values that are computed again where a node costs so many times its cost."""
        network = Network()
        add, into, out = network.add, "into", "out"
        for value in self.needed:
            add((out, value), network.SINK, UNCUT)
        waiting, seen = list(self.needed), set(self.needed)
        while waiting:
            value = waiting.pop()
            maker = value.producer()
            hidden = value not in self.needed and maker is not None and is_product(maker) and len(value.uses()) == 1
            add((into, value), (out, value), UNCUT if hidden else _UNIT * max(1, self.sizes.bytes(value)))
            if maker is None or not self._may(value):
                add(network.SOURCE, (into, value), UNCUT)
                continue
            add(network.SOURCE, (into, value), 1 + int(_UNIT * price * self.costs[maker]))
            own = maker.inputs[3:5] if trains(maker) else ()
            for read in reads(maker):
                if read.producer() is None:
                    continue  # inputs and state are there
                add((into if read in own or is_operand(read.producer(), maker) else out, read), (into, value), UNCUT)
                if read not in seen:
                    seen.add(read)
                    waiting.append(read)
        behind = network.sink_side()
        return self._read_again(lambda value: (into, value) in behind)[0]

    def _read_again(self, again: Any) -> tuple[set[ir.Value], set[ir.Value]]:
        """Of what the backward needs, the values that are computed again and those that are kept."""
        computed: set[ir.Value] = set()
        kept: set[ir.Value] = set()
        waiting = list(self.needed)
        while waiting:
            value = waiting.pop()
            if value in computed or value in kept or (maker := value.producer()) is None:
                continue
            if again(value):
                computed.add(value)
                waiting += reads(maker)
            else:
                kept.add(value)
        return computed, kept

    def kept(self, again: Collection[ir.Value]) -> int:
        """The bytes that are kept where these values are computed again."""
        return sum(map(self.sizes.bytes, self._read_again(again.__contains__)[1]))

    def below(self, limit: int) -> set[ir.Value]:
        """The values that are computed again so that no more than ``limit`` bytes are kept."""
        low, high = -16.0, 16.0
        best = self.cut(2**low)
        if (least := self.kept(best)) > limit:
            warn(
                f"recompute={limit} bytes: {least} stay, of results that must not run twice and of what passes by a product or convolution. "
                'Give that or more, or "auto"'
            )
            return best
        for _ in range(_TRIES):
            middle = (low + high) / 2
            found = self.cut(2**middle)
            if (kept := self.kept(found)) <= limit:
                best, low = found, middle
                if kept >= _CLOSE * limit:
                    break
            else:
                high = middle
        return best


def _is_computed(node: ir.Node | None, product: ir.Node) -> bool:
    """Whether an operand that becomes a part of the product (`is_operand`) is made of what the forward computes, not of a parameter."""
    return node is not None and is_operand(node, product) and any(read.producer() is not None for read in reads(node))


def _is_copy(value: ir.Value) -> bool:
    """Whether a value is the copy of a statistic that a BatchNormalization writes over, or a part of the condition that keeps it a copy."""
    return any(trains(user) and value in user.inputs[3:5] for user in value.consumers())


# What runtimes can subtract, and what large values are made of.
_SUBTRACTED = frozenset(ir.DataType[kind] for kind in "FLOAT DOUBLE FLOAT16 BFLOAT16 INT32 INT64".split())
# onnxruntime makes one Reshape of several, one after the other, where it knows the dims that come out, and forgets what the others wait for.
_RESHAPES = frozenset(["Reshape", "Squeeze", "Unsqueeze"])


class _Copies:
    """Copies of the nodes that run again, each in front of the first node of the gradient graph that reads what it makes.

    Three things keep them what they are while a runtime optimizes. All subtract a zero, which a Where has taken from two zeros by whether an element
    of a gradient is NaN: no optimizer knows what it does (of an Add, runtimes know too much: they fuse it). It stands in values and never in shapes: OpenVINO makes wrong numbers of
    shapes that depend on data. With ``views`` it is a Reshape to the shape that a value has, [0, 0, ...], of zeros chosen so: onnxruntime's
    CPU copies nothing then, and fuses nothing that it did not fuse before.

    * In a graph that runs as one (``late``), what the copies start from passes through one: they run behind that gradient, and are not
      found to be equal to the forward's nodes.
    * What the gradients read of a copy passes through one: it is not fused with its reader, which would round differently.
    * What the forward reads of a value that is not kept any more passes through one, too, by an element of an input of the model.

    Args:
        read: What the gradient graph read of the forward.
    """

    def __init__(self, model: ir.Model, parts: _Parts, again: set[ir.Value], read: set[ir.Value], late: bool, views: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.parts = parts
        self.late, self.views = late, views
        self.op = Builder(Scope(free_prefix(self.graph, "again/"), lambda value: False))
        self.op.scope.opset = model.opset_imports[""]
        self.again = again | self._idle() if late else again
        self.order = {node: place for place, node in enumerate(parts.nodes)}
        self.fenced = {value for value in again if value in read and is_float(value)}
        self.copies: dict[ir.Value, ir.Value | None] = {}
        self._known: dict[tuple[ir.Value, Any], ir.Value] = {}
        self._last: dict[ir.Value, ir.Node] = {}
        self._data = self._from_forward() if late else set(parts.moved)

    def _idle(self) -> set[ir.Value]:
        """Values of the forward's that only gradients read, and that could be computed any time: onnxruntime may do it early."""
        found: set[ir.Value] = set()
        made = {value for node in self.parts.forward for value in node.outputs}
        for node in self.parts.nodes:
            if node in self.parts.idle and any(value in made for value in reads(node)):
                made.update(node.outputs)
                if node.op_type != "Transpose" and kind_of(node, self.model.functions) is not Kind.NEVER and not trains(node):
                    found.update(node.outputs)  # a Transpose becomes a part of the product that reads it, as `is_operand` has it
        return found

    def _from_forward(self) -> set[ir.Value]:
        """Gradients that wait for the forward: the others are constants to an optimizer."""
        found: set[ir.Value] = {value for node in self.parts.forward for value in node.outputs}
        for node in self.parts.nodes:
            if any(value in found for value in reads(node)):
                found.update(node.outputs)
        return found & {value for node in self.parts.backward for value in node.outputs}

    def write(self) -> None:
        """Write the copies, and let the gradient graph read them."""
        makers = [node for node in self.parts.nodes if any(value in self.again for value in node.outputs)]
        idle = self.parts.idle.difference(makers)  # in a part of their own they run behind the forward anyway
        readers = {*self.parts.backward, *idle}
        within = {inner: node for node in readers for inner in walk([node])}
        first: dict[ir.Node, int] = {}
        passing = {*makers, *(idle if self.late else ())}
        for node in reversed(self.parts.nodes):
            if node in passing:
                read = [value for value in node.outputs if value in self.again or node in idle]
                users = {within.get(user, user) for value in read for user in value.consumers()}
                places = [first[user] if user in first else self.order[user] for user in users if user in first or user in readers]
                if places:
                    first[node] = min(places)
        for node in makers:
            if node in first:
                self._copy(node, self.parts.nodes[first[node]])
        for value, copy in self.copies.items():
            for user, place in [use for use in value.uses() if use[0] in within]:
                # By the gradient that this reader takes itself: another one may come from another output.
                one = user.op_type in _RESHAPES or (self.late and is_operand(value.producer(), user))
                parted = copy is not None and value in self.fenced and not one
                gradient = self._gradient(within[user]) or self._cotangent() if parted else None
                user.replace_input_with(place, copy if copy is None or gradient is None else self._behind(gradient, copy))
        for node in reversed(self.parts.nodes):
            if node in self.parts.idle and not any(value.uses() or value.is_graph_output() for value in node.outputs):
                discard(node)
                self.graph.remove(node)
        if (start := self._input()) is not None:
            self._part_forward(start)
        self.op.scope.register(self.graph)
        self.graph.sort()

    def _input(self) -> ir.Value | None:
        """An input of the model that is a number; a parameter where there is none."""
        values = (*self.graph.inputs, *self.graph.initializers.values())
        known = (v for v in values if v not in self.parts.moved and v.dtype is not None and v.dtype is not ir.DataType.STRING)
        return next((v for v in known if v.is_graph_input() or is_float(v)), None)

    def _part_forward(self, start: ir.Value) -> None:
        """What the forward itself reads of values that were given out."""
        forward = {inner for node in self.parts.forward for inner in walk([node])}
        for value in sorted(self.fenced, key=self._place):
            maker = value.producer()
            users = [(user, place) for user, place in value.uses() if user in forward and (is_fused(user) or user.op_type == "Relu")]
            for user, place in users if maker is not None and is_fused(maker) else ():
                if not is_operand(maker, user):
                    user.replace_input_with(place, self._behind(start, value))

    def _first(self, value: ir.Value) -> ir.Value:
        """The first element as a vector, of none where there is none."""
        op = self.op
        return op.raw("Slice", [op.raw("Reshape", [value, op.i64([-1])]), op.i64([0]), op.i64([1])])

    def _copy(self, node: ir.Node, before: ir.Node) -> None:
        mapping = {value: self.copies[value] for value in reads(node) if value in self.copies}
        gradient = self._gradient(before) or self.parts.loss if self.late else None
        if gradient is not None:
            data = reads(node)[:1] if node.op_type in _RESHAPES else reads(node)
            starts = [value for value in dict.fromkeys(data) if value not in mapping and value.producer() is not None]
            if not starts and not mapping:
                starts = [value for value in data if not value.is_initializer()][:1] or data[:1]
            for value in starts:
                if made_by(value, "Constant") is None:
                    mapping[value] = self._behind(gradient, value)
        copies = clone_nodes(self.op.scope, [node], mapping)
        self.graph.insert_before(before, copies)
        self.copies.update((value, mapping[value]) for value in node.outputs if value in self.again)

    def _gradient(self, node: ir.Node) -> ir.Value | None:
        """The last gradient that a node reads; None where it reads none, or none that waits for the forward."""
        found = [value for value in reads(node) if value in self._data and is_float(value)]
        return max(found, key=self._place, default=None)

    def _cotangent(self) -> ir.Value | None:
        """Of a gradient graph that runs behind the forward, a cotangent: for a node that reads no gradient, as a transposition does."""
        return None if self.late else next((value for value in self.graph.inputs if value in self.parts.moved and is_float(value)), None)

    def _place(self, value: ir.Value) -> int:
        maker = value.producer()
        return -1 if maker is None else self.order.get(maker, -1)

    def _behind(self, gradient: ir.Value, value: ir.Value) -> ir.Value:
        """The same value, once there is a gradient."""
        if self.views and value.shape is not None:
            shape = self._shape(gradient, len(value.shape))
            view = self._made(gradient, value, lambda op: op.raw("Reshape", [value, shape]), value)
            view.shape = ir.Shape([None] * len(value.shape))  # its rank alone
            return view
        if value.dtype is ir.DataType.BOOL:
            return self._made(gradient, value, lambda op: op.raw("And", [value, op.raw("Not", [self._flag(gradient)])]), value)
        if value.dtype not in _SUBTRACTED:
            return value
        zero = self._zero(gradient, value.dtype)
        return self._made(gradient, value, lambda op: op.raw("Sub", [value, zero]), value)

    def _shape(self, gradient: ir.Value, rank: int) -> ir.Value:
        same, flag = self.op.i64([0] * rank), self._flag(gradient)
        return self._made(gradient, rank, lambda op: op.raw("Where", [flag, same, same]), same)

    def _zero(self, gradient: ir.Value, dtype: ir.DataType) -> ir.Value:
        def write(op: Builder) -> ir.Value:
            zero = op.raw("Where", [flag, op.constant(0, ir.DataType.FLOAT), op.constant(0, ir.DataType.FLOAT)])
            return zero if dtype is ir.DataType.FLOAT else op.raw("Cast", [zero], to=dtype)

        flag = self._flag(gradient)
        return self._made(gradient, dtype, write, None)

    def _flag(self, gradient: ir.Value) -> ir.Value:
        """Whether the first element of a gradient is NaN: a bool, False of an empty one."""

        def write(op: Builder) -> ir.Value:
            first = self._first(gradient)
            if gradient.dtype is not ir.DataType.FLOAT:
                first = op.raw("Cast", [first], to=ir.DataType.FLOAT)
            return op.raw("IsNaN", [op.raw("ReduceSum", [first], keepdims=0)])

        return self._made(gradient, "flag", write, None)

    def _made(self, gradient: ir.Value, what: Any, write: Callable[[Builder], ir.Value], like: ir.Value | None) -> ir.Value:
        """What is written once for a gradient, behind the node that makes it and what was written before."""
        if (gradient, what) not in self._known:
            found = write(self.op)
            if like is not None:
                found.type, found.shape = like.type, like.shape and like.shape.copy()
            self._known[gradient, what] = found
            last = self._last.get(gradient) or gradient.producer()
            if last is None:  # a cotangent
                self.graph.insert_before(self.parts.nodes[0], self.op.nodes)
            else:
                self.graph.insert_after(last, self.op.nodes)
            self._last[gradient] = self.op.nodes[-1]
            self.op.nodes.clear()
        return self._known[gradient, what]
