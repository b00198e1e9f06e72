"""Sizes in a trace: ``x.shape[0]`` is a tensor there, and what makes a number of it keeps the example's.

So do ``int(x.shape[0])`` and ``range(x.shape[0])``, and what takes a tensor into as many parts as the example has (``x.split(2)``, ``for row in x``);
torch.export gives up the open axis instead. Which of them are of open axes, `exporter.forward.open_axes` sees in the translated graph.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.checks import may_lack_chunks, only_raises
from symbolics.errors import ExportError
from symbolics.node.containers import expand_leaves
from symbolics.quirks import steps_axis

__all__ = ["Number", "Sizes", "asking_frame", "is_traced_size"]

#: What makes a number of Python of a size.
_NUMBERS = {
    "__int__": "int()",
    "__index__": "len(), range() or another use of a size as an integer",
    "__float__": "float()",
    "item": ".item()",
    "tolist": ".tolist()",
    "__array__": "NumPy",
    "numpy": ".numpy()",
}
_INTEGERS = _NUMBERS.keys() - {"__float__", "__array__", "numpy"}
_POOLS = {f"{kind}_pool{n}d" for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}
_CHUNK = ".chunk()"
_PARTS = {"chunk": _CHUNK, "split": ".split()", "split_with_sizes": ".split_with_sizes()", "unbind": ".unbind(), or a loop over a tensor,"}


class Number(NamedTuple):
    """A size that became a number of Python in a trace.

    Attributes:
        size: The size, as a traced tensor.
        how, place: By which use, and where in the model.
        parts: Into how many parts a tensor was taken along an axis of this size; 0 where the size itself was read.
        steps: Whether the file has a recurrence along an axis of this size step by step.
        example: The example's sizes that it is computed of, as far as the trace says: also behind a Function, where the graph has none.
    """

    size: torch.Tensor
    how: str
    place: str
    parts: int = 0
    steps: bool = False
    example: frozenset[int] = frozenset()

    @property
    def is_chunks(self) -> bool:
        """Whether the parts are chunks, which are right wherever PyTorch gives as many."""
        return self.how == _CHUNK


@dataclass
class Sizes:
    """The sizes of one trace.

    Attributes:
        dynamic: Example sizes of the dimensions that are declared dynamic.
        numbers: Sizes that the model turned into Python numbers, or into a number of parts; some may be those of open axes.
        frozen: Those that the model turned into Python ints (torch.export keeps them symbolic, or fails).
    """

    dynamic: set[int] = field(default_factory=set)
    numbers: list[Number] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)

    def read(self, name: str, tensor: torch.Tensor, place: Callable[[], str]) -> None:
        """A method of a tensor is about to be called: remember a size that becomes a number by it.

        Args:
            name: The method.
            tensor: The tensor.
            place: Says where in the model.
        """
        if not self.dynamic or name not in _NUMBERS or not (is_traced_size(tensor) or private.comes_of_sizes(tensor)):
            return
        if name in _INTEGERS and not tensor.is_floating_point():
            with private.paused_capture():
                size = int(tensor)
            if size in self.dynamic:
                self.frozen.add(size)
        if (frame := asking_frame()) is not None and not only_raises(frame):
            self.numbers.append(Number(tensor, _NUMBERS[name], place(), example=frozenset(private.sizes_behind(tensor))))

    def parted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Any, place: Callable[[], str]) -> None:
        """A function was called: remember where it took a tensor into as many parts, or went as many steps, as an axis of it has.

        Args:
            name: The function.
            args, kwargs: Its arguments.
            parts: What it returned.
            place: Says where in the model.
        """
        tensor = args[0] if args else None
        if self.dynamic and name in _POOLS and private.is_tracing():
            for size in pytree.tree_leaves((args[1:], kwargs)):
                if isinstance(size, torch.Tensor) and is_traced_size(size):
                    self.numbers.append(
                        Number(
                            size,
                            f"the {'size' if name.startswith('adaptive') else 'window'} of {name}()",
                            place(),
                            example=frozenset(private.sizes_behind(size)),
                        )
                    )
        if self.dynamic and name == "lstm" and private.is_tracing() and (steps := steps_axis(*args, **kwargs)) is not None:
            with private.unheard():
                size = torch.as_tensor(args[0].shape[steps])
            self.numbers.append(Number(size, "nn.LSTM with proj_size", place(), steps=True, example=frozenset(private.sizes_behind(size))))
        if not self.dynamic or name not in _PARTS or not private.is_tracing() or not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return
        if name == "chunk" and not may_lack_chunks(args[1] if len(args) > 1 else kwargs.get("chunks")):
            return
        given = args[1:] if name == "unbind" else args[2:]
        axis = kwargs.get("dim", given[0] if given else 0)
        if type(axis) is not int or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args[1:], kwargs))):
            return  # parts of computed sizes are computed in the file, too
        with private.unheard():
            size = torch.as_tensor(tensor.shape[axis])
        self.numbers.append(Number(size, _PARTS[name], place(), len(parts), example=frozenset(private.sizes_behind(size))))

    def check_frozen(self, arguments: Iterable[object], names: Sequence[str]) -> None:
        """Refuse a call that is handed a size as a number.

        Args:
            arguments, names: The arguments of the call, and their names.

        Raises:
            ExportError: One is, or may be, a size of a dynamic dimension.
        """
        for value, name in zip(arguments, names, strict=True):
            for leaf in expand_leaves(value) if self.frozen else ():
                if type(leaf) is int and leaf in self.frozen:
                    raise ExportError(
                        f"argument {name} holds the int {leaf}, and so large is a dynamic dimension that the model turned into an int before: the file would "
                        "keep today's size: pass the size itself (x.shape[0], without int() or .item()), or export with another example size if they are unrelated"
                    )


def asking_frame() -> types.FrameType | None:
    """The user's code that calls us; None where torch's does."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("symbolics."):
        frame = frame.f_back
    return None if frame is None or frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "exporter") else frame


def is_traced_size(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an int of the user's code: torch.jit.trace makes x.shape[0] a 0-d tensor."""
    if not private.is_tracing() or tensor.dim() != 0 or tensor.dtype != torch.int64:
        return False
    pending, sizes = [private.traced_producer(tensor)], 0
    while pending:
        node = pending.pop()
        kind = node.kind()
        if kind == "prim::NumToTensor":
            sizes += 1
        elif kind.startswith("aten::") and node.outputsSize() == 1 and node.inputsSize():
            pending.extend(value.node() for value in node.inputs())
        elif kind != "prim::Constant":
            return False
    return sizes > 0
