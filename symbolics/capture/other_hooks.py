"""Hooks on gradients that no node can stand for: they are refused by name, or warned of where they plainly change nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.gradient_hooks import changes_nothing, shown_hook
from symbolics.capture.side_effects import same_values
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["GradFn", "check_module_hooks", "check_parameter_hooks", "saved_tensors_compared"]


def check_parameter_hooks(model: torch.nn.Module) -> None:
    """Refuse hooks that run after a parameter's .grad is there: a file has gradients, and no .grad.

    Raises:
        ExportError: A parameter has one.
    """
    for name, parameter in model.named_parameters():
        for hook in private.post_accumulate_hooks(parameter):
            raise ExportError(
                f"the parameter {name!r} has the hook {_place(hook)}, registered by register_post_accumulate_grad_hook: it runs on .grad, which is the "
                "training loop's and in no file.\n"
                "  way out: take it off for the export (handle.remove()) and register it on the parameter of the loaded module, or call it in the "
                "training loop; if it changes the gradient, register_hook with a function at the top level of a module is carried"
            )


def check_module_hooks(model: torch.nn.Module, known: set[int]) -> None:
    """Refuse backward hooks of modules, warn of those that return nothing.

    Args:
        model: The model.
        known: Identities of hooks that were warned of; new ones are added.

    Raises:
        ExportError: A hook may return gradients.
    """
    for path, module in model.named_modules():
        for method, hook in private.module_backward_hooks(module):
            if id(hook) in known:
                continue
            known.add(id(hook))
            what = f"the module {path or '<root>'} ({type(module).__name__}) has the backward hook {_place(hook)}, registered by {method}"
            if not changes_nothing(hook):
                raise ExportError(
                    f"{what}: it may return other gradients, and a file cannot run it, as it takes the module.\n"
                    "  way out: register it on a tensor in forward (h.register_hook(function), a function at the top level of a module): that is carried;\n"
                    "  make an autograd Function of it; or take it off for the export (handle.remove()): the file's gradients are those without it"
                )
            warn(f"{what}: it returns nothing, so gradients are the same without it, and the file does not run it.")


def _place(hook: Any) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return shown_hook(hook) + (f" (line {code.co_firstlineno})" if code is not None else "")


class GradFn:
    """A tensor's grad_fn as a model sees it while it is captured: everything but its hooks.

    Args:
        node: The node.
        refuse: Called with what is refused and why.
    """

    def __init__(self, node: Any, refuse: Any) -> None:
        self._node, self._refuse = node, refuse

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return self._hook
        return getattr(self._node, name)

    def _hook(self, hook: Any) -> Any:
        self._refuse(
            f"the hook {shown_hook(hook)} on a node of the autograd graph",
            "a file has no such node: register it on the tensor (h.register_hook(function), a function at the top level of a module): that is carried",
        )


_opening = threading.RLock()


@contextlib.contextmanager
def saved_tensors_compared() -> Iterator[list[str]]:
    """While the block runs, compare what this thread's saved_tensors_hooks give back with what they were given.

    Yields:
        The hooks that change what they keep, as text.
    """
    cls, thread, found = torch.autograd.graph.saved_tensors_hooks, threading.get_ident(), []
    enter = cls.__enter__

    def compared(self: Any) -> Any:
        # torch's own (checkpoint, save_on_cpu) keep values, and some recompute to give them back.
        if threading.get_ident() != thread or (type(self).__module__.split(".")[0] == "torch" and type(self) is not cls):
            return enter(self)
        pack, unpack = self.pack_hook, self.unpack_hook

        def packed(tensor: torch.Tensor) -> Any:
            before = tensor.detach().clone()
            kept = pack(tensor)
            back = unpack(kept)
            if not (
                isinstance(back, torch.Tensor)
                and back.shape == before.shape
                and back.dtype == before.dtype
                and same_values(back.detach(), before)
            ):
                found.append(f"{shown_hook(pack)} and {shown_hook(unpack)}")
            return kept

        self.pack_hook = packed
        try:
            return enter(self)
        finally:
            self.pack_hook = pack

    with _opening:
        cls.__enter__ = compared  # type: ignore[method-assign]
        try:
            yield found
        finally:
            cls.__enter__ = enter  # type: ignore[method-assign]
