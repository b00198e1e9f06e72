"""Functions of torch that are written in Python, run so that each call in them is seen by itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["body_of", "inner_body_of"]


@functools.lru_cache(maxsize=1024)
def body_of(func: Any) -> Callable[..., Any] | None:
    """A composite written in Python (torch.nn.functional.*), without its dispatch to modes; None for anything else."""
    if not isinstance(func, types.FunctionType):
        return None
    checks = _checks(func)
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


def _checks(func: types.FunctionType) -> list[str]:
    """The functions by which a function asks whether it is to hand its call to a mode."""
    return [name for name in func.__code__.co_names if name.startswith("has_torch_function")]


@functools.lru_cache(maxsize=1024)
def inner_body_of(func: Any) -> Callable[..., Any] | None:
    """The body, also of a function that hands on to one of two by a flag, or that calls private helpers (torch.unique_consecutive, F.max_pool2d).

    Those helpers hand their call to a mode under the name of the public function, which would come here again for ever: they run by their bodies, too.
    """
    if not isinstance(func, types.FunctionType):
        return None
    code = func.__code__
    helpers = {
        name: body
        for name in code.co_names
        if name.startswith("_") and isinstance(helper := func.__globals__.get(name), types.FunctionType) and _checks(helper)
        if helper is not func  # F.threshold names itself
        if (body := inner_body_of(helper)) is not None
    }
    chosen_among = {"if_true", "if_false"} <= set(code.co_freevars)
    body = body_of(func) or (func if chosen_among else None)
    if body is None or not (helpers or chosen_among):
        return body
    cells = func.__closure__ or ()
    closure = tuple(types.CellType(inner_body_of(cell.cell_contents) or cell.cell_contents) for cell in cells) if chosen_among else cells
    inner = types.FunctionType(code, {**body.__globals__, **helpers}, func.__name__, func.__defaults__, closure)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner
