"""Output sizes as linear functions of the dynamic sizes, found by running forward at the example sizes and near them.

What a call of the eager run returned is known. Its own values, more or fewer of them, show how sizes move; drawn anew among themselves, whether sizes depend on
values. A forward may well refuse those: then nothing is known against what eager says. Where no such call is known, values are invented.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sympy
import torch

from symbolics.capture.eager_calls import EagerCall
from symbolics.capture.outputs import Fresh, Outputs
from symbolics.capture.returned_numbers import moved_numbers, numbers_of
from symbolics.capture.told import Told, agreed
from symbolics.capture.trial import Call, Trial, forward_raised, trial
from symbolics.errors import ExportError
from symbolics.node.names import qualified_name

__all__ = ["Example", "as_known", "fitted_outputs", "run_on_other_values"]


def fitted_outputs(
    cls: type, call: Call, values: Sequence[Any], input_sizes: list[list[Any]], seen: EagerCall | None, missing: str
) -> Outputs:
    """What a call returns whose forward needs real tensors.

    Args:
        cls: The Function.
        call: Its arguments.
        values: The tensors and sizes among them, by slot.
        input_sizes: Their sizes, as numbers and sympy expressions.
        seen: The same call in an eager run, None where there is none.
        missing: Why there is none.

    Raises:
        ExportError: forward raised on invented values, or the number, rank or Python values of its outputs depend on the data.
    """
    return _Fit(cls, call, values, input_sizes, seen, missing).outputs()


#: On how many other values the sizes of outputs are compared.
_DRAWS = 4

#: Makes the tensor that stands for another: gets that, the shape, and what the eager run has in its place (None: nothing).
Example = Callable[[torch.Tensor, list[int], torch.Tensor | None], torch.Tensor]


def run_on_other_values(run: Callable[[int, Example], object]) -> None:
    """Run a forward on other values, drawn among its own, several times; one that takes none of them may refuse.

    Args:
        run: Gets a seed, and what draws the values.
    """
    for seed, draw in enumerate((drawn, drawn_smaller, drawn_positive, drawn_smaller, drawn_opposite, drawn_zero)):
        with contextlib.suppress(Exception):
            run(seed, draw)


class _Fit:
    """Finds output sizes from real runs at the example sizes and near them."""

    def __init__(
        self, cls: type, call: Call, values: Sequence[Any], input_sizes: list[list[Any]], seen: EagerCall | None, missing: str
    ) -> None:
        self.cls, self.call, self.values, self.input_sizes, self.seen, self.missing = cls, call, values, input_sizes, seen, missing
        self.told: list[list[Told]] = []
        self.numbers: list[list[Any]] = []
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
                outputs = self._outputs()
                if outputs.told or numbers_of(outputs.template):
                    run_on_other_values(lambda seed, draw: self._run(self.hints, seed + 2, draw))
            told = agreed(outputs.told, self.told, qualified_name(self.cls))
            return replace(outputs, told=told, moved=moved_numbers(outputs.template, self.numbers))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

    def _outputs(self) -> Outputs:
        first = self._first()
        shapes = [list(output.shape) for output in first.tensors]
        fitted = self._fit(shapes) if self.hints else [list(shape) for shape in shapes]
        second = self._second()
        if second is None:
            return _with_shapes(first, fitted)
        if len(second.tensors) != len(shapes):
            raise ExportError(
                "the number of its outputs depends on the values of its inputs, a node has a fixed number: return empty tensors for the others"
            )
        for i, (one, two) in enumerate(zip(shapes, (output.shape for output in second.tensors), strict=True)):
            if len(one) != len(two):
                raise ExportError(f"the rank of its output {i} depends on the values of its inputs, a file needs one rank")
        others = [[list(output.shape) for output in second.tensors], *self._others()]
        for i, one in enumerate(shapes):
            for d, size in enumerate(one):
                if any([len(s) for s in other] == [len(s) for s in shapes] and other[i][d] != size for other in others):
                    fitted[i][d] = Fresh(f"{i}.{d}")
        return _with_shapes(first, fitted)

    def _others(self) -> Iterator[list[list[int]]]:
        """Output sizes for further values, of either sign: what is few at the example may be as many for the next."""
        for seed in range(2, 2 + _DRAWS) if self.seen is not None else ():
            with contextlib.suppress(Exception):
                run = self._run(self.hints, seed, drawn if seed % 2 else drawn_opposite)
                self.told.pop()  # those of other values are asked for where there are any
                yield self._shapes(run)

    def _first(self) -> Outputs:
        """What the call returns at the example sizes, and what it does beside."""
        try:
            run = self._run(self.hints, seed=0)
        except Exception as error:
            if self.seen is None:
                raise forward_raised(error, self.missing) from error
            return self.seen.outputs  # what it was given has been changed since, or it does not do the same twice
        found = run.describe(self._shapes(run))
        if self.seen is None:
            return found
        known = self.seen.outputs
        dirty = {i for i, _ in known.dirty}
        mutated = sorted({*known.mutated, *found.mutated} - dirty)
        return replace(known, mutated=mutated, side_effects=found.side_effects, told=found.told, state=found.state)

    def _second(self) -> Outputs | None:
        """What it returns for other values, None where it takes none."""
        if self.seen is not None and not self.seen.values:
            return None
        try:
            run = self._run(self.hints, seed=1, example=drawn)
        except Exception as error:
            if self.seen is None:
                raise forward_raised(error, self.missing) from error
            return None
        return run.describe(self._shapes(run))

    def _run(self, assignment: dict[Any, int], seed: int, example: Example | None = None) -> Trial:
        torch.manual_seed(seed)
        known = iter(self.seen.values if self.seen is not None else ())
        stand_ins: list[Any] = []
        for value, sizes in zip(self.values, self.input_sizes, strict=True):
            numbers = [int(s.subs(assignment)) if isinstance(s, sympy.Basic) else s for s in sizes]
            stand_ins.append((example or as_known)(value, numbers, next(known, None)) if isinstance(value, torch.Tensor) else numbers[0])
        run = trial(self.cls, self.call, self.values, stand_ins)
        self.told.append(run.told)
        self.numbers.append(numbers_of(run.result))
        return run

    @staticmethod
    def _shapes(run: Trial) -> list[list[int]]:
        return [[int(n) for n in t.shape] for t in run.tensors()]

    def _fit(self, base: list[list[int]]) -> list[list[Any]]:
        """Output sizes as linear functions of the dynamic sizes; Fresh where a run contradicts the line."""
        slopes = {symbol: self._slope(symbol, base) for symbol in self.hints}
        moved = {
            symbol: max(1, hint + (step or 1) * (i + 2))
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
        # Some code wants even sizes, or multiples; values known for a size may do for a smaller one alone (a matrix of full rank).
        for step in (1, hint, 2 * hint, *((-1,) if hint > 2 and self.seen is not None else ())):
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


def _with_shapes(outputs: Outputs, shapes: list[list[Any]]) -> Outputs:
    tensors = [replace(output, shape=shape) for output, shape in zip(outputs.tensors, shapes, strict=True)]
    return replace(outputs, tensors=tensors, input_sizes=[])


def as_known(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """The values of the eager run: the first of a dimension where it is shorter, all and then again from the first where it is longer."""
    if known is None:
        return _standing_for(value, _invented(value, shape))
    for d, size in enumerate(shape):
        if size != known.shape[d]:
            rows = torch.arange(size, device=known.device)
            known = (
                known.index_select(d, rows % known.shape[d])
                if known.shape[d]
                else known.new_zeros([*known.shape[:d], size, *known.shape[d + 1 :]])
            )
    return _standing_for(value, known.clone())


def drawn(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """Values of the eager run, each drawn among all that it has."""
    if known is None:
        return _standing_for(value, _invented(value, shape))
    flat = known.reshape(-1)
    return _standing_for(value, flat[torch.randint(max(flat.numel(), 1), (flat.numel(),), device=flat.device)].reshape(known.shape))


def drawn_smaller(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """The same, real numbers made smaller: the largest of some values is often drawn again."""
    made = drawn(value, shape, known)
    with torch.no_grad():
        return made.mul_(0.75) if made.is_floating_point() else made


def drawn_opposite(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """The same, real numbers with the other sign."""
    made = drawn(value, shape, known)
    with torch.no_grad():
        return made.neg_() if made.is_floating_point() else made


def drawn_positive(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """The same, real numbers without their signs."""
    made = drawn(value, shape, known)
    with torch.no_grad():
        return made.abs_() if made.is_floating_point() else made


def drawn_zero(value: torch.Tensor, shape: list[int], known: torch.Tensor | None) -> torch.Tensor:
    """Zeros in place of real numbers: none is larger than another, nor than zero."""
    made = drawn(value, shape, known)
    with torch.no_grad():
        return made.zero_() if made.is_floating_point() else made


def _invented(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(value.dtype) if value.is_floating_point() else torch.zeros(shape, dtype=value.dtype)


def _standing_for(value: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor with data in place of a fake one."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=value.requires_grad)
    if value.requires_grad:
        with torch.enable_grad():
            data = data.requires_grad_() if value.is_leaf else data.requires_grad_().clone()
    return data
