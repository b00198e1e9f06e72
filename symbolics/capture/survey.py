"""The calls of an eager run, and its hooks on gradients: made as they are, and noted."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from symbolics import torch_private as private
from symbolics.capture.callsite import Call, Callsites
from symbolics.capture.chosen_operators import OperatorsSeen
from symbolics.capture.draws import Draws
from symbolics.capture.eager_calls import EagerCalls
from symbolics.capture.fake_kernels import FakeKernels
from symbolics.capture.gradient_ops import Answers
from symbolics.capture.interception import original_apply
from symbolics.capture.listener import Listener
from symbolics.capture.no_gradients import Backward, backward_of, needing_gradients
from symbolics.capture.opaque_modules import ModuleBackward, OpaqueModule
from symbolics.capture.other_hooks import saved_tensors_compared
from symbolics.node.containers import expand_leaves
from symbolics.node.operators import Operator

__all__ = ["OperatorCall", "Survey"]


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """A call of an operator in eager mode: the part of the autograd graph that is its own.

    Attributes:
        operator: The operator, or the `OpaqueModule`.
        kept: Whether it becomes one node of the file; else what it runs is judged by itself, or a translation stands for it.
        made: The autograd nodes of what it returned and changed.
        sources: Those of its arguments: there its own part ends.
        call: Where it was made.
    """

    operator: Any
    kept: bool
    made: tuple[Any, ...]
    sources: tuple[Any, ...]
    call: Call


class _GradientsNoted(TorchFunctionMode):
    """Notes what torch.autograd.grad gives; not that of torch.func, which says of nothing that it has no gradient.

    Nor that of a Function's own forward, which is the Function's: while it runs, nobody listens.
    """

    def __init__(self, taken: Answers, sites: Callsites, listening: Callable[[], bool]) -> None:
        super().__init__()
        self.taken = taken
        self.sites = sites
        self.listening = listening

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad and self.listening() and not _is_of_transform(sys._getframe(1)):
            wanted = not (kwargs or {}).get("materialize_grads")
            answer = tuple(None if g is None else g.requires_grad for g in result) if wanted else ()
            self.taken.setdefault(self.sites.here(), []).append(answer)
        return result


def _is_of_transform(frame: types.FrameType | None) -> bool:
    """Whether torch.func makes a call of torch.autograd.grad; other modes may hand it on between."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") in ("torch.overrides", "torch.autograd")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch._functorch")


