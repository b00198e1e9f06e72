"""What earlier calls have left in a model: buffers and attributes that still hang on the autograd graph of those.

An exporter takes such a tensor for a leaf, which nobody may change in place. A file has its value alone, so the export sees it detached;
what is lost by that is told.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from exporter.forward.unchanged import Kept
from exporter.train_mode.reads import OWN
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["History"]


class History:
    """The tensors of a model that an earlier call computed, with gradients.

    Args:
        model: Anything; what is no module has none.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: name -> the dict that has it, its key there, and what it is: a tensor, or a list or tuple with tensors.
        self._places: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            for owner in (module._buffers, module.__dict__):
                for key, value in owner.items():
                    if key not in OWN and any(tensor.grad_fn is not None for tensor in _tensors(value)):
                        self._places[f"{path}.{key}".removeprefix(".")] = owner, key, value
        self._nodes: dict[Any, str] = {}
        self._before: dict[str, Any] = {}
        self._seen: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()  # the one container that `unchanged` does not empty again
        self._read: dict[str, bool] = {}  # name -> whether it stays what it is

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the block runs, the model has copies, and each of its calls says which of them its results hang on."""
        if not self._places:
            yield
            return
        handle = self._model.register_forward_hook(lambda module, args, result: self._look(result))
        try:
            with self._replaced(torch.Tensor.clone):  # what is done to them in place, detach_() among it, could not be undone
                self._nodes = {
                    tensor.grad_fn: name
                    for name, (owner, key, _) in self._places.items()
                    for tensor in _tensors(owner[key])
                    if tensor.grad_fn is not None
                }
                self._before = {name: owner[key] for name, (owner, key, _) in self._places.items()}
                yield
        finally:
            handle.remove()
            while not self._seen.empty():
                self._read.update([self._seen.get()])

    def _look(self, result: Any) -> None:
        for node in _behind([tensor.grad_fn for tensor in pytree.tree_leaves(result) if isinstance(tensor, torch.Tensor)]):
            if (name := self._nodes.get(node)) is not None:
                owner, key, _ = self._places[name]
                self._seen.put((name, owner.get(key) is self._before[name]))

    def check(self) -> None:
        """Tell what a file loses.

        Raises:
            ExportError: A parameter, which forward reads through what was once made of it.

        Warns:
            PythonopWarning: The gradients of earlier calls.
        """
        parameters = {id(parameter): name for name, parameter in self._model.named_parameters()} if self._read else {}
        for name, stays in self._read.items():
            nodes = [node for node, other in self._nodes.items() if other == name]
            leaves = (getattr(node, "variable", None) for node in _behind(nodes))
            lost = next((parameters[id(leaf)] for leaf in leaves if id(leaf) in parameters), None)
            if stays and lost is not None:
                raise ExportError(
                    f"forward reads {name!r}, which was computed from the parameter {lost!r} before: a file has its value alone, and that parameter "
                    f"would not be trained.\n  way out: compute it in forward, or keep {name}.detach()"
                )
        if self._read:
            warn(
                f"forward reads {', '.join(map(repr, self._read))} of an earlier call, with the gradients behind it: a file has the value alone, and its "
                "gradients end there.\n  way out: to train as in eager, reset the state between two calls, or let forward keep it detached"
            )

    def hidden(self, export: Callable[[], Any]) -> Callable[[], Any]:
        """What exports a model that has them detached, in the same memory."""

        def without() -> Any:
            with Kept(*(value for *_, value in self._places.values())), self._replaced(torch.Tensor.detach):
                return export()

        return without

    @contextlib.contextmanager
    def _replaced(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        known: dict[int, torch.Tensor] = {}  # what has two names has them still

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = change(tensor)
            return known[id(tensor)]

        for owner, key, value in self._places.values():
            owner[key] = pytree.tree_map_only(torch.Tensor, changed, value)
        try:
            yield
        finally:
            for owner, key, value in self._places.values():
                owner[key] = value


def _tensors(value: Any) -> list[torch.Tensor]:
    """A tensor, or those in a list or tuple."""
    found = value if type(value) in (list, tuple) else (value,)
    return [each for each in found if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)]


def _behind(nodes: list[Any]) -> Iterator[Any]:
    """The nodes of autograd that these lead to, themselves among them."""
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]
