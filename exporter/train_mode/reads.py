"""State is what a forward reads before it writes it: the one definition, for buffers, parameters and attributes of modules.

What a model only writes (a note for people, a value kept for the backward) starts anew in each call: no file needs to carry it. A forward counts
in both modes: the vector of a spectral norm is only written in training, and read in evaluation. Eager runs show what is read, as `Reads` watches
them; the graph shows it, too, as `is_read` has it, also of branches that the example did not take. State is what either sees. Where there was no
eager run, all that is written counts. What is handed on to another name is read: the next call may read it there.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self
from weakref import ref

import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from exporter.train_mode.tallies import NUMBERS, Tally
from symbolics import torch_private as private

__all__ = ["OWN", "Reads", "attributes_of", "is_read"]

# Operators that replace every element of their first argument.
_OVERWRITING = frozenset((
    "copy_", "fill_", "zero_", "set_", "_foreach_copy_", "_foreach_zero_",
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
))  # fmt: skip
# Those that ask their first argument for its shape and type alone.
_SHAPE_ONLY = frozenset((
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "copy", "fill", "zero",
))  # fmt: skip
# What hands out values without an operator.
_OUTSIDE = frozenset(("numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "__dlpack__", "__reduce_ex__"))
_DEPTH = 4  # of containers in containers
OWN = frozenset(torch.nn.Module().__dict__)  # what every module has: parameters and buffers, hooks, the mode


def is_read(value: ir.Value) -> bool:
    """Whether anything in a graph, or in a body of it, depends on what a value holds, beyond its shape and type."""
    return value.is_graph_output() or any(
        not (
            use.node.op_type in ("Shape", "Size")
            or (use.node.op_type == "CastLike" and use.idx == 1)
            or (use.node.op_type == "Identity" and not is_read(use.node.outputs[0]))
        )
        for use in value.uses()
    )


@dataclass(frozen=True)
class _Memory:
    """The memory of a tensor that a model has, from its first byte to its last."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    def overlaps(self, begin: int, end: int) -> bool:
        if self.begin == self.end:
            return begin == end == self.begin
        return max(self.begin, begin) < min(self.end, end)

    def is_covered(self, tensor: torch.Tensor, begin: int, end: int) -> bool:
        """Whether a tensor over the same memory has all of its elements."""
        alike = tensor.shape == self.tensor.shape and tensor.stride() == self.tensor.stride()
        return (begin, end) == (self.begin, self.end) and (alike or tensor.numel() * tensor.element_size() == end - begin)


