"""The ``requires_grad`` flags that a forward changes: a graph has none, so what is read without its flag is read through a stopped copy.

``w.requires_grad_(False)``, a few calls, ``w.requires_grad_(True)``: in eager mode the calls between let no gradient through to ``w``, the others
do. And under an exporter the model's own input, and what is made of it, is no leaf, whose flag PyTorch would not let anybody change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private

__all__ = ["Flags", "Read", "is_inplace"]

_FLAG = torch.Tensor.requires_grad
_GETTERS_OF_ITSELF = (torch.Tensor.data, torch.Tensor.grad)


@dataclass(frozen=True)
class Read:
    """The arguments of a call, as it is made.

    Attributes:
        args, kwargs: The arguments.
        copies: Each tensor that is read through a stopped copy, and the copy.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def result(self, result: Any) -> Any:
        """What the call returned; its own argument, where that is all it did (``x.float()`` of floats)."""
        return next((tensor for tensor, copy in self.copies if result is copy), result)


class Flags:
    """The tensors whose flag a forward has taken away.

    Args:
        stopped: Makes of a detached tensor the one that is read in its place.
    """

    def __init__(self, stopped: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stopped = stopped
        self._taken: dict[int, torch.Tensor] = {}
        self._read: list[tuple[torch.Tensor, torch.autograd.graph.GradientEdge]] = []

    def change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Make a call that sets the flag of a tensor, and give its result in a tuple; None for any other call."""
        setter = func is torch.Tensor.requires_grad_ or (getattr(func, "__self__", None) is _FLAG and func.__name__ == "__set__")
        if not setter or not args:
            return None
        tensor = args[0]
        if bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            self._taken.pop(id(tensor), None)
        elif tensor.requires_grad:
            self._taken[id(tensor)] = tensor
        if tensor.is_leaf:
            func(*args, **kwargs)
        return (tensor if func is torch.Tensor.requires_grad_ else None,)

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read:
        """The arguments that a function gets in place of these.

        Args:
            func: The function; what it changes in place, it is given itself. None for a Function or an operator.
            args, kwargs: The arguments.
        """
        if not self._taken or any(getattr(func, "__self__", None) is getter for getter in _GETTERS_OF_ITSELF):
            return Read(args, kwargs)
        changed = args[0] if args and func is not None and is_inplace(func.__name__) else None
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def read(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is changed or id(tensor) not in self._taken:
                return tensor
            copies.append((tensor, self._stopped(tensor.detach())))
            return copies[-1][1]

        args, kwargs = pytree.tree_map_only(torch.Tensor, read, (args, kwargs))
        return Read(args, kwargs, tuple(copies))

    def note(self, read: Read, result: Any) -> None:
        """Remember what a call made of stopped copies."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        with private.paused_capture():
            edges = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves]
        self._read += [(tensor, edge) for tensor, _ in read.copies for edge in edges]

    def given_back(self) -> set[tuple[Any, int]]:
        """Where in the autograd graph stands what was made without the flags of tensors that have them again."""
        return {(edge.node, edge.output_nr) for tensor, edge in self._read if id(tensor) not in self._taken}


def is_inplace(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__init__"))
    return name.endswith("_")
