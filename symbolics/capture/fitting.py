"""Output sizes as linear functions of the dynamic sizes, found by running forward at the example sizes and near them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
import torch

from symbolics.capture.outputs import Fresh, Outputs
from symbolics.capture.trial import Call, Trial, forward_raised, trial
from symbolics.errors import ExportError, Faq
from symbolics.node.containers import fill

__all__ = ["fitted_outputs"]


def fitted_outputs(cls: type, call: Call, values: Sequence[Any], input_sizes: list[list[Any]]) -> Outputs:
    """What a call returns whose forward needs real tensors.

    Args:
        cls: The Function.
        call: Its arguments.
        values: The tensors and sizes among them, by slot.
        input_sizes: Their sizes, as numbers and sympy expressions.

    Raises:
        ExportError: forward raised, or the number, rank or Python values of its outputs depend on the data.
    """
    return _Fit(cls, call, values, input_sizes).outputs()


class _Fit:
    """Finds output sizes from real runs at the example sizes and near them."""

    def __init__(self, cls: type, call: Call, values: Sequence[Any], input_sizes: list[list[Any]]) -> None:
        self.cls, self.call, self.values, self.input_sizes = cls, call, values, input_sizes
        self.hints: dict[Any, int] = {}
        for value in values:
            for size in value.shape if isinstance(value, torch.Tensor) else [value]:
                if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
                    for symbol in size.node.expr.free_symbols:
                        hint = size.node.hint if size.node.expr == symbol and size.node.has_hint() else None
                        if hint is not None or symbol not in self.hints:
                            self.hints[symbol] = int(hint) if hint is not None else 3

    def outputs(self) -> Outputs:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                return self._outputs()
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

    def _outputs(self) -> Outputs:
        try:
            first = self._run(self.hints, seed=0)
        except Exception as error:
            raise forward_raised(error) from error
        shapes = self._shapes(first)
        fitted = self._fit(shapes) if self.hints else [list(shape) for shape in shapes]
        try:
            second = self._run(self.hints, seed=1)
        except Exception as error:
            raise forward_raised(error) from error
        self._same_python_values(first, second)
        if len(self._shapes(second)) != len(shapes):
            raise ExportError(
                "the number of its outputs depends on the values of its inputs, a node has a fixed number: return empty tensors for the others"
            )
        for i, (one, two) in enumerate(zip(shapes, self._shapes(second), strict=True)):
            if len(one) != len(two):
                raise ExportError(f"the rank of its output {i} depends on the values of its inputs, a file needs one rank")
            for d in range(len(one)):
                if one[d] != two[d]:
                    fitted[i][d] = Fresh(f"{i}.{d}")  # type: ignore[call-overload]
        outputs = first.describe(fitted)
        for output, value in zip(outputs.tensors, first.tensors(), strict=True):
            output.device = value.device
        return outputs

    def _run(self, assignment: dict[Any, int], seed: int) -> Trial:
        torch.manual_seed(seed)
        stand_ins: list[Any] = []
        for value, sizes in zip(self.values, self.input_sizes, strict=True):
            numbers = [int(s.subs(assignment)) if isinstance(s, sympy.Basic) else s for s in sizes]
            stand_ins.append(_example(value, numbers) if isinstance(value, torch.Tensor) else numbers[0])
        return trial(self.cls, self.call, self.values, stand_ins)

    @staticmethod
    def _shapes(run: Trial) -> list[list[int]]:
        return [[int(n) for n in t.shape] for t in run.tensors()]

    def _fit(self, base: list[list[int]]) -> list[list[Any]]:
        """Output sizes as linear functions of the dynamic sizes; Fresh where a run contradicts the line."""
        slopes = {symbol: self._slope(symbol, base) for symbol in self.hints}
        moved = {
            symbol: hint + (step or 1) * (i + 2)
            for i, (symbol, hint, step) in enumerate((s, h, slopes[s][1]) for s, h in self.hints.items())
        }
        try:
            joint: list[list[int]] | None = self._shapes(self._run(moved, seed=0))
        except Exception:
            joint = None
        fitted: list[list[Any]] = []
        for i, shape in enumerate(base):
            row: list[Any] = []
            for d, size in enumerate(shape):
                rates = {symbol: slopes[symbol][0][i][d] for symbol in self.hints}
                if joint is None or None in rates.values():
                    row.append(Fresh(f"{i}.{d}"))
                    continue
                predicted = size + sum(rates[s] * (moved[s] - self.hints[s]) for s in self.hints)  # type: ignore[operator, misc]
                expression = sympy.Integer(size) + sum(rates[s] * (s - self.hints[s]) for s in self.hints)
                row.append(Fresh(f"{i}.{d}") if predicted != joint[i][d] else int(expression) if expression.is_Integer else expression)
            fitted.append(row)
        return fitted

    def _slope(self, symbol: Any, base: list[list[int]]) -> tuple[list[list[int | None]], int]:
        """The change of each output size a step of one dynamic size, and the step at which forward ran."""
        hint = self.hints[symbol]
        for step in (1, hint, 2 * hint):  # some code wants even sizes, or multiples
            try:
                shapes = self._shapes(self._run({**self.hints, symbol: hint + step}, seed=0))
            except Exception:
                continue
            if [len(s) for s in shapes] != [len(s) for s in base]:
                continue
            return [
                [(b - a) // step if (b - a) % step == 0 else None for a, b in zip(one, two, strict=True)]
                for one, two in zip(base, shapes, strict=True)
            ], step
        return [[None] * len(shape) for shape in base], 1

    @staticmethod
    def _same_python_values(first: Trial, second: Trial) -> None:
        def leaves(run: Trial) -> list[Any]:
            found: list[Any] = []
            fill(run.result, lambda leaf: found.append(leaf) if not isinstance(leaf, torch.Tensor) else None)
            return found

        for one, two in zip(leaves(first), leaves(second), strict=False):
            if type(one) is not type(two) or (isinstance(one, (bool, int, float, str)) and one != two and one == one):
                raise ExportError(
                    f"it returns a Python value computed from its inputs ({one!r} in one run, {two!r} in another); a file would hold one of them: return a tensor",
                    faq=Faq.PYTHON_VALUE,
                )


def _example(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A tensor with data in place of a fake one."""
    if value.is_floating_point():
        data = torch.randn(shape, dtype=torch.float32).to(value.dtype)
    else:
        data = torch.zeros(shape, dtype=value.dtype)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=value.requires_grad)
    if value.requires_grad:
        with torch.enable_grad():
            data = data.requires_grad_() if value.is_leaf else data.requires_grad_().clone()
    return data
