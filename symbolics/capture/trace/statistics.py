"""What batch_norm in training mode writes into running statistics, for a trace of TorchScript.

The trace holds batch_norm as one call, and nothing of what it writes. A file says that by itself (exporter/train_mode/batch_norm.py), until
something else of the forward reads or writes the statistics: from there on they are computed in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import symbolics.capture.opaque_op  # noqa: F401  (it defines the mark)
from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES

__all__ = ["RunningStatistics"]

_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")


@dataclass
class _Update:
    """One call: its running statistics, a copy of its input, the share of the new value."""

    running: tuple[torch.Tensor, torch.Tensor]
    x: torch.Tensor
    momentum: float


class RunningStatistics:
    """The updates that the trace does not show yet.

    Args:
        dirtied: Takes what has a new value in the trace, of which a tensor itself does not say that it was written.
        follow: Is told of it, too.
    """

    def __init__(self, dirtied: list[torch.Tensor], follow: Callable[[torch.Tensor], Any]) -> None:
        self._dirtied, self._follow = dirtied, follow
        self._unsaid: list[_Update] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call is about to be traced: say what it reads; of a batch_norm in training mode, remember what it will write."""
        given = dict(zip(_ARGUMENTS, args)) if func is torch.batch_norm else {}
        mean, var, x = (given.get(name) for name in ("running_mean", "running_var", "input"))
        if not given.get("training") or mean is None or var is None or x is None:
            if self._unsaid:
                self.say(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            return
        self.say([x])  # the statistics themselves it reads only to write them
        # A copy: the caller may change the input in place, and the node of a copy that nobody reads goes.
        self._unsaid.append(_Update((mean, var), x.detach().clone(), float(given["momentum"])))

    def say(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute in the graph what of these tensors a call is about to read or to write."""
        if not self._unsaid:
            return
        tensors = list(tensors)
        self._say(lambda running: any(private.shares_memory(one, tensor) for one in running for tensor in tensors))

    def say_touched(self) -> None:
        """Compute those that something else wrote, too: their last values are none that a batch_norm alone made."""
        self._say(lambda running: any(private.traced_producer(one).kind() != "prim::Param" for one in running))

    def _say(self, wanted: Callable[[tuple[torch.Tensor, torch.Tensor]], bool]) -> None:
        said = [update for update in self._unsaid if wanted(update.running)]
        self._unsaid = [update for update in self._unsaid if not any(update is other for other in said)]
        for update in said:
            kind = update.running[0].dtype
            x = torch.ops.pythonop.stop_gradient(update.x.to(torch.float32 if kind in HALVES else kind))
            axes = [axis for axis in range(x.dim()) if axis != 1]
            for running, batch in zip(update.running, (x.mean(axes), x.var(axes))):
                with torch.no_grad():
                    private.replace_traced(running, (running.to(x.dtype) * (1 - update.momentum) + batch * update.momentum).to(kind))
                self._dirtied.append(running)
                self._follow(running)
