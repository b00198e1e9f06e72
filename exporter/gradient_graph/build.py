"""The gradient of an ONNX model as an ONNX model: one reverse sweep over onnx_ir. The rules are in symbolics/gradients."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from exporter.gradient_graph.model import Boundary, infer_shapes, own_copy, read_boundary, remove_marks, set_ir_version
from symbolics.gradients import COMPOSITES, NONDIFFERENTIABLE, RULES, Rule, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.copies import clone_nodes, function_body, inline
from symbolics.graph.folding import fold, taken_branch
from symbolics.graph.scope import Scope
from symbolics.graph.shapes import name_dims
from symbolics.graph.values import is_float, unsupported
from symbolics.graph.walk import captured, discard, prune, subgraphs, walk
from symbolics.node.metadata import GradientPairing, write_pairing
from symbolics.node.names import GRADIENTS_KEY

__all__ = ["build_gradient_graph", "gradient"]

Key = tuple[str, str]
ModelLike = str | os.PathLike[str] | onnx.ModelProto | ir.Model | Any


def build_gradient_graph(
    model: ModelLike,
    *,
    wrt: Iterable[str] | None = None,
    outputs: Iterable[str] | None = None,
    overrides: Mapping[str | Key, Callable[..., Any] | Rule] | None = None,
) -> ir.Model:
    """Add the gradient graph to a model.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one. It is not changed.
        wrt: Initializers and inputs to differentiate with respect to. Default: the trainable parameters that the file
            names, otherwise its float initializers of rank 1 or more; and the float inputs.
        outputs: Outputs to differentiate. Default: all float outputs.
        overrides: Rules for this model alone, by operator or (domain, operator).

    Returns:
        The model with an input ``<output>_grad`` for each of ``outputs`` behind its inputs, and an output ``<name>_grad``
        for each of ``wrt`` behind its outputs. The metadata entry ``pythonop.gradients`` says which is which. A name in
        wrt that no output depends on has zeros, and is listed there as unreached. Its IR version is the oldest, from 8 on,
        that its opset and contents need, never a newer one than the input's: runtimes refuse versions they do not know.

    Raises:
        UnsupportedOperatorError: An operator between wrt and outputs has no rule.
        FormatError: The model does not pass onnx.checker, cannot be converted to opset 18, or its stop-gradient marks were lost.
        ArgumentError: wrt or outputs name what does not exist or has no gradient (a ValueError too).
    """
    collecting = gc.isenabled()
    gc.disable()  # a build makes many small objects and no garbage: collections would be most of its time
    try:
        return _Build(own_copy(model), wrt, outputs, overrides or {}).run()
    finally:
        if collecting:
            gc.enable()


class _Build:
    """One build: expand what has no rule, sweep, join."""

    def __init__(self, model: ir.Model, wrt: Iterable[str] | None, outputs: Iterable[str] | None, overrides: Mapping[Any, Any]) -> None:
        self.model = model
        self.boundary: Boundary = read_boundary(model, wrt, outputs)
        own = {_key(k): r if isinstance(r, Rule) else Rule(r) for k, r in overrides.items()}
        self.rules: dict[Key, Rule] = {**RULES, **{(domain, name): r.check(domain, name) for (domain, name), r in own.items()}}
        self.scope = Scope(self.boundary.prefix, self.boundary.is_constant)
        self.scope.backward = self.sweep
        self.expanded: list[ir.Node] = []
        self.scope.opset = model.opset_imports[""]

    def run(self) -> ir.Model:
        graph, boundary = self.model.graph, self.boundary
        infer_shapes(self.model, only_where_missing=True)
        targets = boundary.wrt
        while self.expand(targets):
            again = True
            while again:  # what folds makes ranks known, and known ranks fold
                self.register_constants()
                infer_shapes(self.model)
                self.expanded, again = fold(Builder(self.scope), self.expanded)
        name_dims(graph, self.scope.const)
        seeds: dict[ir.Value, ir.Value] = {}
        pairing_in = {}
        for value in boundary.outputs:
            g = ir.Value(name=boundary.input_name(value), type=value.type, shape=value.shape)
            seeds[value], pairing_in[value.name] = g, g.name
        boundary.check_reached(self.active(graph, targets)[0])
        op = Builder(self.scope)
        gradients = self.sweep(op, graph, seeds, targets)
        results: dict[ir.Value, None] = {}
        given, unreached = set(seeds.values()), []
        for value in targets:
            g = gradients.get(value)
            if g is None:
                unreached.append(value.name)
                g = op.zeros(op.shape(value), value.dtype)
            if g.producer() is None or g in results or g in given or g.producer().graph is not None:
                g = op.Identity(g)
            g.name = boundary.output_name(value)
            g.type, g.shape = value.type, value.shape
            results[g] = None
        graph.extend(prune(op.nodes, results))
        graph.inputs.extend(seeds.values())
        graph.outputs.extend(results)
        self.register_constants()
        remove_marks(self.model)
        for node in walk(op.nodes):
            graph.opset_imports.setdefault(node.domain, 1)
        pairing = GradientPairing(pairing_in, {v.name: g.name for v, g in zip(targets, results)}, tuple(unreached))
        self.model.metadata_props[GRADIENTS_KEY] = write_pairing(pairing)
        set_ir_version(self.model)
        return self.model

    def register_constants(self) -> None:
        """Those constants of the build that something uses are initializers, no others."""
        initializers = self.model.graph.initializers
        for value in self.scope.constants.values():
            if value.uses() or value.is_graph_output():
                initializers[value.name] = value
            else:
                initializers.pop(value.name, None)

    # ------------------------------------------------------------------------------------------------------- the path
    def active(self, nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> tuple[set[ir.Value], list[ir.Node]]:
        """Values that depend on the targets in a differentiable way, and the nodes that make them."""
        active, makers = set(targets) | self.scope.active, []
        for node in nodes:
            if self.is_flat(node):
                continue
            if any(v in active for v in self.reads(node)):
                rule = self.rules.get((node.domain, node.op_type))
                through = rule is not None and rule.straight_through
                made = [o for o in node.outputs if through or o.type is None or is_float(o)]
                if made:
                    active.update(made)
                    makers.append(node)
        return active, makers

    def path(self, nodes: Iterable[ir.Node], targets: Iterable[ir.Value], ends: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes on a way from the targets to the ends; `Scope.active` grows by the values on it."""
        active, makers = self.active(nodes, targets)
        self.scope.active |= active
        needed, found = set(ends), []
        for node in reversed(makers):
            if any(o in needed for o in node.outputs):
                needed.update(v for v in self.reads(node) if v in active)
                found.append(node)
        found.reverse()
        return found

    def reads(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """What a gradient of the node's outputs could go to."""
        rule = self.rules.get((node.domain, node.op_type))
        inputs = node.inputs if rule is None else rule.inputs(node)
        return (*inputs, *captured(node)) if subgraphs(node) else inputs

    def is_flat(self, node: ir.Node) -> bool:
        key = (node.domain, node.op_type)
        return key not in self.rules and (node.op_type in NONDIFFERENTIABLE if node.domain == "" else key == self.boundary.mark)

    # ---------------------------------------------------------------------------------------------------- the expansion
    def expand(self, targets: Sequence[ir.Value]) -> bool:
        """Put bodies in place of the calls on the path that have no rule. Whether there were any."""
        found = False
        for node in self.path(self.model.graph, targets, self.boundary.outputs):
            found |= self.expand_node(node)
            for inner in [n for graph in subgraphs(node) for n in walk(graph)]:
                if not self.is_flat(inner) and any(o.type is None or is_float(o) for o in inner.outputs):
                    found |= self.expand_node(inner)
        self.scope.active.clear()
        return found

    def expand_node(self, node: ir.Node) -> bool:
        key = (node.domain, node.op_type)
        if node.graph is None:
            return False
        op = Builder(self.scope)
        if (branch := taken_branch(op, node)) is not None:
            mapping: dict[ir.Value, ir.Value | None] = {}
            nodes = clone_nodes(self.scope, branch, mapping)
            values = [mapping.get(v, v) for v in branch.outputs]
        elif key in COMPOSITES and self.rules.get(key) is RULES.get(key):  # no override
            with op.arithmetic():
                composed = COMPOSITES[key](op, node)
            if composed is None:
                return False
            nodes, values = op.nodes, list(composed)
        elif key in self.rules:
            return False
        else:
            function = function_body(node, self.model.functions, self.scope.opset)
            if function is None:
                return False
            nodes, values = inline(self.scope, node, function)
        graph = node.graph
        outputs = {o: v for o, v in zip(node.outputs, values) if v is not None}
        for old, new in outputs.items():
            if new.producer() not in nodes or old.is_graph_output() or new in list(outputs.values())[: list(outputs).index(old)]:
                same = ir.Node("", "Identity", [new], name=self.scope.name("Identity"))
                nodes.append(same)
                new = same.outputs[0]
            name, new.type, new.shape = old.name, old.type or new.type, old.shape or new.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name = None, name
        nodes = prune(nodes, graph.outputs)
        self.expanded += walk(nodes)
        graph.insert_before(node, nodes)
        discard(node)
        graph.remove(node)
        return True

    # -------------------------------------------------------------------------------------------------------- the sweep
    def sweep(
        self, op: Builder, nodes: Iterable[ir.Node], seeds: Mapping[ir.Value, ir.Value], targets: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """The gradients of the targets, given those of the seeds; nodes go to ``op``. A target that nothing reaches has none."""
        targets = list(targets)
        gradients: dict[ir.Value, list[ir.Value]] = {v: [g] for v, g in seeds.items()}

        def total(value: ir.Value) -> ir.Value | None:
            parts = gradients.get(value)
            if parts is None:
                return None
            if len(parts) > 1:
                gradients[value] = parts = [op.add_up(parts, value)]
            return parts[0]

        with op.arithmetic():
            for node in reversed(self.path(nodes, targets, seeds)):
                above = [total(o) for o in node.outputs]
                if any(g is not None for g in above):
                    for value, g in self.apply(op, node, above):
                        gradients.setdefault(value, []).append(g)
            return {v: g for v in targets if (g := total(v)) is not None}

    def apply(self, op: Builder, node: ir.Node, above: list[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
        """Gradients of what the node reads, summed and cast to the values they belong to."""
        rule = self.rules.get((node.domain, node.op_type))
        if rule is None:
            raise unsupported(node, "the operator has no rule and no function body")
        out = []
        for value, g in rule.gradients(op, node, above):
            if value not in self.scope.active:
                continue
            if rule.broadcast:
                g = op.sum_to(g, value, node.outputs[0], [v for v in node.inputs if v is not None and v is not value])
            if value.dtype is not None and value.dtype.is_floating_point():
                g = op.cast(g, value.dtype)
            if g.shape is None:
                g.shape = value.shape
            out.append((value, g))
        return out


def _key(operator: str | Key) -> Key:
    return ("", operator) if isinstance(operator, str) else operator
