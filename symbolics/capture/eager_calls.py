"""The calls of one eager run: what each was given, and what it gave.

A capture by torch.export has no values. Where a forward asks for some (it checks them, it is written in numpy), those of the same
call in the eager run are at hand, and what it returned is known. The tensors are those of the eager run: only their first bytes are
copied, for as long as the call takes, to see whether it changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.binding import Slots, bind
from symbolics.capture.outputs import Outputs
from symbolics.capture.side_effects import times_written
from symbolics.capture.trial import Trial
from symbolics.errors import ExportError
from symbolics.node.containers import expand_leaves
from symbolics.node.operators import Operator

__all__ = ["EagerCall", "EagerCalls", "example_of"]

_SOME = 4096


@dataclass(eq=False)
class EagerCall:
    """One call.

    Attributes:
        values: The tensors among its arguments, in the order of their slots.
        kinds: The shape and dtype of each.
        outputs: What it returned, with the sizes that it had.
        kept: The same tensors, where somebody needs them longer: a capture may meet the call more than once.
    """

    values: list[torch.Tensor]
    kinds: list[tuple[torch.Size, torch.dtype]]
    outputs: Outputs
    kept: list[torch.Tensor] = field(default_factory=list)

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether a captured call may be this one: as many tensors, of these dtypes and, as far as they are known, sizes."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return len(tensors) == len(self.kinds) and all(
            tensor.dtype is dtype and len(tensor.shape) == len(shape) and all(map(_may_be, tensor.shape, shape))
            for tensor, (shape, dtype) in zip(tensors, self.kinds, strict=True)
        )

    def release(self) -> None:
        """Its tensors are needed no more."""
        self.values = []


def _may_be(size: Any, known: int) -> bool:
    """Whether a size of a capture is that of the eager run; one that only a run can tell may be."""
    return (
        size.node.hint == known
        if isinstance(size, torch.SymInt) and size.node.has_hint()
        else isinstance(size, torch.SymInt) or size == known
    )


def example_of(slots: Slots, count: int, seen: EagerCall | None) -> list[Any]:
    """The values of a call in the example, its first slots: tensors (no copies; Parameters where the call has some), sizes as numbers.

    Args:
        slots: The tensors and sizes of the captured call.
        count: How many of them are its arguments.
        seen: The same call in the eager run; a trace has values itself.

    Returns:
        Nothing where they are not known.
    """
    if seen is None and not private.is_tracing():
        return []
    found: list[Any] = []
    with private.paused_capture(), private.real_tensors():
        if seen is not None:
            seen.kept = seen.kept or seen.values
        tensors = iter(seen.kept if seen is not None else ())
        for value, kind in list(zip(slots.values, slots.order, strict=True))[:count]:
            if kind == "size":
                found.append(value.node.hint if isinstance(value, torch.SymInt) and value.node.has_hint() else _number(value))
                continue
            tensor = (value if seen is None else next(tensors, value)).detach()
            found.append(torch.nn.Parameter(tensor, requires_grad=False) if isinstance(value, torch.nn.Parameter) else tensor)
    return [] if any(value is None for value in found) else found


def _number(size: Any) -> int | None:
    return None if isinstance(size, torch.SymInt) else int(size)


@dataclass
class EagerCalls:
    """The calls of Functions and operators of an eager run, in its order, found again by where they were made.

    Attributes:
        missing: Why there may be none, for an error.
    """

    missing: str = "no eager run was made, as with eager_check=False"
    _at: dict[Any, list[EagerCall]] = field(default_factory=dict)
    _next: dict[Any, int] = field(default_factory=dict)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any, tuple[str, str]], None]:
        """A call is about to be made.

        Args:
            function: The Function class, or the `Operator`.
            args, kwargs: The arguments.

        Returns:
            What is to be told the result, and the module and line of the call.
        """
        slots = _slots(function, args, kwargs)
        if slots is None:
            return lambda result, place: None
        with private.unheard():
            before = [(times_written(value), _some_of(value)) for value in slots.values]

        def returned(result: Any, place: tuple[str, str]) -> None:
            if isinstance(function, Operator) and function.changes:
                given = function.signature.bind(*args, **kwargs).arguments
                result = (result, *(given.get(name) for name in function.changes))
            with private.unheard():
                changed = [i for i, (value, was) in enumerate(zip(slots.values, before, strict=True)) if _is_other(value, *was)]
            run = Trial(result, slots.values, changed, [])
            with private.unheard():
                values = [value.detach() for value in slots.values]
                outputs = run.describe([list(t.shape) for t in run.tensors()])
            call = EagerCall(values, [(t.shape, t.dtype) for t in values], outputs)
            self._at.setdefault((_lasting(function), *place), []).append(call)
            self._at.setdefault(_lasting(function), []).append(call)

        return returned

    def like(self, function: Any, place: tuple[str, str], values: Sequence[Any]) -> EagerCall | None:
        """The call of the eager run that a captured call is: the next of that line that fits.

        A capture may go through the model more than once, and through a body of a loop as often as it likes: after the last call of a line comes
        its first. Where the capture cannot say the line, any call of the Function will do.

        Args:
            function: The Function class, or the `Operator`.
            place: The module and the line.
            values: The tensors and sizes among the arguments, fake ones too.
        """
        for key in ((_lasting(function), *place), _lasting(function)):
            calls = self._at.get(key, ())
            start = self._next.get(key, 0)
            for step in range(len(calls)):
                if calls[(start + step) % len(calls)].fits(values):
                    self._next[key] = start + step + 1
                    return calls[(start + step) % len(calls)]
        return None

    def begin(self) -> None:
        """The model is captured from its beginning."""
        self._next.clear()

    def clear(self) -> None:
        """Nothing of the eager run is needed any more."""
        self._at.clear()


def _lasting(function: Any) -> Any:
    """What stands for a Function in every run: its name, where a function makes a class anew each time it is called."""
    made = isinstance(function, type) and "<locals>" in function.__qualname__
    return (function.__module__, function.__qualname__) if made else function


def _slots(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slots | None:
    """The tensors of a call; None where nobody could run it again: under torch.func they are wrappers, without values once their transform ends."""
    if private.transforms_active() or not any(isinstance(leaf, torch.Tensor) for leaf in expand_leaves((args, kwargs))):
        return None
    try:
        bound, _, _ = bind(function, args, kwargs)
    except ExportError:
        return None
    slots = Slots()
    for value in (*bound.args, *(value for _, value in sorted(bound.kwargs.items()))):
        slots.take(value)
    return None if any(map(private.is_fake, slots.values)) else slots  # of a body that torch.cond compiles


def _some_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of some of its bytes: what numpy writes into a tensor's memory has no version."""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_contiguous():
        return None
    return tensor.detach().view(-1)[:_SOME].clone().view(torch.uint8)


def _is_other(tensor: torch.Tensor, version: int, some: torch.Tensor | None) -> bool:
    """Whether a tensor is not as it was, by its version and some of its bytes."""
    if times_written(tensor) != version:
        return True
    now = None if some is None else _some_of(tensor)
    return some is not None and (now is None or not torch.equal(now, some))
