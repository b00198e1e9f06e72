"""Functions of torch that are written in Python, run so that each call in them is seen by itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["body_of"]


@functools.lru_cache(maxsize=1024)
def body_of(func: Any) -> Callable[..., Any] | None:
    """A composite written in Python (torch.nn.functional.*), without its dispatch to modes; None for anything else."""
    if not isinstance(func, types.FunctionType):
        return None
    checks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    if not checks or "super" in func.__code__.co_names:  # Tensor.unflatten: what it calls comes back here under its own name
        return None
    unheard = dict.fromkeys(checks, lambda *_: False)
    scope = {**func.__globals__, **unheard}
    for name in func.__code__.co_names:  # overrides.has_torch_function(...) in torch._assert and torch.sym_max
        if isinstance(module := func.__globals__.get(name), types.ModuleType) and unheard.keys() & vars(module).keys():
            scope[name] = types.SimpleNamespace(**{**vars(module), **unheard})
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
