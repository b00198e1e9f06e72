"""Numbers that a model's own forward draws from Python's or NumPy's generator: a capture sees what was drawn, and no draw."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["Draws", "numpy_state"]


class Draws:
    """Who was drawn from since it was made, but for what runs `apart`.

    Attributes:
        sources: ``random`` and ``numpy.random``, those that were.
    """

    def __init__(self) -> None:
        self.sources: list[str] = []
        self._known = _states()

    def look(self) -> None:
        """Compare the generators with what they were at the last look."""
        states = _states()
        self.sources += [name for name, state in states.items() if state != self._known[name] and name not in self.sources]
        self._known = states

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What the block draws does not count: a PythonOp runs its own forward, and draws again."""
        self.look()
        try:
            yield
        finally:
            self._known = _states()


def _states() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": numpy_state()}


def numpy_state() -> tuple[Any, ...]:
    """The state of numpy's own generator, in a form that is cheap to compare."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # somebody set another than numpy's default
        return (str(state),)
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]
