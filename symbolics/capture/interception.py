"""How a call of ``Function.apply`` is caught before it begins: the one place that knows which way serves which torch.

Whatever way: late bound (``MyFn.apply(x)``) and early bound calls (``f = MyFn.apply`` taken before), subclasses that override
``apply`` and call ``super().apply``, keyword arguments. The stand-in gets class and arguments as the caller wrote them, in the
caller's grad mode; no ctx exists yet and no tracer has heard of the call.

===============  ==========================================  ==============================================================
torch            what ``Function.apply`` is                  the way
===============  ==========================================  ==============================================================
2.13             a classmethod that ends in                  a classmethod on the base class ``_SingleLevelFunction``
                 ``super().apply``
2.14, 2.15       a method in C                               the two functions of Python that C hands a call over to: one
                                                             binds defaults, the other runs Functions under torch.func
===============  ==========================================  ==============================================================

In C, ``apply`` first looks up ``cls.setup_context``. Where it is the Function's own, C lets ``_bind_default_args`` bind the
arguments; then, if a transform of torch.func is active, ``_call_custom_function_call(cls, args, kwargs)`` makes the whole call and C
returns its result. So while calls are wanted the metaclass answers the look-up with a setup_context, the binding enters a
transform, and the call leaves it before anything else runs.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from symbolics import torch_private as private

__all__ = ["TESTED", "belongs_to_torch", "intercept", "is_method_of_c", "original_apply", "settled"]

#: The releases of torch that the whole suite has run on; pyproject.toml says the same.
TESTED = ("2.13", "2.14", "2.15")

StandIn = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_thread = threading.local()


def is_method_of_c() -> bool:
    """Whether this torch's ``Function.apply`` is written in C."""
    return not hasattr(torch.autograd.Function.apply, "__func__")


def intercept(stand_in: StandIn, wanted: Callable[[], bool]) -> Callable[[], None]:
    """Catch every call of ``apply``, in every thread, until the returned function is called.

    Args:
        stand_in: Called as ``stand_in(cls, *args, **kwargs)`` in place of the call; what it returns is the call's result.
        wanted: Whether a call of this thread, now, is to be caught. Others run as if nothing were installed.

    Returns:
        What undoes it.

    Raises:
        AttributeError: This torch has none of the names that the way needs.
    """
    return _intercept_c(stand_in, wanted) if is_method_of_c() else _intercept_python(stand_in, wanted)


def original_apply(cls: type, args: _Args, kwargs: _Kwargs) -> Any:
    """``cls.apply(*args, **kwargs)`` of torch itself; what it calls inside may be caught again."""
    if not is_method_of_c():
        return private.apply_of_base(cls)(*args, **kwargs)
    _thread.passing = cls
    try:
        return private.apply_of_base(cls)(*args, **kwargs)
    finally:
        _thread.passing = None


def belongs_to_torch(cls: type) -> bool:
    """Whether a Function is part of how torch works, rather than something that a model calls.

    Those of torch's public packages are a model's as any other: torch.nn's CrossMapLRN2d, torch.distributed's collectives.
    """
    parts = cls.__module__.split(".")
    if parts[0] != "torch":
        return False
    return parts[1:2] == ["autograd"] or (len(parts) > 1 and parts[1].startswith("_")) or private.is_module_hook(cls)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Leave no trace of calls that the block did not finish: Ctrl-C may come between entering a transform and leaving it, and torch leaves a level
    of forward-mode differentiation open where its exporter fails inside a jvp."""
    depth, level = private.transform_depth(), private.forward_level()
    try:
        yield
    finally:
        private.leave_transforms(depth)
        private.leave_forward_levels(level)
        _thread.entered = _thread.looked_up = _thread.passing = None


# ---------------------------------------------------------------------------------------------------- torch 2.13


def _intercept_python(stand_in: StandIn, wanted: Callable[[], bool]) -> Callable[[], None]:
    base = private.SingleLevelFunction

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return stand_in(cls, *args, **kwargs) if wanted() else original_apply(cls, args, kwargs)

    base.apply = classmethod(apply)  # type: ignore[attr-defined]
    return lambda: delattr(base, "apply")


# ---------------------------------------------------------------------------------------------- torch 2.14, 2.15

#: Instructions by which Python code reads an attribute; C's own look-ups happen inside a call.
_READS = {code for name, code in dis.opmap.items() if name.startswith(("LOAD_ATTR", "LOAD_METHOD"))}


def _intercept_c(stand_in: StandIn, wanted: Callable[[], bool]) -> Callable[[], None]:
    meta, base = private.FunctionMeta, private.SingleLevelFunction.setup_context
    bind_default_args, call_transformed = private.helpers_of_apply()

    def look_up(cls: type, name: str) -> Any:
        value = type.__getattribute__(cls, name)
        if name == "_backward_cls":  # the look-up that follows in a call that goes its own way; forward comes next
            _thread.passing = None
        # C asks the base class once, for what to compare with.
        if name != "setup_context" or cls is private.SingleLevelFunction or getattr(_thread, "passing", None) is cls:
            return value
        if not wanted() or private.transforms_active() or _is_read(sys._getframe(1)):
            return value
        _thread.looked_up = cls
        return _setup_context if value is base else value

    def bind(forward: Any, args: _Args, kwargs: _Kwargs | None) -> tuple[_Args, _Kwargs]:
        cls, _thread.looked_up = getattr(_thread, "looked_up", None), None
        if cls is None or not wanted() or type.__getattribute__(cls, "forward") != forward:
            return bind_default_args(forward, args, kwargs)
        if type.__getattribute__(cls, "setup_context") is not base:
            args, kwargs = bind_default_args(forward, args, kwargs)
        _thread.entered = cls
        private.enter_transform()
        return args, kwargs or {}

    def call(cls: type, args: _Args, kwargs: _Kwargs | None) -> Any:
        if getattr(_thread, "entered", None) is not cls:
            return call_transformed(cls, args, kwargs)
        private.leave_transform()
        _thread.entered = None
        return stand_in(cls, *args, **(kwargs or {}))

    def undo() -> None:
        del meta.__getattribute__
        private.replace_helpers_of_apply(bind_default_args, call_transformed)

    private.replace_helpers_of_apply(bind, call)
    type.__setattr__(meta, "__getattribute__", look_up)
    return undo


def _is_read(frame: Any) -> bool:
    """Whether the instruction that a frame stands at reads an attribute, rather than calls something."""
    return frame.f_code.co_code[frame.f_lasti] in _READS


def _setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
    """Stands for a setup_context that a Function does not have; C asks only whether there is one."""
    raise NotImplementedError("setup_context is not implemented.")
