"""What torch raises while code is traced, noted where it is raised.

Code may catch it (``try: ... except Exception: pass``) and go on: then a tracer writes down a way that eager mode may never take, and hears of nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from symbolics.capture.composites import body_of

__all__ = ["Failed", "Raised"]

#: What runs code of the user's: that it returned does not say that its errors were torch's own affair.
_RUNNING = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


class Failed(NamedTuple):
    """A call of torch that raised.

    Attributes:
        name: The function that was called; "" for what is none.
        error: What it raised.
        place: Where.
    """

    name: str
    error: Exception
    place: Any


class Raised:
    """The errors of calls of torch that came out of them.

    Args:
        place: Asked where an error is raised, for `Failed.place`.
    """

    def __init__(self, place: Callable[[], Any] = lambda: None) -> None:
        self.errors: list[Failed] = []
        self._place = place

    def note(self, error: Exception) -> None:
        """Something that is no function of torch has raised: the condition on a number that was read out of a tensor."""
        self.errors.append(Failed("", error, self._place()))

    @contextlib.contextmanager
    def around(self, func: Any, args: tuple[Any, ...]) -> Iterator[None]:
        """The block makes a call of a function of torch; what that catches itself is not noted."""
        before = len(self.errors)
        try:
            yield
        except Exception as error:
            self.errors[before:] = [Failed(getattr(func, "__name__", ""), error, self._place())]
            raise
        if func not in _RUNNING and type(func).__module__ != "torch._ops" and not any(map(callable, args)):
            del self.errors[before:]

    def led_to(self, error: BaseException | None) -> bool:
        """Whether an error is one of them, or was raised where one was handled."""
        known = {id(each.error) for each in self.errors}
        while error is not None and id(error) not in known:
            error = error.__cause__ or error.__context__
        return error is not None

    def mode(self) -> TorchFunctionMode:
        """Notes what the block's calls raise, those of its backward as well."""
        return _Listening(self)


class _Listening(TorchFunctionMode):
    def __init__(self, raised: Raised) -> None:
        super().__init__()
        self.raised = raised

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        body = body_of(func) if func is torch.autograd.grad else None
        with self.raised.around(func, args), contextlib.nullcontext() if body is None else self:
            return (body or func)(*args, **(kwargs or {}))
