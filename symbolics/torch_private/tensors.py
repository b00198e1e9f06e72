"""Tensors and their memory."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Hashable

import torch

from .watching import unheard

__all__ = [
    "base_of",
    "from_dlpack",
    "has_no_value",
    "is_fake",
    "is_of_a_capture",
    "is_saved_by_its_maker",
    "own_memory",
    "release_weak_storage",
    "shape_of_edge",
    "shares_memory",
    "storage_key",
    "storage_ref",
    "weak_storage",
]

#: What torch.utils.dlpack.from_dlpack ends in, for a capsule: 0.5 us against 1.1.
from_dlpack = torch._C._from_dlpack


def weak_storage(tensor: torch.Tensor) -> int:
    """A weak reference to the memory of a tensor, which `release_weak_storage` takes back. 0.3 us with that; the public way
    (torch.multiprocessing.reductions.StorageWeakRef) is slower, and cannot give the memory back."""
    return tensor.untyped_storage()._weak_ref()  # type: ignore[return-value]  # an address, whatever its stub says


#: Drop what `weak_storage` returned.
release_weak_storage = torch.UntypedStorage._free_weak_ref


def own_memory(weak: int) -> None:
    """Give a storage over memory of somebody else a copy of its own, in place: each tensor that shares it, also one that
    autograd has saved, reads the copy from here on. Nothing but sharing it with other processes does that.

    Where there is no room for shared memory, each tensor that Python knows gets a copy; one that autograd alone holds gets none.

    Args:
        weak: From `weak_storage`; a storage that is gone is no error.
    """
    storage = torch.UntypedStorage._new_with_weak_ptr(weak)
    if storage is None:
        return
    with contextlib.suppress(RuntimeError, OSError):
        if sys.platform == "win32":
            storage.share_memory_()
            return
        room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        # Writing beyond the room would end the process.
        if room is None or room.f_bavail * room.f_frsize > storage.nbytes() + (1 << 20):
            storage._share_fd_cpu_()  # share_memory_() starts a process where the strategy is "file_system"
            return
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and _is_over(found, storage):
            found.data = found.detach().clone()


def _is_over(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return tensor.untyped_storage()._cdata == storage._cdata
    except (RuntimeError, NotImplementedError):
        return False  # it has none


def shape_of_edge(edge: torch.autograd.graph.GradientEdge) -> tuple[int, ...]:
    """The shape of the tensor that a gradient edge stands for. The edge's public parts are a node and a number, and neither says it."""
    return tuple(edge.node._input_metadata[edge.output_nr].shape)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors (fake ones too) have one storage: a change of one is a change of the other."""
    return bool(torch._C._is_alias_of(a, b))


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tensors of one storage have in common, while it lives; None for a tensor without memory of its own (a subclass that wraps others)."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
    return storage._cdata if storage.nbytes() or not tensor.numel() else None


def storage_ref(tensor: torch.Tensor) -> Hashable | None:
    """What tensors of one storage have in common, also after it was freed: no other storage gets an equal one. Asks for no size: a fake one may be unknown."""
    from torch.multiprocessing.reductions import StorageWeakRef

    try:
        with unheard():
            return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, itself where it is none: autograd knows a change of a view as one of its base. ``_base`` has no public name."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def is_saved_by_its_maker(tensor: torch.Tensor) -> bool:
    """Whether the backward of what computed a tensor reads it, as that of exp does. The node's attributes ``_saved_...`` have no public list."""
    node = tensor.grad_fn
    for name in dir(node) if node is not None else ():
        if name.startswith("_saved_") and not name.startswith("_saved_self_sym"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # it was changed since, or freed
                return True
            if any(
                isinstance(each, torch.Tensor) and shares_memory(each, tensor) for each in (saved if isinstance(saved, tuple) else (saved,))
            ):
                return True
    return False


def has_no_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data, and it is not known what they would be: asking for its truth is an error in torch.export."""
    return is_fake(tensor) and getattr(tensor, "constant", None) is None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_of_a_capture(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a run on tensors without data, or stands for one: outside of it nothing can be done with it."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return is_fake(tensor) or isinstance(tensor, FunctionalTensor) or torch._is_functional_tensor(tensor)
