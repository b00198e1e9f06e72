"""One PythonOpTangent as plain Python: a Function called with tangents, as forward-mode differentiation does in eager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import forward_ad

from exporter.runtime.kernels import PythonOp, enter_state, plain, target_of
from symbolics import torch_private as private
from symbolics.errors import RunError
from symbolics.node.names import PYTHON_OP_TANGENT

__all__ = ["PythonOpTangent"]

# What the two products of the check in `_through_backward` may differ by, relative to what they are the sums of.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class PythonOpTangent(PythonOp):
    """One PythonOpTangent node, decoded once. It has the attributes of its PythonOp.

    Where the Function has a ``jvp``, ``apply`` runs with dual tensors and autograd does the rest. Where it has none, its
    backward is differentiated: with respect to the gradients that it takes it is linear, and its own gradient is the tangent.
    """

    op_type = PYTHON_OP_TANGENT

    def __init__(self, *args: Any) -> None:
        """Arguments and errors are those of `PythonOp`."""
        super().__init__(*args)
        self.simple = self.simple_arguments = False
        # An operator of torch.library, or a module, has no place for one.
        self.has_jvp = (
            isinstance(self.function, type)
            and issubclass(self.function, torch.autograd.Function)
            and self.function.jvp is not torch.autograd.Function.jvp
        )

    def run(self, inputs: Sequence[Any], keep: bool = False) -> tuple[int, list[Any]]:
        """Call Function.apply with tangents.

        Args:
            inputs: The N tensor inputs, then their N tangents, None for those that do not move; all owned by the call.
            keep: Unused: there is no context.

        Returns:
            0, and the M tensor outputs with their M tangents behind them. Those are zeros where the Function gives none, and
            None for an output of a type that has none.

        Raises:
            RunError: Inputs, tangents or outputs are not what the file says; or the Function has neither ``jvp`` nor a
                backward that can be differentiated.
            Exception: What forward or jvp raises, as it is.
        """
        count = len(self.flags)
        if len(inputs) != 2 * count:
            raise RunError.damaged(self.title, f"it takes {count} tensors and as many tangents, got {len(inputs)} inputs")
        with ExitStack() as stack:
            enter_state(stack, self.autocast, self.call.autocast.cache, True)
            tangents = [self._tangent(i, value, t) for i, (value, t) in enumerate(zip(inputs[:count], inputs[count:], strict=True))]
            found = self._through_jvp(inputs[:count], tangents) if self.has_jvp else self._through_backward(inputs[:count], tangents)
        outputs, moved = found
        zeros = [torch.zeros_like(y) if isinstance(y, torch.Tensor) and _moves(y) else None for y in outputs]
        moved = [zero if t is None or zero is None else t.detach() for t, zero in zip(moved, zeros, strict=True)]
        return 0, [*(value.detach() if isinstance(value, torch.Tensor) else value for value in outputs), *moved]

    def check(self, index: int, value: Any) -> Any:
        """An output as the file says it, or the tangent of one: those come behind, of the same types."""
        return super().check(index % len(self.call.output_types), value)

    def _tangent(self, index: int, value: Any, tangent: Any) -> torch.Tensor | None:
        """The tangent of an input, as torch takes it."""
        if tangent is None:
            return None
        if not isinstance(value, torch.Tensor) or not _moves(value):
            raise RunError.damaged(self.title, f"input {index} is absent or of a type that has no tangent, and one is given")
        if not isinstance(tangent, torch.Tensor) or tangent.shape != value.shape or tangent.dtype is not value.dtype:
            what = f"{tangent.dtype} of shape {list(tangent.shape)}" if isinstance(tangent, torch.Tensor) else "of strings"
            raise RunError.damaged(
                self.title, f"the tangent of input {index} is {what}, the input {value.dtype} of shape {list(value.shape)}"
            )
        dtype = self.input_dtypes[index]
        return plain(tangent.half() if dtype is torch.float16 else tangent)

    def _arguments(self, inputs: Sequence[Any], moving: Sequence[bool]) -> list[Any]:
        rows = zip(inputs, self.kinds, moving, self.input_dtypes, strict=True)
        return [self.argument(plain(v) if isinstance(v, torch.Tensor) else v, kind, flag, dtype) for v, kind, flag, dtype in rows]

    def _through_jvp(self, inputs: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
        with _dual_level():
            values = self._arguments(inputs, self.flags)
            duals = [v if t is None else forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)]
            outputs = [forward_ad.unpack_dual(y) if isinstance(y, torch.Tensor) else (y, None) for y in self.outputs_of(duals)]
        return [y for y, _ in outputs], [t for _, t in outputs]

    def _through_backward(self, inputs: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
        moving = [t is not None for t in tangents]
        values = self._arguments(inputs, [flag or moves for flag, moves in zip(self.flags, moving, strict=True)])
        targets = [target_of(v) for v, moves in zip(values, moving, strict=True) if moves]
        directions = [t for t in tangents if t is not None]
        outputs = self.outputs_of(values)
        places = [i for i, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.requires_grad]
        moved: list[Any] = [None] * len(outputs)
        if places and targets:
            try:
                found = self._twice([outputs[i] for i in places], targets, directions)
            except RunError:
                raise
            except Exception as error:
                raise self._no_tangent(f"it cannot be differentiated ({type(error).__name__}: {error})") from error
            for place, t in zip(places, found, strict=True):
                moved[place] = t
        return outputs, moved

    def _twice(self, outputs: list[torch.Tensor], targets: list[Any], directions: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """J v as the gradient of u J v with respect to u; u is arbitrary, and not constant, so that a backward that ignores it shows."""
        cotangents = [torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape).requires_grad_() for y in outputs]
        gradients = torch.autograd.grad(outputs, targets, cotangents, create_graph=True, allow_unused=True)
        pairs = [(g, v) for g, v in zip(gradients, directions, strict=True) if g is not None]
        live = [(g, v) for g, v in pairs if g.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(outputs)
        if live:
            found = torch.autograd.grad([g for g, _ in live], cotangents, [v.to(g.dtype) for g, v in live], allow_unused=True)
        # v (J' u) is u (J v): a backward that is not linear, or leaves autograd on its way, fails this.
        left = [(g.detach().double() * v.double()) for g, v in pairs]
        right = [(u.detach().double() * t.detach().double()) for u, t in zip(cotangents, found, strict=True) if t is not None]
        size = sum(float(part.abs().sum()) for part in (*left, *right))
        difference = abs(sum(float(part.sum()) for part in left) - sum(float(part.sum()) for part in right))
        if difference > size * _TOLERANCE.get(outputs[0].dtype, 5e-2):
            raise self._no_tangent(
                "it says once_differentiable, computes with something else than torch, or is not linear in the gradients that it takes"
            )
        return list(found)

    def _no_tangent(self, why: str) -> RunError:
        if isinstance(self.function, type) and issubclass(self.function, torch.autograd.Function):
            return RunError(
                f"{self.title}: the Function has no jvp, and its backward does not give a tangent: {why}.\n"
                "  way out: define jvp in the Function, or export with inline= or portable= for it"
            )
        return RunError(  # an operator or a module has no place for a jvp, and is here since it is no ONNX operator
            f"{self.title}: its gradient, which the tangent comes from, cannot be differentiated: {why}.\n"
            "  way out: put what has no second derivative into an autograd Function with a jvp, and leave the rest outside of opaque="
        )


def _moves(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_lock = threading.Lock()
_open = 0  # how many kernels use the level that this module opened


@contextlib.contextmanager
def _dual_level() -> Iterator[None]:
    """A level of forward-mode differentiation, which torch has one of in a process: the caller's, or one that all threads share."""
    global _open
    with _lock:
        ours = _open > 0 or private.forward_level() < 0
        if ours:
            if not _open:
                forward_ad.enter_dual_level()
            _open += 1
    try:
        with private.forward_mode():
            yield
    finally:
        if ours:
            with _lock:
                _open -= 1
                if not _open:
                    private.leave_forward_levels(-1)
