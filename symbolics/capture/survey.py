"""The calls of an eager run, and its hooks on gradients: made as they are, and noted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Self

import torch

from symbolics.capture.callsite import Call, Callsites
from symbolics.capture.interception import original_apply
from symbolics.capture.listener import Listener
from symbolics.capture.other_hooks import saved_tensors_compared
from symbolics.node.containers import expand_leaves

__all__ = ["Survey"]


class Survey(Listener):
    """Notes where each call of apply was made, while it is open.

    Attributes:
        made: The autograd node of each tensor that a call returned, and the call.
        hooked: The autograd node of each tensor that the model hooked, the hook, what removes it, and where.
        changed: The saved_tensors_hooks that give back something else than they were given, as text.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.made: list[tuple[Any, Call]] = []
        self.hooked: list[tuple[Any, Any, Any, Call]] = []
        self.changed: list[str] = []
        self._sites = Callsites(model)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._hooks_noted())
        self.changed = self._open.enter_context(saved_tensors_compared())
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._open.close()

    @contextlib.contextmanager
    def _hooks_noted(self) -> Iterator[None]:
        thread, original = threading.get_ident(), torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
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
        with self.deaf():
            result = original_apply(cls, args, kwargs)
        call = self._sites.call()
        self.made += [(t.grad_fn, call) for t in expand_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        return result
