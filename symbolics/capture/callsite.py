"""Where a call was made: the module, the line of the user's code, the operator around it."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.call import Autocast

__all__ = ["Call", "Callsites", "autocast_state"]


@dataclass(frozen=True)
class Call:
    """Where a call was made.

    Attributes:
        module: The path of the module, "" for the root.
        source: ``module.name:line`` of the code, "" where nobody knows.
        operator: The operator of torch.library that made it, "" for a model's own code.
        code: The functions that were running.
    """

    module: str = ""
    source: str = ""
    operator: str = ""
    code: frozenset[types.CodeType] = field(default=frozenset(), compare=False)


class Callsites:
    """Knows the modules of a model, and finds the innermost of them on the stack.

    By their attributes: where a model has a module twice, torch.export runs other objects in the place of modules, with the same ``__dict__``.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._modules = {} if model is None else {id(vars(module)): name for name, module in model.named_modules()}

    def here(self) -> tuple[str, str]:
        """The path of the module whose forward is running, and the line of the user's code that is: of a module around it, where its own is torch's.

        NumPy's lines are as little the user's as torch's are.
        """
        source, found, frame = "", None, sys._getframe(1)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name != "torch" and not name.startswith(("torch.", "numpy.", "symbolics.", "exporter.")):
                source = source or f"{name}:{frame.f_lineno}"
            if frame.f_code.co_varnames[:1] == ("self",):
                owner = frame.f_locals.get("self")
                path = self._modules.get(id(vars(owner))) if issubclass(type(owner), torch.nn.Module) else None
                found = path if found is None else found
                if found is not None and (source or path == ""):
                    return found, source
            frame = frame.f_back  # type: ignore[assignment]
        return found or "", source

    def call(self) -> Call:
        """The whole account, the innermost operator of torch.library and all functions on the stack among it."""
        operator, code = "", set()
        frame: Any = sys._getframe(1)
        while frame is not None:
            code.add(frame.f_code)
            if not operator and frame.f_globals.get("__name__") == "torch._ops":
                operator = private.operator_name(frame.f_locals.get("self"))
            frame = frame.f_back
        return Call(*self.here(), operator, frozenset(code))


def autocast_state() -> Autocast:
    """The autocast state around this code."""
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    dtypes = {d: str(torch.get_autocast_dtype(d)).removeprefix("torch.") for d in devices}
    return Autocast(dtypes, torch.is_autocast_cache_enabled()) if dtypes else Autocast()
