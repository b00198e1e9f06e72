"""What a forward does beside returning tensors: changing its inputs, drawing random numbers, keeping state.

A file holds none of it. The recorder warns, and names the remedy. What cannot be seen of a run, `kept_state` reads in the source.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.draws import numpy_state

__all__ = ["SideEffects", "same_values", "times_written", "watched"]

_DRAWS = (
    "its forward draws random numbers; each run of the file draws new ones from the generators of its own process: "
    "seed those ({}), or pass the numbers as a tensor"
)


@dataclass
class SideEffects:
    """What one run did.

    Attributes:
        changed: Positions of the tensors that are not as they were before.
        warnings: What else it did, as text.
        state: The names of what it changed that can remember: attributes of the class, and mutable arguments.
    """

    changed: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched(cls: type, arguments: Any, tensors: Sequence[Any]) -> Iterator[SideEffects]:
    """Watch one call.

    Args:
        cls: The Function.
        arguments: What forward gets; its containers and objects are compared with themselves afterwards.
        tensors: Tensors (and other values, ignored) that forward may change, real or fake.
    """
    seen = SideEffects()
    versions = [times_written(t) for t in tensors]
    data = [_data(t) for t in tensors]
    state = _state(cls, arguments)
    # On fake tensors torch's own Python code runs as well, and some of it draws from Python's generator.
    own_draws = any(d is not None for d in data) or random in _modules_of(cls)
    numpy_before, python_before = numpy_state(), random.getstate() if own_draws else None
    with private.random_operators() as drawn:
        yield seen
    for i, tensor in enumerate(tensors):
        # numpy and ctypes write past the version counter.
        if isinstance(tensor, torch.Tensor) and (times_written(tensor) != versions[i] or not _equal(_data(tensor), data[i])):
            seen.changed.append(i)
    if drawn:
        seen.warnings.append(_DRAWS.format("torch.manual_seed"))
    if numpy_before != numpy_state():
        seen.warnings.append(_DRAWS.format("numpy.random.seed"))
    if own_draws and random.getstate() != python_before:
        seen.warnings.append(_DRAWS.format("random.seed"))
    after = _state(cls, arguments)
    seen.state = [name for name in {**state, **after} if not _same(state.get(name), after.get(name))]


def _modules_of(cls: Any) -> list[Any]:
    forward = getattr(cls.forward, "__func__", cls.forward)
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return [scope.get(name) for name in code.co_names] if code is not None else []


def _data(tensor: Any) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor) or private.is_fake(tensor) or was_freed(tensor):
        return None
    return tensor.detach().clone()


def was_freed(tensor: torch.Tensor) -> bool:
    """Whether a forward gave the memory of a tensor back (``x.untyped_storage().resize_(0)``, as reversible blocks do): reading it would crash."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None or one.shape != two.shape:
        return one is two
    return same_values(one, two)


def same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same, NaN where NaN."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one, two) or torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


def times_written(value: Any) -> int:
    """How often a tensor was written, 0 for what does not count; a look through ``.data`` has its own count."""
    counts = isinstance(value, torch.Tensor) and not value.is_inference() and not torch.nn.parameter.is_lazy(value)
    return value._version if counts else 0


def _state(cls: type, arguments: Any) -> dict[str, Any]:
    """name -> a shallow picture of each thing that can remember: the attributes of the class, and mutable arguments."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__ if isinstance(cls, type) else ():
        if owner is torch.autograd.Function:
            break
        for name, value in vars(owner).items():
            if not name.startswith("__"):
                found[f"{owner.__qualname__}.{name}"] = _picture(value)
    args, kwargs = arguments
    for name, value in [*((f"argument {i}", v) for i, v in enumerate(args)), *((f"argument {k}", v) for k, v in kwargs.items())]:
        found[name] = _picture(value)
    return found


def _picture(value: Any) -> Any:
    """A value, or a copy of what is in it, that later shows whether it was changed."""
    if type(value) is dict:
        return ("dict", *[item for pair in value.items() for item in pair])
    if type(value) in (list, set):
        return (type(value).__name__, *value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return ("value", value)
    return ("object", *[item for pair in vars(value).items() for item in pair])


def _same(one: Any, two: Any) -> bool:
    return (
        one is not None
        and two is not None
        and len(one) == len(two)
        and all(a is b or (type(a) is str and a == b) for a, b in zip(one, two, strict=True))
    )
