"""len(x) of a tensor while a model is traced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "is_open", "lengths_of_class", "lengths_stay_open", "number_of", "open_sizes"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="len(x) of an open axis is the example's number: torch.export gives up the open axis, TorchScript writes the number",
)

_len = len
#: Packages whose functions no model is made of.
_NOT_MODELS = {"builtins", "torch", "symbolics", "exporter", "abc", "typing", "collections"}
#: In a trace of TorchScript, the example's sizes of the open axes.
_open: ContextVar[Collection[int]] = ContextVar("_open", default=())


def _length(x: Any, /) -> Any:
    """`len`, which Python makes a number of: of a tensor, its first size, as ``x.shape[0]`` is."""
    if not isinstance(x, torch.Tensor) or not x.dim():
        return _len(x)
    if torch.compiler.is_dynamo_compiling() or not private.is_tracing():
        return x.shape[0]
    with private.paused_capture():
        number = _len(x)
    return x.shape[0] if number in _open.get() else _len(x)


def _modules_of(classes: Collection[type]) -> list[ModuleType]:
    """The modules of Python of the packages that some classes come from, and the program's own."""
    packages = {"__main__", *(cls.__module__.partition(".")[0] for cls in classes)} - _NOT_MODELS
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages and isinstance(module, ModuleType)]


def lengths_stay_open(model: torch.nn.Module) -> AbstractContextManager[None]:
    """While the block runs, `len` is ours in the packages of the model: Python's own cannot give a size that is open."""
    return private.standing_for_len(_length, _modules_of({cls for module in model.modules() for cls in type(module).__mro__}))


def lengths_of_class(cls: type) -> AbstractContextManager[None]:
    """The same in the packages of a Function."""
    return private.standing_for_len(_length, _modules_of(cls.__mro__))


def number_of(size: Any) -> int:
    """A size in a trace of TorchScript, where each is a tensor, as the example's number."""
    with private.paused_capture():
        return int(size)


def is_open(size: Any) -> bool:
    """Whether a size is open, in either exporter's capture; in a trace of TorchScript also a fixed one of the same number as an open one."""
    return number_of(size) in _open.get() if private.is_tracing() else not isinstance(size, int)


@contextlib.contextmanager
def open_sizes(sizes: Collection[int]) -> Iterator[None]:
    """Which lengths are open in a trace of TorchScript, where each size is a tensor: the others stay numbers."""
    token = _open.set(sizes)
    try:
        yield
    finally:
        _open.reset(token)
