"""The sessions of a loaded file's gradients: the plain ones, those of order 1, differentiable, and of the orders above.

Each is made for the outputs that have a cotangent: what autograd does not give is absent, and no node runs for it. Order 1 are the plain
gradients of a `Plan`. Order k + 1 is the gradient graph of the gradient graph of order k, cut where that ran:
what earlier runs have left is an input. Of them, pure nodes may run again. PythonOps, their gradients and random draws never do: their
outputs are among what is left, so every order sees what the one forward has drawn and saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from exporter.files.proto import reading
from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.build import differentiate
from exporter.gradient_graph.model import own_copy, remove_marks
from exporter.gradient_graph.partition import between, extract, reach_of, split_again
from exporter.gradient_graph.without_gradient import paths_without_gradient
from exporter.module.backward import Backward
from exporter.module.plans import Plan, Plans
from exporter.runtime.link import LINKED
from exporter.runtime.tensors import Runner
from symbolics.errors import RunError
from symbolics.graph.values import name_of
from symbolics.graph.walk import walk
from symbolics.node.attributes import values_of
from symbolics.node.backward import context_of, is_backward, to_backward
from symbolics.node.metadata import pairing_of
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP_GRAD
from symbolics.text import shown

__all__ = ["Order", "Orders"]


@dataclass
class Order:
    """One order of gradients of a plan, of some cotangents of the order below.

    Attributes:
        model: The graph whose last gradients these are, every PythonOpGrad in it a PythonOpBackward.
        operands: Names of the tensors that a run takes: inputs, state, and the cotangents of all orders so far.
        sources: Those of them that the next order's gradients are with respect to.
        gradients: operand -> the output that holds its gradient.
        reach: operand -> the outputs of the order below through which its gradient comes.
        cotangents: output of the order below -> the operand that takes its cotangent.
        left: Outputs that are kept for higher orders.
        known: Values that the forward, this order and those between leave.
        types: Element types of values that sessions have given out.
        runner: The session.
        presence: gradient -> the output that says whether it is there, of those that may not be.
        above: outputs of it that have a cotangent -> the order of their gradients.
    """

    model: ir.Model
    operands: tuple[str, ...]
    sources: tuple[str, ...]
    gradients: dict[str, str]
    reach: dict[str, frozenset[str]]
    cotangents: dict[str, str]
    left: tuple[str, ...]
    known: frozenset[str]
    types: dict[str, int | None]
    runner: Runner
    presence: dict[str, str] = field(default_factory=dict)
    above: dict[frozenset[str], Order] = field(default_factory=dict)

    @property
    def results(self) -> list[str]:
        """The outputs that hold gradients."""
        return list(dict.fromkeys(self.gradients.values()))


class Orders:
    """The gradients of one plan, made when they are first needed.

    Args:
        plans, plan: The sessions of the file.
        training, wrt: What the plan was made for.
    """

    def __init__(self, plans: Plans, plan: Plan, training: bool, wrt: frozenset[str]) -> None:
        self.plans = plans
        self.plan = plan
        self._asked = training, wrt
        self._plain: dict[frozenset[str], Backward | None] = {}
        self.first: dict[frozenset[str], Order] = {}
        if pairing_of(plans.model) is not None:  # whatever is wrong with a backward that a file brings is told before its forward runs
            self.plain([name for name, _ in plan.cotangents])

    def plain(self, given: Collection[str]) -> Backward | None:
        """The session of the gradients that nobody differentiates, None where there are none.

        Args:
            given: The outputs that have a cotangent, in their order.

        Raises:
            RunError: They need what the forward has not left.
        """
        key = frozenset(given)
        with self.plans.lock:
            if key not in self._plain:
                partition = self.plan.partition
                assert partition is not None
                if (some := self._some(key)) is not None:
                    model = self.plans.training_model(*self._asked, self.plans.overrides, some).model
                    with reading(self.plans.model):
                        remove_marks(model)
                        partition = split_again(
                            partition, model, self.plans.state, [name for name, _ in self.plan.residuals], self._asked[1]
                        )
                self._plain[key] = None if partition.backward is None else self.plans.backward(self.plan, partition, given)
            return self._plain[key]

    def above(self, below: Order | None, given: frozenset[str]) -> Order:
        """The session of the gradients of an order, or of the plan, which can be differentiated.

        Args:
            below: The order, None for the plan.
            given: The outputs of it that have a cotangent.

        Raises:
            UnsupportedOperatorError: An operator on the way has no gradient.
            RunError: They need what the forward has not left.
        """
        known = self.first if below is None else below.above
        with self.plans.lock:
            if given not in known:
                known[given] = self._first(given) if below is None else self._next(below, given)
            return known[given]

    def _some(self, given: frozenset[str]) -> frozenset[str] | None:
        """None where all outputs that have a gradient are given."""
        return given if len(given) < len(self.plan.cotangents) else None

    @property
    def _known(self) -> frozenset[str]:
        """What the forward leaves."""
        return frozenset(name for name, _ in self.plan.residuals)

    def check_differentiable(self, order: Order, names: Iterable[str]) -> None:
        """Raises RunError where one of these operands could change the gradients of an order, and the next does not know it."""
        for name in names:
            if name not in order.sources and name not in self._asked[1]:
                raise RunError(
                    f"{shown(name)!r} has a tangent that it did not have, and a gradient that was not wanted, when the loaded file ran: its gradients "
                    "have no tangent by it.\n  way out: torch.func.jvp of torch.func.grad, around the call of the module"
                )

    def _first(self, given: frozenset[str]) -> Order:
        wrt = self._asked[1]
        model = self.plans.training_model(*self._asked, given=self._some(given)).model
        for node in walk(model.graph):
            node.attributes.pop(LINKED, None)
        pairing = pairing_of(model)
        assert pairing is not None
        gradients = {name: output for name, output in pairing.reached.items() if name in wrt}
        cotangents = {output: name for output, name in pairing.inputs.items() if output in given}
        operands = (*self.plan.forward.inputs, *cotangents.values())
        sources = (*gradients, *paths_without_gradient(model, wrt), *cotangents.values())
        return self._order(model, operands, sources, gradients, cotangents, self._known, dict(self.plan.forward.types))

    def _next(self, below: Order, given: frozenset[str]) -> Order:
        with reading(below.model):
            model = own_copy(below.model)
        presence: dict[str, str] = {}
        boundary = Boundary(model, below.sources, [name for name in below.results if name in given])
        differentiate(model, boundary, {}, presence=presence)
        pairing = pairing_of(model)
        assert pairing is not None
        gradients = pairing.reached
        more = pairing.inputs.values()
        return self._order(
            model, (*below.operands, *more), (*below.sources, *more), gradients, pairing.inputs, below.known, below.types, presence
        )

    def _order(
        self,
        model: ir.Model,
        operands: tuple[str, ...],
        sources: tuple[str, ...],
        gradients: Mapping[str, str],
        cotangents: Mapping[str, str],
        known: frozenset[str],
        types: dict[str, int | None],
        presence: Mapping[str, str] | None = None,
    ) -> Order:
        presence = presence or {}
        with reading(self.plans.model):
            _leave_contexts(model)
            part = _without_order(model)
            ends = [*gradients.values(), *presence.values()]
            nodes, given = between(part, {*operands, *known}, ends)
            made = [value for node in nodes if is_backward(node) for value in node.outputs if value.name]
            left = tuple(dict.fromkeys(map(name_of, made)))
            values = {name_of(v): v for node in nodes for v in node.outputs}
            reached = reach_of(nodes, {n: values[g] for n, g in gradients.items() if g in values}, {v: k for k, v in cotangents.items()})
            session = extract(part, given, [*ends, *left])
            for value in session.graph.inputs:
                kind = types.get(name_of(value))
                if value.type is None and kind is not None:
                    value.type = ir.TensorType(ir.DataType(kind))
        runner = self.plans.session(session)
        return Order(
            model,
            operands,
            sources,
            dict(gradients),
            reached,
            dict(cotangents),
            left,
            known.union(left),
            {**types, **runner.types},
            runner,
            dict(presence),
        )


def _leave_contexts(model: ir.Model) -> None:
    """Every PythonOpGrad becomes a PythonOpBackward that leaves a context: whatever it is differentiated by, backward runs once."""
    nodes = list(walk(model.graph))
    taken = {value.name for node in nodes for value in node.outputs} | {value.name for value in model.graph.inputs}
    count = 0
    for node in nodes:
        if node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP_GRAD:
            try:
                to_backward(node)
            except LookupError:  # out of a Loop: it has no next order, and this one needs none
                continue
        if is_backward(node) and ((context := context_of(node)) is None or not context.name):
            place = len(values_of(node)["output_tensor_types"])
            node.resize_outputs(max(place + 1, len(node.outputs)))
            while (name := f"left/context_{count}") in taken:
                count += 1
            taken.add(name)
            context = node.outputs[place]
            context.name, context.type, context.shape = name, ir.TensorType(ir.DataType.INT64), ir.Shape(())
            if node.graph is model.graph:
                model.opset_imports.setdefault(node.domain, 1)


def _without_order(model: ir.Model) -> ir.Model:
    """A copy in which gradients of PythonOps read their contexts and cotangents alone: what orders them has run."""
    copy = model.clone()
    for node in walk(copy.graph):
        if is_backward(node) or (node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP_GRAD):
            count = 1 + len(values_of(node)["input_tensor_requires_grads"])
            for place in range(count, len(node.inputs)):
                node.replace_input_with(place, None)
            node.resize_inputs(min(count, len(node.inputs)))
    return copy