class Survey(Listener):
    """Notes where each call of apply was made, while it is open.

    Attributes:
        behind: The autograd nodes of what was called while a backward ran, and the node whose backward, or hook, it was: in the file they are inside of that.
        made: The autograd nodes of each tensor that a call returned (one for each level of torch.func), and the call.
        hooked: The autograd node of each tensor that the model hooked, the hook, what removes it, and where.
        operators: The calls of operators that are not torch's own.
        changed: The saved_tensors_hooks that give back something else than they were given, as text.
        taken: What each call of torch.autograd.grad that the forward made gave, by module and line.
        backwards: The backward of each call of a Function, or of a kept operator.
        given: Is told the arguments of each call of apply.
        draws: What the forward draws from Python's and NumPy's generators outside of such calls.
        calls: What each call was given and gave, for an exporter that captures without values; None: nobody asks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        keeps: Callable[[Operator], bool] = lambda _: False,
        fakes: bool = False,
        chosen: Callable[[Any], object] | None = None,
    ) -> None:
        """Args:
        model: The model that runs.
        keeps: Which operators become one node of the file.
        fakes: Whether the exporter believes fake kernels: they are compared with what the operators return.
        chosen: Which of torch's own operators become nodes, too; None: none of them.
        """
        super().__init__()
        self._keeps, self._chosen = keeps, chosen
        self._fakes = FakeKernels() if fakes else None
        self.operators: list[OperatorCall] = []
        self.behind: list[tuple[Any, Any]] = []
        self.made: list[tuple[Any, Call]] = []
        self.hooked: list[tuple[Any, Any, Any, Call]] = []
        self.changed: list[str] = []
        self.taken: Answers = {}
        self.backwards: list[Backward | ModuleBackward] = []
        self.given: Callable[[Any], None] = lambda _: None
        self.calls = EagerCalls("in eager mode the model makes no call of it, with tensors of these sizes, on this line") if fakes else None
        self.draws = Draws()
        self._sites = Callsites(model)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._hooks_noted())
        if self._chosen is not None:
            self._open.enter_context(OperatorsSeen(self, self._chosen))
        self._open.enter_context(_GradientsNoted(self.taken, self._sites, self.listening))
        self.changed = self._open.enter_context(saved_tensors_compared())
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._open.close()

    @contextlib.contextmanager
    def _hooks_noted(self) -> Iterator[None]:
        thread, original = threading.get_ident(), torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            with private.unheard():  # a mode would be handed this very function again
                handle = original(tensor, hook)  # type: ignore[no-untyped-call]
            if threading.get_ident() == thread and tensor.grad_fn is not None:
                self.hooked.append((tensor.grad_fn, hook, handle, self._sites.call()))
            return handle

        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.register_hook = original  # type: ignore[method-assign]

    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        self.given((args, kwargs))
        needing = needing_gradients(cls, args, kwargs)
        returned = self._called(cls, args, kwargs)
        with self.deaf(), self.draws.apart():
            result = original_apply(cls, args, kwargs)
        call = self._sites.call()
        returned(result, (call.module, call.source))
        self.backwards += backward_of(cls, result, needing, call)
        made = [(t.grad_fn, call) for t in _layers(result) if t.grad_fn is not None]
        self.made += made
        self._note_backward(node for node, _ in made)
        return result

    def operator(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Make the call; what a kept one calls inside belongs to it."""
        operator = Operator.of(overload)
        kept = self._keeps(operator)
        sources = _nodes_of((args, kwargs))
        if kept:
            needing = needing_gradients(operator, args, kwargs)
            with self.deaf(), self.draws.apart():
                returned = self._called(operator, args, kwargs)
                result = call()
                returned(result, self._sites.here())
                if self._fakes is not None:
                    self._fakes.check(operator, args, kwargs, result, self._sites.call())
            self.backwards += backward_of(operator, result, needing, self._sites.call())
        else:
            result = call()
        known = set(map(id, sources))
        made = tuple(node for node in _nodes_of((result, args, kwargs)) if id(node) not in known)
        if made:
            self.operators.append(OperatorCall(operator, kept, made, sources, self._sites.call()))
        self._note_backward(made)
        return result

    def module(self, opaque: OpaqueModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call; what the module calls inside belongs to it."""
        given = (*opaque.state(), *args)
        self.given((given, kwargs))
        sources, call = _nodes_of((given, kwargs)), self._sites.call()
        with self.deaf():
            parts = opaque.parts()
        noted = self._called(opaque, (*parts, *args), kwargs)
        with self.deaf(), self.draws.apart():
            result = opaque.call(args, kwargs)
        returned = (result, *opaque.written()) if opaque.changes else result
        noted(returned, (call.module, call.source))
        self.backwards.append(ModuleBackward.of(opaque, given, kwargs, result, call))
        known = set(map(id, sources))
        made = tuple(node for node in _nodes_of(result) if id(node) not in known)
        if made:
            self.operators.append(OperatorCall(opaque, True, made, sources, call))
        self._note_backward(made)
        return result

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any, tuple[str, str]], None]:
        """As `EagerCalls.called`, where somebody asks for the calls."""
        if self.calls is None or torch.compiler.is_dynamo_compiling():
            return lambda result, place: None
        return self.calls.called(function, args, kwargs)

    def _note_backward(self, made: Iterable[Any]) -> None:
        running = private.running_node()
        if running is not None:
            self.behind += [(node, running) for node in made]


def _nodes_of(values: Any) -> tuple[Any, ...]:
    return tuple(t.grad_fn if t.grad_fn is not None else get_gradient_edge(t).node for t in _layers(values) if t.requires_grad)


def _layers(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among some values, and under torch.func what each of them wraps: gradients of the result flow through the plain ones."""
    for leaf in expand_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield from private.layers_of(leaf)
