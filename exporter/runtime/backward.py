"""One PythonOpBackward as plain Python, on torch tensors: what every engine runs. `symbolics.node.backward` says what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from exporter.runtime.kernels import PythonOpGrad, check_element_types, enter_state, plain, root_of
from exporter.runtime.store import Context, ContextStore
from exporter.runtime.sums import stopped_at, watch
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.backward import BACKWARD_SPECS
from symbolics.node.names import PYTHON_OP_BACKWARD

__all__ = ["PythonOpBackward"]


class Own(NamedTuple):
    """An output of the call as a target: the tensor, or its gradient edge."""

    root: Any


class PythonOpBackward(PythonOpGrad):
    """One PythonOpBackward node.

    Attributes:
        count: N, the number of cotangents that follow the context among the inputs; what comes after them is control
            dependency only.
        order, readers: As its attributes.
        keeps: Whether the node's last output, its own context, has a name. Who makes the node says so.
    """

    kind, specs = PYTHON_OP_BACKWARD, BACKWARD_SPECS
    keeps = False

    def __init__(self, attributes: Mapping[str, Any], store: ContextStore, node_name: str = "") -> None:
        """Args:
            attributes: name -> value; nothing in them is resolved.
            store: Where contexts are.
            node_name: The node's name, for messages.

        Raises:
            FormatError: An attribute is missing or malformed.
        """
        super().__init__(attributes, store, node_name)
        try:
            check_element_types(attributes["input_tensor_types"])
        except FormatError as error:
            raise FormatError(f"{self.title}: {error}") from error
        self.order, self.readers = attributes["order"], attributes["readers"]
        if self.order < 1 or self.readers < 1:
            raise FormatError.damaged(self.title, f"order is {self.order} and readers is {self.readers}: both count from 1")
        if len(self.wanted) != len(self.output_types) or self.count != len(attributes["input_tensor_types"]):
            raise FormatError.damaged(self.title, "its attributes differ in length")
        call, self.id = self.id, _id(self.id, self.order)
        self.next_id = _id(call, self.order + 1)

    def run(self, handle: int, gradients: Sequence[Any]) -> list[Any]:
        """Run the engine, building a graph of what it does where the node leaves a context.

        Args:
            handle: The context.
            gradients: N tensors owned by the call, None, or no element, where a cotangent is absent.

        Returns:
            One per gradient, as `PythonOpGrad.run` has them; then the handle of the new context as an int64 scalar, None where
            there is none; then a boolean for each gradient: whether autograd has it.

        Raises:
            RunError: The context is not there, or the Function's backward is once_differentiable.
            Exception: What backward raises, as it is.
        """
        record = self.store.take(handle, self.id, self.name, self.readers, PYTHON_OP_BACKWARD)
        context = Context.unpack(record)
        # The outputs of the call are targets of the orders above.
        own = [None if root is None else Own(root) for root in context.roots] if len(self.wanted) > len(context.targets) else []
        if len(gradients) != len(context.roots) or len(self.wanted) != len(context.targets) + len(own) or (own and self.order > 1):
            raise RunError.damaged(self.title, "it does not fit the node that made its context")
        if own:
            shapes = [*(context.shapes or [()] * len(context.targets)), *map(_shape_of, context.roots)]
            context = context._replace(targets=(*context.targets, *own), shapes=tuple(shapes))
        if any(isinstance(g, np.ndarray) for g in gradients):
            raise RunError.damaged(self.title, "a gradient comes as strings")
        with ExitStack() as stack:
            enter_state(stack, {}, True, self.keeps)
            given = [None if g is None else self.leaf(g) if self.keeps else plain(g) for g in context.given(gradients)]
            pairs = [(root, g) for root, g in zip(context.roots, given, strict=True) if root is not None and g is not None]
            # All targets where a context is left: a higher order may want what this one does not.
            asked = [target is not None and (ask or self.keeps) for target, ask in zip(context.targets, self.asked, strict=True)]
            asked[len(asked) - len(own) :] = [False] * len(own)
            targets = [target for target, ask in zip(context.targets, asked, strict=True) if ask]
            answers: Sequence[Any] = [None] * len(targets)
            if self.once(root for root, _ in pairs):
                raise RunError(
                    f"{self.title}: its backward is @once_differentiable, and is differentiated again: it has no second derivative, in eager "
                    "neither.\n  way out: take the decorator away where backward is made of differentiable operations, or export with inline= "
                    "for the derivative of its forward"
                )
            if self.keeps:
                watch(root for root, _ in pairs)
            if pairs and targets:
                answers = self.differentiate([root for root, _ in pairs], [g for _, g in pairs], targets)
            results = iter(answers)
            found = [next(results) if ask else None for ask in asked]
            new = self.leave(context, found, given, gradients) if self.keeps else None
        answered = [g for g, ask, target in zip(found, self.asked, context.targets, strict=True) if ask and target is not None]
        return [*self.finish(context.pack(), answered), new, torch.tensor([g is not None for g in found])]

    def differentiate(self, roots: Sequence[Any], cotangents: Sequence[Any], targets: Sequence[Any]) -> Sequence[Any]:
        """The engine's answer, None for a target that is not reached.

        Its graph always stays whole: contexts of other orders, and other readers of this one, hold parts of it. It is freed
        with the last of them. What flows back to the outputs of the call stops there, where they are targets.
        """
        with stopped_at(_edge_of(target.root) for target in targets if isinstance(target, Own)):
            plain_targets = [target.root if isinstance(target, Own) else target for target in targets]
            return torch.autograd.grad(roots, plain_targets, cotangents, retain_graph=True, create_graph=self.keeps, allow_unused=True)

    def once(self, roots: Iterable[Any]) -> bool:
        """Whether what autograd would go through has the mark of @once_differentiable: a node that raises and leads nowhere.

        Asked for the gradients of some tensors alone, the engine does not come by it, and they would be zeros.
        """
        if self.order == 1:
            return False
        waiting = [_node_of(root) for root in roots]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            if node.name() == "torch::autograd::Error":
                return True
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
        return False

    def leaf(self, value: torch.Tensor) -> torch.Tensor:
        """A cotangent that the new context is differentiated by.

        Raises:
            RunError: It is of a type that has no gradient.
        """
        if not (value.is_floating_point() or value.is_complex()):
            raise RunError.damaged(self.title, f"a cotangent is {value.dtype}")
        return plain(value).requires_grad_()

    def leave(self, context: Context, found: Sequence[Any], given: Sequence[Any], gradients: Sequence[Any]) -> torch.Tensor:
        """Keep the graph of what has just run.

        Returns:
            The handle.
        """
        shapes = [*(context.shapes or [()] * len(context.targets)), *(() if g is None else tuple(g.shape) for g in gradients)]
        roots = tuple(map(root_of, found))
        new = Context(self.next_id, self.name, roots, (*context.targets, *given), tuple(shapes))
        return torch.tensor(self.store.put(new, self.pool), dtype=torch.int64)


def _node_of(root: Any) -> Any:
    return root.node if isinstance(root, GradientEdge) else root.grad_fn


def _edge_of(root: Any) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else torch.autograd.graph.get_gradient_edge(root)


def _shape_of(root: Any) -> tuple[int, ...]:
    return () if root is None else tuple(private.shape_of_edge(root) if isinstance(root, GradientEdge) else root.shape)


def _id(call: str, order: int) -> str:
    """What the contexts that nodes of an order take are called by; those of order 1 are a PythonOp's."""
    return call if order == 1 else f"{call}, order {order}"
