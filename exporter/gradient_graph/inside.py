"""Gradients that a forward takes itself: each ``pythonop.inner::Gradient`` of a model becomes the sweep between the values that it names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.cut import say_cut
from exporter.gradient_graph.engine import Engine
from exporter.gradient_graph.inference import infer_shapes
from symbolics.errors import ExportError, PythonopError
from symbolics.gradients import RULES, Rule
from symbolics.gradients.boundaries import BOUNDARIES
from symbolics.gradients.linked import rules_of_functions
from symbolics.graph.builder import Builder
from symbolics.graph.collector import without_gc
from symbolics.graph.copies import replace
from symbolics.graph.named import write_out
from symbolics.graph.scope import Scope
from symbolics.graph.values import attr, dtype_of, is_mark
from symbolics.graph.walk import bypass, reads, walk
from symbolics.node.backward import count_readers
from symbolics.node.names import BOUNDARY_OP, GRADIENT_OP, INNER_DOMAIN, OWN_DOMAIN, VARIABLE_OP
from symbolics.users import warn

__all__ = ["expand_gradients"]


def expand_gradients(model: ir.Model) -> int:
    """Put sweeps in the place of the gradients that a forward takes, in place.

    Args:
        model: What an export has just made of the forward: gradients of gradients stand behind those that they are made of.

    Returns:
        How many there were.

    Raises:
        UnsupportedOperatorError: An operator on the way has no rule; it names the line that takes the gradient.
        ExportError: One stands in the body of a control flow operator.
    """
    if not any(node.domain == INNER_DOMAIN and node.op_type in (GRADIENT_OP, VARIABLE_OP) for node in walk(model.graph)):
        return 0
    model.graph = model.clone().graph  # torch's exporter has values of a class with an arithmetic of its own, which rules do not mean
    nodes = [node for node in walk(model.graph) if node.domain == INNER_DOMAIN]
    taken = [node for node in nodes if node.op_type == GRADIENT_OP]
    for node in taken:
        if node.graph is not model.graph:
            raise ExportError(f"{_place(node)} stands in the body of torch.cond or a loop: take it outside, of what that returns")
    with without_gc():
        _Inside(model).run(taken, *([node for node in nodes if node.op_type == kind] for kind in (VARIABLE_OP, BOUNDARY_OP)))
    return len(taken)


class _Inside(Engine):
    """The sweeps inside one model."""

    def __init__(self, model: ir.Model) -> None:
        boundary = self.boundary = Boundary(model, (), ())
        variable = {(INNER_DOMAIN, VARIABLE_OP): Rule(lambda op, g, x: g)}
        super().__init__(
            model, {**rules_of_functions(model), **RULES, **variable, **BOUNDARIES}, Scope(boundary.prefix, boundary.is_constant)
        )

    def run(self, taken: list[ir.Node], variables: list[ir.Node], boundaries: list[ir.Node]) -> None:
        """Put a sweep in the place of each gradient, in the order of the graph, and the values themselves in that of the variables."""
        graph = self.model.graph
        needless = {name for name, value in graph.initializers.items() if value.uses()}
        imported = set(graph.opset_imports)
        graph.opset_imports.setdefault(OWN_DOMAIN, 1)  # gradients of gradients of Functions: types are inferred between two sweeps
        self.type_all([*taken, *variables, *boundaries])
        for node in taken:
            say_cut(node)
            with _told(node), self.explained():
                self.put(node)
            self.register()
        write_out(self.model)  # a forward is for tools, too, that know no functions
        for variable in variables:
            bypass(variable)
        for name in needless:  # cotangents that are plain to see are in no node
            value = graph.initializers[name]
            if self.boundary.is_constant(value) and not (value.uses() or value.is_graph_output() or value.is_graph_input()):
                del graph.initializers[name]
        count_readers(walk(graph))
        if not boundaries:
            graph.opset_imports.pop(INNER_DOMAIN, None)
        domains = {inner.domain for inner in walk(graph)}
        for domain in domains - set(graph.opset_imports):
            graph.opset_imports[domain] = 1
        if OWN_DOMAIN not in imported | domains:
            del graph.opset_imports[OWN_DOMAIN]

    def type_all(self, inner: list[ir.Node]) -> None:
        """Types and shapes of all values; those of what stands for a gradient or a variable are those of its inputs."""
        todo = [(y, x) for node in inner for y, x in zip(node.outputs, _targets(node))]
        while todo:
            infer_shapes(self.model, only_where_missing=True)
            known = [(y, x) for y, x in todo if x.type is not None]
            for y, x in known:
                y.type, y.shape = x.type, x.shape
            if not known:
                return
            todo = [(y, x) for y, x in todo if y.type is None]

    def put(self, node: ir.Node) -> None:
        """The sweep of one gradient."""
        graph, count = self.model.graph, attr(node, "outputs")
        given = _targets(node)
        targets = [x for x, y in zip(given, node.outputs, strict=True) if y.uses() or y.is_graph_output()]
        self.scope.active.clear()
        self.expand_all(targets, lambda: [v for v in node.inputs[:count] if v is not None])
        self.scope.active.clear()
        before = []
        for each in graph:
            if each is node:
                break
            before.append(each)
        op = Builder(self.scope)
        cotangents: dict[ir.Value, ir.Value] = {}
        with op.arithmetic():
            for y, g in zip(node.inputs[:count], node.inputs[count + len(given) :], strict=True):
                assert y is not None and g is not None
                cotangents[y] = op.Add(cotangents[y], g) if y in cotangents else g
        found = self.sweep(op, before, cotangents, targets)
        for x in targets:
            if x not in found:
                _check_path(node, before, x)
                found[x] = op.zeros(op.Shape(x), dtype_of(x))
        replace(self.scope, node, op.nodes, [found.get(x) for x in given])
        self.register()


def _targets(node: ir.Node) -> list[ir.Value]:
    """What a gradient or a variable gives out has the types and shapes of these inputs."""
    first = attr(node, "outputs") if node.op_type == GRADIENT_OP else 0
    return [v for v in node.inputs[first : first + len(node.outputs)] if v is not None]


def _check_path(node: ir.Node, before: list[ir.Node], target: ir.Value) -> None:
    """Warn where nothing leads from a value to what is differentiated: eager has a gradient there. Through what is flat, it is zero."""
    behind = {target}
    for each in before:
        if not is_mark(each) and not behind.isdisjoint(reads(each)):
            behind.update(each.outputs)
    if behind.isdisjoint(node.inputs[: attr(node, "outputs")]):
        warn(
            f"{_place(node)} is zero in the file: in its graph nothing leads from one of the tensors to what is differentiated, and in eager mode "
            "something does. Compare with exporter.verify."
        )


def _place(node: ir.Node) -> str:
    return f"the gradient that is taken at {attr(node, 'source') or 'a line unknown'} in module {attr(node, 'module') or '<root>'}"


@contextlib.contextmanager
def _told(node: ir.Node) -> Iterator[None]:
    """Errors of a sweep name the line that asked for it."""
    try:
        yield
    except PythonopError as error:
        raise error.at(_place(node)) from error
