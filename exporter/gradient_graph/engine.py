"""The engine of reverse mode over onnx_ir: expand what has no rule, sweep. The rules are in symbolics/gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from exporter.gradient_graph.inference import infer_shapes
from symbolics.errors import FormatError, PythonopError
from symbolics.gradients import COMPOSITES, FLAT, IN_INTEGERS, MOVES, NONDIFFERENTIABLE, RULES, Rule, in_integers
from symbolics.gradients.bodies import OWN_RULE
from symbolics.gradients.labels import check_labels
from symbolics.graph.builder import Builder
from symbolics.graph.copies import function_body, inline, inline_body, replace
from symbolics.graph.folding import fold, taken_branch
from symbolics.graph.named import add_called
from symbolics.graph.presence import conditions_of, gate, is_gate, joint, mark, sum_of, through_gate, without_elements
from symbolics.graph.scope import Scope
from symbolics.graph.shapes import name_dims
from symbolics.graph.values import describe, is_float, is_mark, is_python_op, may_be_float, name_of, unsupported
from symbolics.graph.walk import captured, subgraphs, walk
from symbolics.node.backward import is_backward, is_python_op_grad
from symbolics.text import clean

__all__ = ["Engine", "Key"]

Key = tuple[str, str]


class Engine:
    """Differentiates values of a model with respect to others; both stay in the graph.

    Args:
        model: The model; expansions change it.
        rules: The rule of each (domain, operator).
        scope: Names and constants of the new nodes.
    """

    def __init__(self, model: ir.Model, rules: Mapping[Key, Rule], scope: Scope) -> None:
        self.model = model
        self.rules = rules
        self.scope = scope
        self.scope.backward = self.sweep_inside
        self.scope.opset, self.scope.functions = model.opset_imports[""], model.functions
        self.expanded: list[ir.Node] = []
        self._quantised: dict[ir.OperatorIdentifier, bool] = {}
        self.of_user: BaseException | None = None  # what a rule from outside raised

    def register(self) -> None:
        """Give the model the constants and functions that its nodes read and call."""
        self.scope.register(self.model.graph)
        add_called(self.model, self.scope)

    def rule_of(self, node: ir.Node) -> Rule | None:
        """The rule of a node: its own, or that of its operator."""
        own: Rule | None = node.meta.get(OWN_RULE)
        return own or self.rules.get((node.domain, node.op_type))

    # ---------------------------------------------------------------------------------------------------- the expansion
    def expand_all(self, targets: Sequence[ir.Value], ends: Callable[[], Iterable[ir.Value]]) -> None:
        """Expand until every node between the targets and the ends has a rule, and know all types and shapes that can be known.

        Args:
            targets: What is differentiated with respect to.
            ends: Says what is differentiated: an expansion may put another value in the place of one.
        """
        infer_shapes(self.model, only_where_missing=True)
        while self.expand(targets, ends()):
            folded = True
            while folded:  # what folds makes ranks known, and known ranks fold
                self.register()
                infer_shapes(self.model)
                self.expanded, folded = fold(Builder(self.scope), self.expanded)
        name_dims(self.model.graph, self.scope.const)

    def expand(self, targets: Sequence[ir.Value], ends: Iterable[ir.Value]) -> bool:
        """Put bodies in place of the calls on the path that have no rule. Whether there were any."""
        found = False
        for node in self.path(self.model.graph, targets, ends):
            if self.expand_node(node):  # what it held is gone with it: the branch of an If that is not taken
                found = True
                continue
            for inner in [n for graph in subgraphs(node) for n in walk(graph)]:
                if not self.is_flat(inner) and any(map(may_be_float, inner.outputs)):
                    found |= self.expand_node(inner)
        self.scope.active.clear()
        return found

    def expand_node(self, node: ir.Node) -> bool:
        """Put the body of a node in its place. Whether it has one, and needs it."""
        if node.graph is None or (body := self.body_of(node)) is None:
            return False
        self.expanded += walk(replace(self.scope, node, *body))
        return True

    def body_of(self, node: ir.Node) -> tuple[list[ir.Node], Sequence[ir.Value | None]] | None:
        """The nodes that compute what a node does, and their results: the taken branch of an If, a composition, a function."""
        with self.explained(node):
            return self._body_of(node)

    def _body_of(self, node: ir.Node) -> tuple[list[ir.Node], Sequence[ir.Value | None]] | None:
        key, op = (node.domain, node.op_type), Builder(self.scope)
        if (branch := taken_branch(op, node)) is not None:
            return inline_body(op, branch, ())
        if key in COMPOSITES and self.rules.get(key) is RULES.get(key):  # no override
            with op.arithmetic():
                composed = COMPOSITES[key](op, node)
            return None if composed is None else (op.nodes, composed)
        function = None if self.rule_of(node) is not None else function_body(node, self.model.functions, self.scope.opset)
        if function is None:
            return None
        check_labels(op, node)
        nodes, results = inline(self.scope, node, function)
        return [*op.nodes, *nodes], results

    # ------------------------------------------------------------------------------------------------------- the path
    def active(self, nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> tuple[set[ir.Value], list[ir.Node]]:
        """Values that depend on the targets in a differentiable way, and the nodes that make them."""
        active, makers = set(targets) | self.scope.active, []
        for node in nodes:
            if self.is_flat(node):
                continue
            if (read := [v for v in self.reads(node) if v in active]) and (made := self.depends(node, read, active)):
                active.update(made)
                makers.append(node)
        return active, makers

    def depends(self, node: ir.Node, read: Iterable[ir.Value | None], active: set[ir.Value]) -> list[ir.Value]:
        """The outputs that carry a gradient's path on: floats, and integers that stand for floats (what a QuantizeLinear gave).

        Args:
            node: No flat one.
            read: Its inputs that do, and what its bodies read of them.
            active: All values so far that do.
        """
        if all(map(may_be_float, node.outputs)):
            return list(node.outputs)
        rule = self.rule_of(node)
        if (rule is not None and rule.straight_through) or (node.domain, node.op_type) in IN_INTEGERS or self.calls_quantised(node):
            return list(node.outputs)
        levels = {v.dtype for v in read if v is not None and not may_be_float(v)}  # what a QuantizeLinear gave, and what was made of it
        inside = self.made_inside(node, active) if self.quantises_inside(node) else ()
        found = []
        for output in node.outputs:
            of_levels = bool(levels) and ((node.domain and rule is None) or output.dtype in levels or node.op_type in ("Cast", "CastLike"))
            if may_be_float(output) or output in inside or (of_levels and output.dtype is not ir.DataType.BOOL):
                found.append(output)
        return found

    def quantises(self, node: ir.Node) -> bool:
        """Whether a node, what is in its bodies, or in the function that it calls, makes integers which stand for floats."""
        rule, key = self.rule_of(node), (node.domain, node.op_type)
        if key in IN_INTEGERS or (rule is not None and rule.straight_through and key != ("", "Clip")):  # a Clip hands on what it is given
            return True
        return self.quantises_inside(node) or self.calls_quantised(node)

    def quantises_inside(self, node: ir.Node) -> bool:
        """Whether a node in the bodies of another one does so."""
        return any(self.quantises(inner) for graph in subgraphs(node) for inner in graph)

    def calls_quantised(self, node: ir.Node) -> bool:
        """Whether a node calls a function of the file that does so: until it is expanded, any output may be such integers."""
        key = node.op_identifier()
        if (function := self.model.functions.get(key)) is None or self.rule_of(node) is not None:
            return False
        if key not in self._quantised:
            self._quantised[key] = False  # a function that calls itself is none of ONNX's
            self._quantised[key] = any(map(self.quantises, function))
        return self._quantised[key]

    def made_inside(self, node: ir.Node, active: set[ir.Value]) -> set[ir.Value]:
        """The outputs of an If, Loop or Scan that depend on something in this way inside of its bodies."""
        found: set[ir.Value] = set()
        for graph in subgraphs(node):
            inputs = zip(reversed(graph.inputs), reversed(node.inputs), strict=False)  # a Loop gives its body the number of the round
            given = [v for v, outer in inputs if outer in active and not may_be_float(v)]
            inner, _ = self.active(graph, [*active, *given, *filter(may_be_float, graph.inputs)])
            outputs = zip(reversed(graph.outputs), reversed(node.outputs), strict=False)
            found.update(output for made, output in outputs if made in inner)
        return found

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
        rule = self.rule_of(node)
        inputs = node.inputs if rule is None else rule.inputs(node)
        return (*inputs, *captured(node)) if subgraphs(node) else inputs

    def is_flat(self, node: ir.Node) -> bool:
        """Whether no gradient flows through a node, not even zeros: it makes integers, or it is a stop-gradient mark."""
        return self.rule_of(node) is None and (node.op_type in NONDIFFERENTIABLE if node.domain == "" else is_mark(node))

    def is_step(self, node: ir.Node) -> bool:
        """Whether the gradient of a node is zero wherever it has one."""
        return not node.domain and node.op_type in FLAT and ("", node.op_type) not in self.rules

    # -------------------------------------------------------------------------------------------------------- the sweep
    def sweep(
        self, op: Builder, nodes: Iterable[ir.Node], cotangents: Mapping[ir.Value, ir.Value], targets: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Reverse mode: from the cotangents of some values to the gradients of the targets; nodes go to ``op``.

        A target that nothing reaches has none. One that is reached through operators that are flat almost everywhere alone has zeros: no
        rule is asked on that way, but those of Functions and of other domains, whose backward may add something of its own.
        """
        with op.arithmetic():
            return {v: gate(op, g) for v, g in self.sweep_inside(op, nodes, cotangents, targets).items()}

    def sweep_inside(
        self, op: Builder, nodes: Iterable[ir.Node], cotangents: Mapping[ir.Value, ir.Value], targets: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """As `sweep`; `symbolics.graph.presence` says where the gradients are there."""
        targets = list(targets)
        zero: dict[ir.Value, frozenset[ir.Value]] = {}  # whose cotangent has a part that is zero -> the cotangents that flat operators got
        parts: dict[ir.Value, list[ir.Value]] = {v: [g] for v, g in cotangents.items()}  # what each value's cotangent is the sum of

        def total(value: ir.Value) -> ir.Value | None:
            found = parts.get(value)
            if found is not None and len(found) > 1:
                found[:] = [sum_of(op, found, value)]
            return None if found is None else found[0]

        def zeros(value: ir.Value) -> ir.Value:
            sources = sorted(zero[value], key=name_of)
            return mark(op, op.no_slope(value, *sources), joint(op, sources), zeros_elsewhere=True)

        with op.arithmetic():
            for node in reversed(self.path(nodes, targets, cotangents)):
                incoming = [total(o) for o in node.outputs]
                flat = frozenset(g for g in incoming if g is not None) if self.is_step(node) else frozenset()
                if sources := flat.union(*(zero.get(o, ()) for o in node.outputs)):
                    zero.update((v, sources | zero.get(v, frozenset())) for v in self.reads(node) if v in self.scope.active and is_float(v))
                if node.domain:
                    incoming = [zeros(o) if g is None and o in zero else g for o, g in zip(node.outputs, incoming)]
                if any(g is not None for g in incoming) and not flat:
                    for value, g in self.apply(op, node, incoming):
                        parts.setdefault(value, []).append(g)
            return {v: zeros(v) if found is None else found for v in targets if (found := total(v)) is not None or v in zero}

    def apply(self, op: Builder, node: ir.Node, cotangents: list[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
        """Cotangents of what the node reads, from those of its outputs; summed and cast to the values they belong to."""
        rule = self.rule_of(node)
        through = (rule is not None and rule.straight_through) or (not node.domain and node.op_type in MOVES)
        if not through and any(g is not None and not may_be_float(o) for o, g in zip(node.outputs, cotangents)):
            raise in_integers(node)
        if rule is None:
            levels = any(v in self.scope.active and not may_be_float(v) for v in node.inputs if v is not None)
            quantised = levels or (node.domain, node.op_type) in IN_INTEGERS
            raise in_integers(node) if quantised else unsupported(node, "the operator has no rule and no function body")
        if not node.domain and not subgraphs(node):
            read = [v for v in dict.fromkeys(node.inputs) if v is not None and v in self.scope.active and may_be_float(v)]
            made = [output for output, g in zip(node.outputs, cotangents) if g is not None]
            if all(_is_empty(v) for v in made) or (read and all(_is_empty(v) for v in read)):
                return self.of_nothing(op, read, cotangents)
        with self.explained(node, rule):
            if subgraphs(node):  # its rule knows of conditions
                return self.by_rule(op, node, rule, cotangents)
            if is_gate(node) and cotangents[0] is not None and (gated := node.inputs[1]) is not None:
                return [(gated, through_gate(op, node, cotangents[0]))]
            conditions, is_call = joint(op, cotangents), is_python_op(node) or is_backward(node) or is_python_op_grad(node)
            if is_call:
                cotangents = [None if g is None else without_elements(op, g) for g in cotangents]
            elif any(g is not None and conditions_of(op, g) != conditions for g in cotangents):
                cotangents = [None if g is None else gate(op, g) for g in cotangents]
            before = len(op.nodes)
            found = self.by_rule(op, node, rule, cotangents)
            if conditions is None:
                return found
            new, handed_on = {output for each in op.nodes[before:] for output in each.outputs}, set(cotangents)
            own = [(v, g if g in new or g in handed_on else op.raw("Identity", [g])) for v, g in found]
            return [
                (v, g if g in handed_on or g in op.scope.presence else mark(op, g, conditions, zeros_elsewhere=is_call)) for v, g in own
            ]

    def by_rule(self, op: Builder, node: ir.Node, rule: Rule, cotangents: list[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
        """What a rule gives for the values that gradients are wanted of."""
        return [self.to_value(op, node, rule, *pair) for pair in rule.gradients(op, node, cotangents) if pair[0] in self.scope.active]

    @staticmethod
    def of_nothing(op: Builder, read: Iterable[ir.Value], cotangents: Iterable[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
        """The gradients of a node that made no element of what has a gradient, or read none: what has elements has zeros, the sum of nothing."""
        nothing = op.ReduceSum(next(g for g in cotangents if g is not None), keepdims=0)
        return [(v, op.expand_like(op.Cast(nothing, to=v.dtype or nothing.dtype), v)) for v in read]

    @staticmethod
    def to_value(op: Builder, node: ir.Node, rule: Rule, value: ir.Value, g: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A gradient as its rule gives it, in the shape and type of the value that it belongs to."""
        given = g
        if rule.broadcast:
            g = op.sum_to(g, value, node.outputs[0], [v for v in node.inputs if v is not None and v is not value])
        if is_float(value):
            g = op.Cast(g, to=value.dtype)
        if g is not given and given in op.scope.presence:
            op.scope.presence[g] = op.scope.presence[given]
        if g.shape is None:
            g.shape = value.shape
        return value, g

    # ------------------------------------------------------------------------------------------------------- the errors
    @contextlib.contextmanager
    def explained(self, node: ir.Node | None = None, rule: Rule | None = None) -> Iterator[None]:
        """Around what raises where a model is not as ONNX has it: the checker leaves much to those who read it.

        Raises:
            FormatError: In place of anything that is not one of our errors, nor of a rule that somebody else has written.
        """
        try:
            yield
        except PythonopError:
            raise
        except Exception as error:
            if rule is not None and not rule.function.__module__.startswith("symbolics."):
                self.of_user = error
            if error is self.of_user:
                raise
            what = "the gradient of the model" if node is None else f"the gradient of {describe(node)}"
            raise FormatError(
                f"{what} cannot be built ({type(error).__name__}: {clean(str(error))}): the model is not as ONNX has it, which "
                "onnx.checker.check_model(model, full_check=True) may explain, or it is valid, and this is a fault of pythonop"
            ) from error


def _is_empty(value: ir.Value) -> bool:
    """Whether a value has no element, as is known."""
    return value.shape is not None and 0 in value.shape