class Reads:
    """Watches forwards of a model, while it is open, in its thread.

    Args:
        model: The model, as it is before its forward.

    Attributes:
        first: What was read before it was written: names of buffers, parameters, and tensors that modules have as attributes.
        ever: What was read, before or after; also what has other memory now, of which nobody saw whether it was read.
        overwritten: What was written as a whole, by an operator.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.first: set[str] = set()
        self.ever: set[str] = set()
        self.overwritten: set[str] = set()
        self._model = model
        self._waiting: dict[Any, list[_Memory]] = {}
        self._behind: dict[Any, list[_Memory]] = {}
        self._held: list[torch.Tensor] = []
        self._named: dict[str, tuple[torch.Tensor, Any]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._waiting, self._behind, self._held, self._named = {}, {}, [], {}
        for name, tensor in _tensors(self._model):
            place = _place(tensor)
            self._named[name] = (tensor, place and place[0])
            if place is None:  # its memory is nowhere that could be watched
                self.first.add(name)
                self.ever.add(name)
            else:
                held = tensor.detach()  # a storage that went could have its address taken by the next
                self._waiting.setdefault(place[0], []).append(_Memory(name, held, *place[1:]))
                self._held.append(held)
        self._open.enter_context(private.operators_heard(self._note))
        self._open.enter_context(_Outside(self))
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._open.close()
        for name, tensor in () if failed else _tensors(self._model):
            before, key = self._named.get(name, (None, None))
            if tensor is not before:
                self.read(tensor)
            elif (_place(tensor) or (None,))[0] != key:  # by an assignment to .data
                self.ever.add(name)
        self._waiting, self._behind, self._held, self._named = {}, {}, [], {}

    def read(self, values: Any) -> None:
        """Note that all tensors, and all that is counted, among some values are read."""
        for tensor in pytree.tree_leaves(values):
            if type(tensor) is Tally:
                tensor.asked()
            elif isinstance(tensor, torch.Tensor) and (place := _place(tensor)) is not None:
                self._read(*place)

    def _read(self, key: Any, begin: int, end: int) -> None:
        self.ever.update(each.name for each in self._behind.get(key, ()) if each.overlaps(begin, end))
        if key in self._waiting:
            found = [each for each in self._waiting[key] if each.overlaps(begin, end)]
            self.first.update(each.name for each in found)
            self.ever.update(each.name for each in found)
            self._drop(key, found)

    def _written(self, values: Any) -> None:
        """Note that all tensors among some values get new elements, each of theirs; what else their memory holds stays: a read."""
        for tensor in pytree.tree_leaves(values):
            place = _place(tensor) if isinstance(tensor, torch.Tensor) else None
            if place is None or place[0] not in self._waiting:
                continue
            covered = [each for each in self._waiting[place[0]] if each.is_covered(tensor, *place[1:])]
            self._behind.setdefault(place[0], []).extend(covered)
            self.overwritten.update(each.name for each in covered)
            self._drop(place[0], covered)
            self._read(*place)

    def _drop(self, key: Any, gone: list[_Memory]) -> None:
        left = [each for each in self._waiting[key] if all(each is not other for other in gone)]
        self._waiting[key] = left

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a call of an operator reads, then what it writes."""
        how = _ways(func)
        if how is None:
            self.read((args, kwargs))
            return
        reads, writes = how
        by_name = [*((index, value) for index, value in enumerate(args)), *kwargs.items()]
        self.read([value for place, value in by_name if place in reads])
        self._written([value for place, value in by_name if place in writes])

    @contextlib.contextmanager
    def counted(self, names: Iterable[str]) -> Iterator[None]:
        """Note, while the block runs, which numbers that modules have as attributes matter for more than their own next value: those are read.

        Args:
            names: Their names. What is in a tuple, and a bool, counts as read.

        Raises:
            Exception: What the block raises; the numbers are then those from before it.
        """
        alive = list[ref[Tally]]()
        wanted, before = set(names), list[tuple[Any, Any, Any]]()
        for name, holder, key, value in _places(self._model):
            if name in wanted and not isinstance(holder, tuple) and type(value) in NUMBERS and not isinstance(value, bool):
                before.append((holder, key, value))
                holder[key] = Tally(value, frozenset((name,)), self.first.update, alive)
                wanted.remove(name)
        self.first.update(wanted)
        try:
            yield
        except BaseException:
            for holder, key, value in before:
                holder[key] = value
            raise
        finally:
            for name, holder, key, value in list(_places(self._model)) if alive else ():
                if type(value) is Tally:
                    value.handed_on(name)
                    if isinstance(holder, tuple):
                        value.asked()
                    else:
                        holder[key] = value.plain()
            value = None
            for each in alive:
                if (tally := each()) is not None:  # somebody keeps it where nobody looks
                    tally.asked()


class _Outside(TorchFunctionMode):
    """Tells of what goes past operators."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in _OUTSIDE:
            self._reads.read(args)
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _ways(func: Any) -> tuple[frozenset[int | str], frozenset[int | str]] | None:
    """Which arguments an operator reads, and which it writes, by position and name; None where it does not say."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    name = schema.name.rpartition("::")[2]
    views = any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns)
    reads, writes = set[int | str](), set[int | str]()
    for index, argument in enumerate(schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written:
            writes |= {index, argument.name}
        shown = argument.is_out or (index == 0 and (name in _SHAPE_ONLY or (written and name in _OVERWRITING)))
        if not shown and not (views and argument.alias_info is not None):
            reads |= {index, argument.name}
    return frozenset(reads), frozenset(writes)


def _place(tensor: torch.Tensor) -> tuple[Any, int, int] | None:
    """The storage of a tensor, and its first and last byte there; None where it has none of its own."""
    if tensor.layout is not torch.strided or torch.nn.parameter.is_lazy(tensor):
        return None
    with private.unheard():
        key = private.storage_key(tensor)
    if key is None:
        return None
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    length = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return key, begin * size, (begin + int(length)) * size


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers(remove_duplicate=False)
    yield from model.named_parameters(remove_duplicate=False)
    for name, value in attributes_of(model):
        if isinstance(value, torch.Tensor):
            yield name, value


def attributes_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors that the modules have as plain attributes, in lists and dictionaries, too."""
    yield from ((name, value) for name, _, _, value in _places(model))


def _places(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """The same, with the dictionary or list that each is in, and its key there."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in OWN:
                yield from _leaves(f"{path}.{name}".removeprefix("."), module.__dict__, name, value)


def _leaves(name: str, holder: Any, key: Any, value: Any, depth: int = 0) -> Iterator[tuple[str, Any, Any, Any]]:
    if isinstance(value, torch.Tensor) or type(value) in (*NUMBERS, Tally):
        yield name, holder, key, value
    elif isinstance(value, (list, tuple, deque)) and depth < _DEPTH:
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", value, index, item, depth + 1)
    elif isinstance(value, dict) and depth < _DEPTH:
        for item_key, item in value.items():
            if isinstance(item_key, (str, int)):
                yield from _leaves(f"{name}[{item_key!r}]", value, item_key, item, depth + 1)
