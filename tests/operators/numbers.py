"""How far two results may be apart, derived from the operator itself, and whether a point has a derivative at all.

The reference is eager in float64. What float32 may lose there is measured, element by element:

- what eager in float32 loses itself;
- how the float64 result moves when the inputs, and what every operator inside it makes, move by a unit in the last place of
  float32: no program in float32 can promise more. At a jump (a rounding, a choice among equals) the result moves as far at a thousandth of the
  step: that says nothing about precision, and is left out, so that a jump is judged as strictly as anything else;
- what eager loses of an element of middling luck, where that is more (inside, it may compute in float16);
- some units in the last place of the result, of 1 for results that are smaller than that, and of the largest element, from which sums and
  transforms put a zero together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Eager", "Other", "Reference", "kink", "reference", "run"]

_UNIT = torch.finfo(torch.float32).eps
_FACTOR = 16  # units in the last place: the longest chain of operations that an operator becomes is about that long
_DRAWS = 3
_SMALLER = 1 / 1024

Model = Callable[..., object]


@dataclass
class Eager:
    """One run: the outputs, and the gradient of each float input (None: eager has none)."""

    outputs: list[torch.Tensor]
    gradients: dict[int, torch.Tensor | None]


@dataclass
class Reference:
    """What is expected of a tensor.

    Attributes:
        single: Eager in float32.
        double: Eager in float64, rounded to float32.
        bound: How far from one of both an element may be.
    """

    single: torch.Tensor
    double: torch.Tensor
    bound: torch.Tensor

    def differs(self, found: torch.Tensor) -> torch.Tensor:
        """Where an element is neither eager's nor the float64 reference's; the shapes and types are equal."""
        if not found.is_floating_point():
            return found != self.single
        return ~(_near(found, self.single, self.bound) | _near(found, self.double, self.bound))


def _near(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return same | ((found.double() - wanted.double()).abs() <= bound)


def run(
    model: Model, tensors: Sequence[torch.Tensor], wrt: Sequence[int], seeds: Sequence[torch.Tensor] | None = None, seed: int = 0
) -> Eager:
    """Forward, and backward where an output needs it.

    Args:
        model: The module.
        tensors: Its inputs.
        wrt: The numbers of the inputs that need a gradient.
        seeds: One number for each element of each output; None: no backward.
        seed: Of torch's generator.
    """
    leaves = [t.detach().clone().requires_grad_(i in wrt) for i, t in enumerate(tensors)]
    torch.manual_seed(seed)
    result = model(*leaves)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    gradients: dict[int, torch.Tensor | None] = {}
    if seeds is not None:
        pairs = [(t, weight.to(t.dtype)) for t, weight in zip(outputs, seeds, strict=True) if t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [weight for _, weight in pairs])
        gradients = {i: None if (g := leaves[i].grad) is None else g.to_dense() for i in wrt}
    return Eager([t.detach() for t in outputs], gradients)


def reference(
    model: Model, tensors: Sequence[torch.Tensor], wrt: Sequence[int], seeds: Sequence[torch.Tensor]
) -> tuple[Eager, Eager | None, list[Reference]]:
    """Eager in float32 and in float64, and what is expected of each output and then of each gradient."""
    single = run(model, tensors, wrt, seeds)
    try:
        double, moved = _measured(model, tensors, wrt, seeds)
        if [t.shape for t in _flat(single)] != [t.shape for t in _flat(double)]:
            raise ValueError("another shape in float64")
    except Exception:  # the operator has no float64, or its result there is of another kind
        return single, None, [_expected(t, None, torch.zeros_like(t, dtype=torch.float64)) for t in _flat(single)]
    return single, double, [_expected(t, d, m) for t, d, m in zip(_flat(single), _flat(double), moved)]


def _flat(eager: Eager) -> list[torch.Tensor]:
    return [*eager.outputs, *(g for g in eager.gradients.values() if g is not None)]


def _expected(single: torch.Tensor, double: torch.Tensor | None, moved: torch.Tensor) -> Reference:
    if not single.is_floating_point():
        return Reference(single, single, torch.zeros_like(single, dtype=torch.float64))
    exact = single.double() if double is None else double.double()
    size = exact.abs().nan_to_num(0.0, 0.0, 0.0)
    lost = (single.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(size.max()) if size.numel() else 0.0
    scale = min(1.0, largest)
    # Below the smallest normal number eager may or may not flush to zero.
    middling = float((lost / (size + scale)).median()) if scale else 0.0
    bound = 4 * lost + _FACTOR * ((middling + _UNIT) * (size + scale) + moved) + _FACTOR * _UNIT * largest + torch.finfo(torch.float32).tiny
    return Reference(single, exact.to(single.dtype), bound)


class _Rounding(TorchDispatchMode):
    """Moves every float64 result of an operator by up to ``size`` of itself; the same draws for the same seed."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.draws = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result  # a view, or what it changed: moved where it was made
        return pytree.tree_map_only(torch.Tensor, self.moved, result)

    def moved(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype is not torch.float64 or t.layout is not torch.strided:
            return t
        steps = torch.rand(t.shape, generator=self.draws, dtype=torch.float64) * 2 - 1
        return t * (1 + self.size * steps)


def _measured(
    model: Model, tensors: Sequence[torch.Tensor], wrt: Sequence[int], seeds: Sequence[torch.Tensor]
) -> tuple[Eager, list[torch.Tensor]]:
    """The float64 run, and how far each result moves when everything in it moves by a unit in the last place of float32."""
    wide = [_wide(t) for t in tensors]
    weights = [_wide(t) for t in seeds]
    base = run(model, wide, wrt, weights)
    far = [torch.zeros_like(t, dtype=torch.float64) for t in _flat(base)]
    for seed in range(_DRAWS):
        moves = []
        for size in (_UNIT, _UNIT * _SMALLER):
            rounding = _Rounding(size, seed)
            moved = [rounding.moved(t) for t in (*wide, *weights)]
            with rounding:
                there = run(model, moved[: len(wide)], wrt, moved[len(wide) :])
            pairs = zip(_flat(there), _flat(base), strict=True)
            moves.append([(a.double() - b.double()).abs().nan_to_num(0.0, 0.0, 0.0) for a, b in pairs])
        far = [torch.maximum(f, torch.where(little <= 32 * _SMALLER * much, much, 0.0)) for f, much, little in zip(far, *moves)]
    return base, far


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t


# --------------------------------------------------------------------------------------------------------------- kinks


@dataclass
class Other:
    """A gradient that is not eager's.

    Attributes:
        found, eager: Both.
        where: The elements that differ.
    """

    found: torch.Tensor
    eager: torch.Tensor
    where: torch.Tensor


def kink(model: Model, tensors: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], others: Mapping[int, Other], most: int = 6) -> bool:
    """Whether gradients that are not eager's are slopes of the function all the same.

    Each element must lie between the slopes to both sides; where both agree there is no choice, and eager's own number must be another
    than theirs. And where the function has a derivative along all of them together, they must add up to it: two equal elements
    may share a gradient in any way, but not both have all of it. Where the function itself is infinite or no number, and has no slope that is
    eager's, one nan or infinity says as much as another.

    Args:
        model: The module.
        tensors: Its inputs.
        seeds: The weights of the sum over its outputs.
        others: Number of the input -> its gradient.
        most: How many elements of each are looked at.
    """
    wide = [_wide(t) for t in tensors]

    def total(at: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            outputs = run(model, at, ()).outputs
        return sum(float((t.double() * seed.double()).sum()) for t, seed in zip(outputs, seeds, strict=True) if t.is_floating_point())

    here = total(wide)

    def slopes(directions: Mapping[int, torch.Tensor]) -> tuple[float, float, float] | None:
        """The smaller and the larger one, and how exact they are; None where no step leads to where the function is."""
        largest = max(float((wide[i] * d).abs().max()) for i, d in directions.items())
        found = []
        for h in (2.0**-22 * (largest or 1.0), -(2.0**-22) * (largest or 1.0)):
            with contextlib.suppress(Exception):  # the function ends here: it has the other slope alone
                found.append((total([t + h * directions[i] if i in directions else t for i, t in enumerate(wide)]) - here) / h)
        found = [
            slope for slope in found if math.isfinite(here) or not math.isnan(slope)
        ] or found  # of a function that is infinite on both sides
        return (min(found), max(found), 1e-3 * (1 + sum(map(abs, found)))) if found else None

    for number, other in others.items():
        for index in other.where.flatten().nonzero().flatten()[:most].tolist():
            direction = torch.zeros_like(wide[number])
            direction.view(-1)[index] = 1.0
            if (both := slopes({number: direction})) is None:
                return False
            low, high, slack = both
            got, eager = float(other.found.flatten()[index]), float(other.eager.flatten()[index])
            if not math.isfinite(here):
                if math.isfinite(got) or math.isfinite(eager) or eager in (low, high):
                    return False
                continue
            choice = high - low > slack or not low - slack <= eager <= high + slack
            if not (choice and low - slack <= got <= high + slack):
                return False
    if not math.isfinite(here):
        return True
    both = slopes({number: other.where.double() for number, other in others.items()})
    if both is None:
        return True
    low, high, slack = both
    together = sum(float(other.found[other.where].double().sum()) for other in others.values())
    return high - low > slack or low - slack <= together <= high + slack
