"""Which operators there are, and the inputs that each is called with.

`operators` has torch's database. `groups` makes the calls of one operator: samples of the database, and the same call at
extreme values and shapes. Tensors become inputs of a small module; every other argument is fixed in it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tests.operators import named

__all__ = ["IN_PLACE", "UNINITIALIZED", "Call", "Group", "Operator", "groups", "operators"]

#: What these return is not initialized: there is nothing to compare.
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
#: They change their argument; an in-place call has its own tests.
IN_PLACE = {"resize_", "resize_as_", "zero_", "normal_in_place"}
_MOST = 300  # samples of one operator that are looked at
_GRID = [-6.0, -3.0, -2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.5, 3.0, 6.0]
_SATURATED = [-100.0, 100.0, -20.0, 20.0]


@functools.cache
def operators() -> dict[str, Any]:
    """Name -> OpInfo, in the order of the alphabet; the name is that of torch's own tests (``nn_functional_relu``)."""
    if importlib.util.find_spec("expecttest") is None:
        # The database's module imports it for torch's tests alone, which take their base class from it.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal import common_methods_invocations as database

    # Operators that draw numbers are wrapped there, to draw the same ones: here they shall say what they are.
    database.wrapper_set_seed = _unwrapped
    return {info.formatted_name: info for info in sorted(database.op_db, key=lambda info: info.formatted_name.lower())}


def _unwrapped(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


class Operator(torch.nn.Module):
    """One call as a module: its inputs are the tensors among the arguments, its outputs those among the results."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call.function, call.leaves, call.spec

    def forward(self, *tensors: torch.Tensor) -> Any:
        function, leaves, spec = self._call
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in leaves], spec)
        found = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in found]  # ONNX has no complex tensors
        return real[0] if len(real) == 1 else tuple(real)


_TENSOR = object()


@dataclass
class Call:
    """A call of an operator.

    Attributes:
        function: The operator.
        leaves, spec: Its flat arguments, in which a mark stands for each tensor, and their structure.
        tensors: The tensors.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(function, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec, tensors)

    @property
    def floats(self) -> list[int]:
        """The numbers of its float tensors."""
        return [i for i, t in enumerate(self.tensors) if t.is_floating_point()]

    @property
    def plain(self) -> bool:
        """Whether each tensor is dense and real, and the call has one."""
        return bool(self.tensors) and all(t.layout is torch.strided and not t.is_complex() and not t.is_quantized for t in self.tensors)


@dataclass
class Group:
    """Calls that differ in their values alone, so that one file serves them all.

    Attributes:
        call: What is exported.
        kinds: Word for the inputs -> the tensors; the first are those that are exported.
    """

    call: Call
    kinds: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def groups(name: str, count: int) -> Iterator[Group]:
    """The calls of one operator.

    Args:
        name: As in `operators`.
        count: How many samples of the database.
    """
    yield from _of_database(name, count)
    for kind, (function, tensors) in named.CASES.get(name, {}).items():
        torch.manual_seed(0)
        call = Call.of(function, tuple(tensors()), {})
        yield Group(call, {kind: call.tensors})


def _of_database(name: str, count: int) -> Iterator[Group]:
    info = operators().get(name) if count > 0 else None
    if info is None:
        return
    calls = [call for call in _calls(info) if call.plain]
    if not calls:
        return
    base = next((call for call in calls if _many(call)), calls[0])
    rest = [call for call in calls if call is not base]
    step = max(1, len(rest) // max(1, count - 1))
    chosen = rest[step - 1 :: step][: count - 1]
    yield Group(base, {"sample": base.tensors, **_values(base)})
    for number, call in enumerate(chosen, 2):
        yield Group(call, {f"sample {number}": call.tensors})
    for kind, shape in {"empty": _empty, "0-d": _scalar}.items():
        found = shape(base, calls)
        if found is not None and all(found is not other for other in [base, *chosen]):
            yield Group(found, {kind: found.tensors})


def _calls(info: Any) -> list[Call]:
    """The samples of the database, in the first type of float32, int64 and bool that it has."""
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in info.dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), _MOST))
    except Exception:  # a sample that this machine cannot make (another device, a missing package)
        return []
    return [Call.of(info.op, (sample.input, *sample.args), sample.kwargs) for sample in samples]


def _many(call: Call) -> bool:
    """Whether no tensor is empty, and the first float tensor (or the first of all) has some elements."""
    first = call.tensors[(call.floats or [0])[0]]
    return all(t.numel() for t in call.tensors) and 2 <= first.numel() <= 5000


# ------------------------------------------------------------------------------------------------------------- extremes


def _cycle(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    count = -(-like.numel() // len(values))
    return torch.tensor(values, dtype=like.dtype).repeat(count)[: like.numel()].reshape(like.shape)


def _values(call: Call) -> dict[str, list[torch.Tensor]]:
    """The same shapes with other values."""
    made: dict[str, list[torch.Tensor]] = {}
    floats = call.floats

    def put(kind: str, numbers: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made[kind] = [change(t) if i in numbers else t for i, t in enumerate(call.tensors)]

    if floats:
        first = floats[:1]
        put("zeros", floats, torch.zeros_like)
        if len(floats) > 1:
            put("first zero", first, torch.zeros_like)
            put("second zero", floats[1:2], torch.zeros_like)
        put("bounds", first, lambda t: _cycle(t, [0.0, 1.0]))
        put("grid", first, lambda t: _cycle(t, _GRID))
        put("ties", floats, lambda t: torch.full_like(t, 0.5))
        put("saturated", first, lambda t: _cycle(t, _SATURATED))
        put("large", floats, lambda t: t * 1e4)
        put("tiny", floats, lambda t: t * 1e-6)
    integers = [i for i, t in enumerate(call.tensors) if t.dtype in (torch.int64, torch.int32) and t.numel() > 1]
    if integers and floats:
        put("duplicates", integers, lambda t: t.flatten()[0].expand_as(t).clone())
    return made


def _with(call: Call, tensors: list[torch.Tensor]) -> Call:
    return Call(call.function, call.leaves, call.spec, tensors)


def _empty(base: Call, calls: list[Call]) -> Call | None:
    """A sample with an empty float tensor; else the first one without rows."""
    for call in calls:
        if any(call.tensors[i].numel() == 0 for i in call.floats):
            return call
    rows = next((t.shape[0] for t in base.tensors if t.dim()), None)
    if rows is None:
        return None
    return _with(base, [t[:0].clone() if t.dim() and t.shape[0] == rows else t for t in base.tensors])


def _scalar(base: Call, calls: list[Call]) -> Call | None:
    """A sample whose first tensor has no dimensions; else the first one, each of its tensors by one element."""
    for call in calls:
        if call.tensors[0].dim() == 0:
            return call
    if all(t.numel() for t in base.tensors):
        return _with(base, [t.flatten()[0].clone() for t in base.tensors])
    return None
