"""Views in a trace of TorchScript, which knows of no memory that two tensors share.

Eager's ``h[1:].mul_(2)`` changes h, and every other view of it. The trace has a value for each tensor: so a change goes from the tensor
that was written up to what it is a view of, and from there down to each view that is still alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.errors import ExportError

__all__ = ["Views", "without_new_dimensions"]


@dataclass
class _View:
    """One view.

    Attributes:
        tensor: The view, as long as anybody has it.
        parent: What it looks at.
        func, args, kwargs: The call that made it.
        place: Its place among the call's results, None where it is the result.
    """

    tensor: weakref.ref[torch.Tensor]
    parent: torch.Tensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None

    @property
    def name(self) -> str:
        """What the view was made by; an attribute (``x.T``) by its own name."""
        name = getattr(self.func, "__name__", "")
        return getattr(self.func.__self__, "__name__", name) if name == "__get__" else name


class Views:
    """The views of one trace."""

    def __init__(self) -> None:
        self._views: list[_View] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what a call returned, if it looks at the memory of an argument."""
        if isinstance(result, torch.Tensor):
            if result._is_view() or getattr(func, "__name__", "") in ("detach", "__get__"):
                self._note(func, args, kwargs, result, None)
        elif isinstance(result, (tuple, list)):
            for place, each in enumerate(result):
                if isinstance(each, torch.Tensor) and each._is_view():
                    self._note(func, args, kwargs, each, place)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, place: int | None) -> None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf is not result and private.shares_memory(leaf, result):
                self._views.append(_View(weakref.ref(result), leaf, func, args, kwargs, place))
                return

    def shared(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view, or has one that somebody may read."""
        self._views = [view for view in self._views if view.tensor() is not None]
        return any(private.shares_memory(view.parent, tensor) for view in self._views)

    def follow(self, written: torch.Tensor, dynamic: Collection[int] = ()) -> None:
        """A tensor has a new value in the trace: what shares its memory gets one, too.

        Args:
            written: The tensor.
            dynamic: Example sizes of the dimensions that are declared dynamic.

        Raises:
            ExportError: It is a view of a kind whose place in the whole no graph can say.
        """
        if not self.shared(written):
            return
        with torch.no_grad(), private.unheard():  # what is computed here makes no views of the model's
            current, known = written, {id(written)}
            while (
                view := next((view for view in self._views if view.tensor() is current and id(view.parent) not in known), None)
            ) is not None:
                private.replace_traced(view.parent, _whole(view, current, dynamic))
                current = view.parent
                known.add(id(current))
            for view in self._views:  # in the order in which they were made: what a view looks at comes before it
                tensor = view.tensor()
                if tensor is not None and id(tensor) not in known and id(view.parent) in known:
                    result = view.func(*view.args, **view.kwargs)
                    private.replace_traced(tensor, result if view.place is None else result[view.place])
                    known.add(id(tensor))


#: Calls whose view is the tensor itself.
_SAME = {"detach", "data", "alias", "view_as"}
#: Calls that leave the order of the elements.
_RESHAPES = {"view", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "atleast_1d", "atleast_2d"}
#: Calls that turn dimensions.
_TURNS = {"t", "T", "mT", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"}
#: Calls that give a part, or several, along one dimension: their arguments.
_PARTS = {
    "select": ("dim", "index"), "narrow": ("dim", "start", "length"), "unbind": ("dim",), "split": ("split_size", "dim"),
    "chunk": ("chunks", "dim"), "tensor_split": ("indices_or_sections", "dim"),
}  # fmt: skip


def _whole(view: _View, part: torch.Tensor, dynamic: Collection[int]) -> torch.Tensor:
    """The new value of what a view looks at.

    Args:
        view: The view.
        part: Its new value.
        dynamic: Example sizes of the dimensions that are declared dynamic.
    """
    name, parent = view.name, view.parent
    if name in _SAME:
        return part.clone()
    if name in _RESHAPES:
        return part.reshape(parent.shape)
    if name in _TURNS:
        return part.permute(_turned_back(view))
    index = _index(view, part, dynamic)
    if index is None and not dynamic and parent.is_contiguous():
        with private.paused_capture():
            start = part.storage_offset() - parent.storage_offset()
            places = torch.arange(parent.numel()).as_strided(part.shape, part.stride(), start).reshape(-1).clone()
            once = len(places.unique()) == len(places)
        if once:
            return parent.reshape(-1).scatter(0, places, part.reshape(-1)).reshape(parent.shape)
    if index is None:
        raise ExportError(
            f"it changes in place what {name or view.func}() of another tensor gave, and the trace cannot say what becomes of that tensor: "
            "write into the tensor itself (x[...] = ...)"
        )
    if all(each is Ellipsis or each == slice(None) for each in index):
        return part.reshape(parent.shape)
    whole = parent.clone()
    whole[index] = part.reshape(parent[index].shape)  # the same elements, without dimensions that the index added
    return whole


def without_new_dimensions(index: Any) -> tuple[Any, ...] | None:
    """An index without the dimensions of size 1 that it adds; None where it adds none."""
    each = index if isinstance(index, tuple) else (index,)
    return tuple(one for one in each if one is not None) or (Ellipsis,) if any(one is None for one in each) else None


def _index(view: _View, part: torch.Tensor, dynamic: Collection[int]) -> tuple[Any, ...] | None:
    """By which index a view is a part of what it looks at; None where by none."""
    name, parent = view.name, view.parent
    if name == "__getitem__":
        index = without_new_dimensions(view.args[1]) or view.args[1]
        return index if isinstance(index, tuple) else (index,)
    given = dict(zip(("input", *_PARTS.get(name, ())), view.args)) | view.kwargs
    dim = given.get("dim", 0)
    if name not in _PARTS or not isinstance(dim, int):
        return None
    before = (slice(None),) * (dim % parent.dim())
    if name == "select":
        return (*before, given["index"])
    if name == "narrow":
        return (*before, slice(given["start"], given["start"] + given["length"]))
    with private.paused_capture():  # one of several parts
        size, stride = parent.shape[dim], parent.stride(dim)
        start = (part.storage_offset() - parent.storage_offset()) // stride if stride else 0
        length = part.shape[dim] if name != "unbind" else 1
    if size in dynamic:
        return None
    return (*before, start if name == "unbind" else slice(start, start + length))


def _turned_back(view: _View) -> list[int]:
    """The permutation that undoes a call of `_TURNS`: found with a tensor of which no two sizes are equal."""
    with private.paused_capture():
        sizes = list(range(2, 2 + view.parent.dim()))
        stand_in = torch.empty(sizes, device="meta")
        turned = view.func(*(stand_in if arg is view.parent else arg for arg in view.args), **view.kwargs)
        return [list(turned.shape).index(size) for size in sizes]
