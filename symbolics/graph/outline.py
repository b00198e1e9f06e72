"""What lies between the boundaries of a call becomes a function of the model; calls that compute the same share one. `symbolics.graph.flatten` is the way back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from symbolics.graph.boundaries import BEHIND, Edge, edge_of, is_boundary
from symbolics.graph.region import Key, Region
from symbolics.graph.values import constant_of, is_mark, shape_in_function
from symbolics.graph.walk import bypass, discard, reads, subgraphs, walk
from symbolics.node.names import (
    CALL_ATTRIBUTE,
    CLASS_KEY,
    INNER_DOMAIN,
    MARK_COUNT_KEY,
    MARK_DOMAIN,
    MARK_OP,
    MODULE_PROPERTY,
)
from symbolics.node.numbers import number_in, with_number

__all__ = ["count_marks", "outline"]

#: Constants of at most so many elements stand in the body: shapes, axes, scalars. Larger ones are inputs.
_SMALL = 64


def outline(model: ir.Model, keys: Mapping[str, Sequence[str]], module_of: Callable[[ir.Node], str]) -> None:
    """Make functions of what lies between boundaries, in place; no boundary is left.

    A function is named after the class of the module, with a number behind where another call of that class computes something else. Its inputs
    are the tensors that the call takes, then the parameters and buffers that it reads, then what it reads besides; its outputs what the call gives,
    then what others read of its values.

    Args:
        model: The model.
        keys: The names that an initializer has in the state of the model.
        module_of: The path of the module that a node is of.
    """
    calls: dict[int, list[ir.Node]] = {}
    for node in walk(model.graph):
        if is_boundary(node):
            calls.setdefault(edge_of(node).call, []).append(node)
    if not calls:
        return
    made = _Functions(model, keys, {node: module_of(node) for node in walk(model.graph)})
    orders: dict[Any, _Order] = {}
    for number in sorted(calls, reverse=True):  # one inside of another first
        graphs = {node.graph for node in calls[number]}
        if len(graphs) == 1 and (graph := graphs.pop()) is not None:
            if graph not in orders:
                orders[graph] = _Order(graph)
            made.call(calls[number], orders[graph])
        for node in calls[number]:
            if node.graph is not None:  # not with a call that is a function now
                bypass(node)
    model.graph.sort()
    made.add()
    for value in made.moved:
        if value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        if (maker := value.producer()) is not None and maker.graph is not None:
            maker.graph.remove(maker)
        elif value.name is not None and value.name in model.graph.initializers:
            del model.graph.initializers[value.name]
    if MARK_COUNT_KEY in model.metadata_props:
        model.metadata_props[MARK_COUNT_KEY] = str(count_marks(model))
    model.graph.opset_imports.pop(INNER_DOMAIN, None)


def count_marks(model: ir.Model) -> int:
    """How many stop-gradient marks stand in a model, in its functions too."""
    parts = (model.graph, *(f for f in model.functions.values() if (f.domain, f.name) != (MARK_DOMAIN, MARK_OP)))
    return sum(is_mark(node) for part in parts for node in walk(part))


class _Order(dict[ir.Node, int]):
    """The places of the nodes of one graph."""

    def __init__(self, graph: ir.Graph | ir.Function) -> None:
        super().__init__((node, i) for i, node in enumerate(graph))
        self._last: dict[
            int, int
        ] = {}  # level of calls: 0 for those of the forward, 1 for their gradients -> the place of the last boundary
        for node, i in self.items():
            if is_boundary(node):
                self._last[edge_of(node).call // BEHIND] = i
        self._around = {inner: node for node in graph for inner in walk([node]) if inner is not node}

    def behind(self, node: ir.Node, call: int) -> bool:
        """Whether a node stands behind all that a call is the gradient of: it is there for gradients alone."""
        below = [last for level, last in self._last.items() if level < call // BEHIND]
        return bool(below) and self[node] > max(below)

    def top(self, node: ir.Node | None) -> ir.Node | None:
        """The node of the graph that a node is, or is in a body of; None for one elsewhere."""
        if node is None:
            return None
        found = self._around.get(node, node)
        return found if found in self else None


class _Functions:
    """The functions of one model, by what they compute."""

    def __init__(self, model: ir.Model, keys: Mapping[str, Sequence[str]], modules: dict[ir.Node, str]) -> None:
        self.model, self.modules = model, modules
        self.keys = keys
        self.ranks = {key: i for i, key in enumerate(key for names in keys.values() for key in names)}
        self.known: dict[Any, tuple[ir.Function, list[ir.Node]]] = {}
        self.calls: dict[ir.Function, list[ir.Node]] = {}
        self.names = {(node.domain, node.op_type) for node in walk(model.graph)} | {(f.domain, f.name) for f in model.functions.values()}
        self.names |= {(node.domain, node.op_type) for f in model.functions.values() for node in walk(f)}
        self.numbers: dict[str, str] = {}  # of a call of a Function -> of the one that it shares a function with
        self.moved: dict[ir.Value, None] = {}  # constants that stand in bodies
        self.taken = {node.name for node in walk(model.graph)}

    # ---------------------------------------------------------------------------------------------------------- a call
    def call(self, boundaries: Sequence[ir.Node], order: _Order) -> None:
        """Put a call of a function in the place of the nodes of one call."""
        region = self._region(boundaries, order)
        if region is None or not region.given:
            return
        key = Key(region).text()
        if key in self.known:
            function, nodes = self.known[key]
            for one, two in zip(walk(nodes), walk(region.nodes), strict=True):
                for mine, theirs in zip(one.outputs, two.outputs, strict=True):
                    _share(mine, theirs)
                if (number := _id(one)) is not None and (other := _id(two)) is not None:
                    self.numbers[other] = number
            for formal, value in zip(function.inputs, region.taken, strict=True):
                _share(formal, value)
            self._replace(region, function, order)
            for node in region.nodes:
                discard(node)
        else:
            function, own = self._function(region)
            self._replace(region, function, order)
            self._fill(function, region, own)
            self.known[key] = function, region.nodes

    def _region(self, boundaries: Sequence[ir.Node], order: _Order) -> Region | None:
        edges = {node: edge_of(node) for node in boundaries}
        enters = {node.outputs[0]: node for node in sorted(boundaries, key=lambda n: edges[n].index) if not edges[node].out}
        leaves = sorted((node for node in boundaries if edges[node].out), key=lambda n: edges[n].index)
        if not leaves:
            return None
        inside = _between(enters, leaves, order)
        ends = [value for node in leaves if (value := node.inputs[0]) is not None]
        self._absorb(inside, ends, edges[boundaries[0]].call, set(leaves), order)
        if not inside:
            return None
        nodes = _in_order(inside, ends)
        region = Region(edges[boundaries[0]], nodes)
        self._inputs(region, enters, edges)
        for node in leaves:
            source = node.inputs[0]
            assert source is not None
            if source.producer() in inside:
                region.given.setdefault(source, edges[node].place)
                region.exits.setdefault(source, []).append(node)
        for node in nodes:
            for value in node.outputs:
                others = (use.node for use in value.uses() if use.node not in region.exits.get(value, ()))
                if value not in region.given and (value.is_graph_output() or any(order.top(n) not in inside for n in others)):
                    region.given[value] = ""
        return region

    def _absorb(self, inside: set[ir.Node], ends: Sequence[ir.Value], call: int, leaves: Collection[ir.Node], order: _Order) -> None:
        """Add the nodes that only the call reads, and that read parameters and constants alone (a weight norm), or are there for the gradient."""
        todo = [*ends, *(value for node in inside for value in reads(node))]
        while todo:
            value = todo.pop()
            node = value.producer()
            if node is None or node in inside or node not in order or is_boundary(node) or _is_constant(value):
                continue
            users = {order.top(use.node) for made in node.outputs for use in made.uses()}
            if not users <= inside | set(leaves) or any(made.is_graph_output() for made in node.outputs):
                continue
            if _is_fixed(node) or order.behind(node, call):
                inside.add(node)
                todo += reads(node)

    def _inputs(self, region: Region, enters: Mapping[ir.Value, ir.Node], edges: Mapping[ir.Node, Edge]) -> None:
        made = {value for node in walk(region.nodes) for value in node.outputs}
        made |= {value for node in walk(region.nodes) for body in subgraphs(node) for value in (*body.inputs, *body.initializers.values())}
        read = dict.fromkeys(value for node in region.nodes for value in reads(node) if value not in made)
        path = region.edge.origin.path
        state: list[tuple[int, str, ir.Value]] = []
        others: list[tuple[str, ir.Value]] = []
        for value in read:
            if value in enters:
                continue
            tensor = constant_of(value)
            if (names := self.keys.get(value.name or "")) and value.is_initializer():
                own = next((name for name in names if not path or name.startswith(f"{path}.")), None)
                state.append(
                    (
                        self.ranks[own or names[0]] + (0 if own else len(self.ranks)),
                        own[len(path) + bool(path) :] if own else names[0],
                        value,
                    )
                )
            elif tensor is not None and _is_constant(value) and (tensor.size <= _SMALL or value.producer() is not None):
                region.constants[value] = tensor
                self.moved[value] = None
            else:
                others.append((f"outer{len(others)}", value))
        for value, node in enters.items():
            if value in read:
                region.taken[value] = node.inputs[0]  # type: ignore[assignment]
                region.kinds.append(("taken", edges[node].place))
        for _, name, value in sorted(state, key=lambda found: found[0]):
            region.taken[value] = value
            region.kinds.append(("state", name))
        for name, value in others:
            region.taken[value] = value
            region.kinds.append(("outer", name))

    # ------------------------------------------------------------------------------------------------------ a function
    def _function(self, region: Region) -> tuple[ir.Function, dict[ir.Value, ir.Value]]:
        """A function without nodes, and what stands in it for each value that is read from outside."""
        origin = region.edge.origin
        name = f"{origin.name} {len(self.known)}"  # `add` gives it another
        own: dict[ir.Value, ir.Value] = {}
        used: set[str] = set()
        for (value, _), (_, place) in zip(region.taken.items(), region.kinds, strict=True):
            own[value] = ir.Value(name=_fresh(place, used), type=value.type, shape=shape_in_function(value))
        inputs = list(own.values())
        constants = []
        for value, tensor in region.constants.items():
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=_fresh("Constant", used))
            node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = (
                node.name,
                ir.TensorType(tensor.dtype),
                ir.Shape(tensor.shape.numpy()),
            )
            constants.append(node)
            own[value] = node.outputs[0]
        graph = ir.Graph(inputs, [], nodes=constants, name=name)
        function = ir.Function(origin.domain, name, graph=graph, attributes=[])
        function.metadata_props[CLASS_KEY] = origin.of
        function.meta["used"] = used
        return function, own

    def _fill(self, function: ir.Function, region: Region, own: Mapping[ir.Value, ir.Value]) -> None:
        """Move the nodes of a call into its function."""
        path, used = region.edge.origin.path, function.meta.pop("used")
        names = {value: _fresh(place or "value", used) for value, place in region.given.items()}
        for node in walk(region.nodes):
            node.name = _fresh(node.op_type, used)
            inner = self.modules.get(node, "")
            for key in [key for key in node.metadata_props if not key.startswith("pythonop.")]:
                del node.metadata_props[key]
            node.metadata_props.pop(MODULE_PROPERTY, None)
            if inner != path and (not path or inner.startswith(f"{path}.")):
                node.metadata_props[MODULE_PROPERTY] = inner[len(path) + bool(path) :]
            for value in node.outputs:
                if value in names or value.name or value.uses():
                    value.name = names.get(value) or _fresh(f"{node.name}_{value.index()}" if len(node.outputs) > 1 else node.name, used)
                value.metadata_props.clear()
                value.shape = shape_in_function(value)
            for body in subgraphs(node):
                for value in (*body.inputs, *body.initializers.values()):
                    value.name = _fresh(value.name or "value", used)
        for node in walk(region.nodes):
            for index, read in enumerate(node.inputs):
                if read is not None and read in own:
                    node.replace_input_with(index, own[read])
            for body in subgraphs(node):
                body.outputs[:] = [own.get(value, value) for value in body.outputs]
        function.graph.extend(region.nodes)
        function.graph.outputs.extend(region.given)

    def _replace(self, region: Region, function: ir.Function, order: _Order) -> None:
        """Put the call in the place of the nodes."""
        graph = region.nodes[0].graph
        assert graph is not None
        origin, last = region.edge.origin, max(region.nodes, key=order.__getitem__)
        stem = f"{origin.path}/{origin.name}" if origin.path else origin.name
        call = ir.Node(
            function.domain, function.name, list(region.taken.values()), num_outputs=len(region.given), name=_fresh(stem, self.taken)
        )
        call.metadata_props[MODULE_PROPERTY] = origin.path
        self.calls[function] = [call, *self.calls.pop(function, ())]  # by the call that comes first in the model, the last one last
        graph.insert_after(last, call)
        order[call], self.modules[call] = order[last], origin.path
        inside = set(region.nodes)
        for value, output in zip(region.given, call.outputs, strict=True):
            output.type, output.shape, name = value.type, value.shape, value.name
            for use in list(value.uses()):
                if order.top(use.node) not in inside:
                    use.node.replace_input_with(use.idx, output)
            if value.is_graph_output():
                for body in (graph, *(body for node in graph if node not in inside for each in walk([node]) for body in subgraphs(each))):
                    body.outputs[:] = [output if each is value else each for each in body.outputs]
            leaves = [node for node in region.exits.get(value, ()) if node.outputs[0].is_graph_output()]
            if leaves and not output.is_graph_output():  # the name of the result stays
                made, name = leaves[0].outputs[0], leaves[0].outputs[0].name
                made.name = None
                made.replace_all_uses_with(output, replace_graph_outputs=True)
            output.name = name
            value.name = None
        graph.remove(region.nodes)

    # ------------------------------------------------------------------------------------------------------- the model
    def _number(self, number: str) -> str:
        """The number of a call of a Function after all: what reads its context says the same."""
        seen = set[str]()
        while number in self.numbers and number not in seen:
            seen.add(number)
            number = self.numbers[number]
        return number

    def add(self) -> None:
        """Put the functions into the model, one inside of another first, and import what they are of."""
        versions = self.model.opset_imports
        for function in reversed(self.calls):  # the first call of a class has the name without a number
            stem = function.name.rpartition(" ")[0]
            function.name = next(
                n for i in itertools.count(1) if (function.domain, n := stem + (f"_{i}" if i > 1 else "")) not in self.names
            )
            self.names.add((function.domain, function.name))
            for call in self.calls[function]:
                call.op_type = function.name
        for function, _ in self.known.values():
            versions.setdefault(function.domain, 1)
            self.model.functions[function.identifier()] = function
        parts = (self.model.graph, *self.model.functions.values()) if any(old != new for old, new in self.numbers.items()) else ()
        for node in (node for part in parts for node in walk(part)):
            if (number := _id(node)) is not None and number in self.numbers:
                text = with_number(node.attributes[CALL_ATTRIBUTE].value, self._number(number))
                node.attributes[CALL_ATTRIBUTE] = ir.AttrString(CALL_ATTRIBUTE, text)
        for function, _ in self.known.values():
            domains = {"", *(node.domain for node in walk(function))}
            function.opset_imports.update({domain: versions.get(domain, 1) for domain in sorted(domains)})
        if self.known:
            self.model.ir_version = max(self.model.ir_version, 10)  # the oldest with metadata of functions


def _between(enters: Mapping[ir.Value, ir.Node], leaves: Sequence[ir.Node], order: _Order) -> set[ir.Node]:
    """The nodes on a way from what a call takes to what it gives: all of them ran during the call."""
    end = max((order.get(node, -1) for node in leaves), default=-1)
    behind: set[ir.Node] = set()
    todo = list(enters)
    while todo:
        for use in todo.pop().uses():
            node = order.top(use.node)
            if node is not None and node not in behind and node not in leaves and order[node] < end:
                behind.add(node)
                todo += node.outputs
    inside: set[ir.Node] = set()
    todo = [value for node in leaves if (value := node.inputs[0]) is not None]
    while todo:
        maker = todo.pop().producer()
        if maker in behind and maker not in inside:
            inside.add(maker)
            todo += reads(maker)
    return inside


def _is_constant(value: ir.Value) -> bool:
    """Whether a value is written down: an initializer, or what a Constant makes."""
    maker = value.producer()
    return value.is_initializer() and not value.is_graph_input() if maker is None else maker.op_type == "Constant" and not maker.domain


def _is_fixed(node: ir.Node) -> bool:
    """Whether a node depends on initializers alone."""
    todo, seen = [node], {node}
    while todo:
        for value in reads(todo.pop()):
            maker = value.producer()
            if maker is None and not value.is_initializer():
                return False
            if maker is not None and is_boundary(maker):
                return False
            if maker is not None and maker not in seen:
                seen.add(maker)
                todo.append(maker)
    return True


def _in_order(inside: Collection[ir.Node], ends: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes, each behind those that it reads, in an order that follows from the ends and not from that of the graph."""
    found: dict[ir.Node, None] = {}
    for end in ends:
        todo: list[tuple[ir.Node, bool]] = [(node, False)] if (node := end.producer()) in inside and node is not None else []
        while todo:
            node, ready = todo.pop()
            if node in found:
                continue
            if ready:
                found[node] = None
                continue
            todo.append((node, True))
            todo += [(maker, False) for value in reversed(reads(node)) if (maker := value.producer()) in inside and maker is not None]
    return list(found)


def _share(mine: ir.Value, theirs: ir.Value) -> None:
    """A value of a function is one of two calls: it has the sizes that it has in both."""
    if mine.shape is None or theirs.shape is None or len(mine.shape) != len(theirs.shape):
        mine.shape = None
    else:
        mine.shape = ir.Shape([a if isinstance(a, int) and a == b else None for a, b in zip(mine.shape, theirs.shape)])
    if mine.dtype != theirs.dtype:
        mine.type = None


def _fresh(stem: str, used: set[Any]) -> str:
    name = next(name for i in itertools.count() if (name := f"{stem}_{i}" if i else stem) not in used)
    used.add(name)
    return name


def _id(node: ir.Node) -> str | None:
    """The number of the call of a Function that a node is, or is a gradient of."""
    attribute = node.attributes.get(CALL_ATTRIBUTE)
    return None if attribute is None or attribute.type is not ir.AttributeType.STRING else number_in(attribute.value)
