"""Who hears of calls of ``Function.apply`` and of operators in a thread: a Recorder, or for a moment a Survey or a test of the capture itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

__all__ = ["Listener", "active_listener", "captured_apply", "captured_operator", "wanted"]

_thread = threading.local()


class Listener:
    """Stands in for apply, in its thread, while it is open. What a Function calls inside its own forward it does not hear."""

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> Self:
        self._outer = active_listener()
        _thread.listener = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.listener = self._outer

    def listening(self) -> bool:
        """Whether a call in this thread, now, is meant for it."""
        return self._depth == 0

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """While the block runs, calls go their own way."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for ``cls.apply(*args, **kwargs)``."""
        raise NotImplementedError

    def operator(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Stand in for ``overload(*args, **kwargs)``, which ``call`` makes."""
        return call()

    def module(self, opaque: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a call of a module that ``opaque=`` names (an `OpaqueModule`)."""
        raise NotImplementedError


def active_listener() -> Listener | None:
    """The listener of this thread, None where nobody listens."""
    return getattr(_thread, "listener", None)


def captured_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """What stands in for a call of apply that is `wanted`."""
    listener = active_listener()
    assert listener is not None
    return listener.apply(cls, args, kwargs)


def captured_operator(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
    """What stands in for a call of an operator that is `wanted`."""
    listener = active_listener()
    assert listener is not None
    return listener.operator(overload, args, kwargs, call)


def wanted() -> bool:
    """Whether a call of apply in this thread, now, is meant for somebody."""
    listener = active_listener()
    return listener is not None and listener.listening()
