"""What torch raises while code runs on tensors without values, noted where it is raised.

Code may catch it (``try: ... except Exception: pass``) and go on: then a tracer writes down a way that eager mode never takes, and hears of nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from symbolics.capture.composites import body_of

__all__ = ["Raised"]

#: What runs code of the user's: that it returned does not say that its errors were torch's own affair.
_RUNNING = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


class Raised:
    """The errors of calls of torch that came out of them.

    Attributes:
        errors: The name of the function that was called, and what it raised.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, Exception]] = []

    def note(self, error: Exception) -> None:
        """Something that is no function of torch has raised: the condition on a number that was read out of a tensor."""
        self.errors.append(("", error))

    def call(self, func: Any, args: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Make a call of a function of torch; what it catches itself is not noted."""
        before = len(self.errors)
        try:
            result = make()
        except Exception as error:
            self.errors[before:] = [(getattr(func, "__name__", ""), error)]
            raise
        if func not in _RUNNING and type(func).__module__ != "torch._ops" and not any(map(callable, args)):
            del self.errors[before:]
        return result

    def led_to(self, error: BaseException | None) -> bool:
        """Whether an error is one of them, or was raised where one was handled."""
        known = {id(each) for _, each in self.errors}
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

        def make() -> Any:
            if body is None:
                return func(*args, **(kwargs or {}))
            with self:
                return body(*args, **(kwargs or {}))

        return self.raised.call(func, args, make)
