"""Operators that run are watched or answered; or nobody may watch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "answered_draws", "classes_are_asked", "every_result", "has_own_torch_function", "is_random", "operators_heard", "random_operators", "unheard",
    "widened_casts",
]  # fmt: skip


def unheard() -> contextlib.AbstractContextManager[Any]:
    """Neither torch function modes nor subclasses of Tensor hear of the torch functions that run inside."""
    return torch._C.DisableTorchFunction()


def classes_are_asked() -> bool:
    """Whether a ``__torch_function__`` of a tensor class hears of calls here: one that makes the call itself says that it shall not."""
    return bool(torch._C._is_torch_function_enabled())


def has_own_torch_function(kind: Any) -> bool:
    """Whether a tensor class has a ``__torch_function__`` of its own: not that of torch.Tensor, nor none, as a Parameter."""
    function = kind.__torch_function__
    return getattr(function, "__func__", function) not in (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


@functools.cache
def _dispatch_mode() -> type:
    """The base of a mode that hears of operators, and lets torch.cond and the like, which compile what they are given, run as without it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:  # where it is False, the process never compiles again what ran inside
            return True

    return Mode


@functools.cache
def _watch() -> type:
    class Watch(_dispatch_mode()):  # type: ignore[misc]
        def __init__(self, hear: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
            super().__init__()
            self.hear = hear

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with unheard():
                self.hear(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Watch


def operators_heard(hear: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> contextlib.AbstractContextManager[Any]:
    """Call ``hear(operator, args, kwargs)`` before each operator that runs in the block, below autograd: a function mode does not see those of C++."""
    return _watch()(hear)


@functools.cache
def _random_watch() -> type:
    class Watch(_dispatch_mode()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if is_random(func) and not _drops_nothing(func, args, kwargs):
                self.drawn.append(func)
            return func(*args, **kwargs)

    return Watch


def _drops_nothing(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator may draw for its dropout alone (fused attention), and was told to drop nothing."""
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0


@functools.lru_cache(maxsize=1024)
def is_random(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(operator, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


@contextlib.contextmanager
def random_operators() -> Iterator[list[Any]]:
    """Collect the random operators of torch that run in the block, on real tensors or fake ones (which draw nothing)."""
    with _random_watch()() as watch:
        yield watch.drawn


@contextlib.contextmanager
def answered_draws(answer: Callable[[tuple[int, ...], float], torch.Tensor]) -> Iterator[None]:
    """Let ``answer(shape, probability)`` say what is drawn where dropout draws.

    On the CPU all dropouts, those inside LSTM and attention as well, end in this operator.
    """

    class Answering(_dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is not torch.ops.aten.bernoulli_.float:
                return func(*args, **kwargs)
            return args[0].copy_(answer(tuple(args[0].shape), args[1] if len(args) > 1 else kwargs.get("p", 0.5)))

    with Answering():
        yield


@contextlib.contextmanager
def every_result(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Hear of every tensor that an ATen operator returns, those of backward included."""
    from torch.utils import _pytree

    class Listening(_dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in _pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    listener(leaf)
            return result

    with Listening():
        yield


@contextlib.contextmanager
def widened_casts() -> Iterator[None]:
    """Let operators give float64 where they are asked for a narrower float type (`.half()`, `.float()`, ``dtype=``), those of backward included."""
    narrower = (torch.float16, torch.bfloat16, torch.float32)

    class Widening(_dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {name: torch.float64 if value in narrower else value for name, value in (kwargs or {}).items() if name == "dtype"}
            return func(*args, **{**(kwargs or {}), **given})

    with Widening():
        yield
