"""Two runs of one step, tensor by tensor."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from exporter.verification.rows import ZEROS, Row
from exporter.verification.steps import shapes_of

__all__ = ["FACTOR", "FEW", "HALF_FACTOR", "ROUGH", "Results", "coarser", "compare", "difference", "largest", "limit_of", "tolerance_of"]

#: What a difference may be at least, relative: some hundred roundings of the type.
_FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: How much larger than eager's own error the file's may be: it rounds in another order. The largest error of many numbers says how a type rounds;
#: that of one is small by luck now and then, so that where there are few, more is allowed: 40 times for one number, 11 for 30.
FACTOR = 10.0
FEW = 3.0
#: Above this, eager's own error says that the function is not smooth (it rounds, sorts or thresholds): float64 takes other turns.
ROUGH = 1e-3
#: Types that may be narrower than a model's own, from the finest on. Where operators inside a model compute in one (autocast, `.half()` or `.float()` in
#: its forward), eager's own error is that of the type, and no sign of a threshold: up to what the type allows, the file may be so many times as far away
#: as eager, or as one rounding is.
_NARROWER = (torch.float32, torch.float16, torch.bfloat16)
_HALVES = (torch.float16, torch.bfloat16)
HALF_FACTOR = 4.0
#: By how much some elements, or some gradients, are larger than the rest, and how large they are, where the rest may be measured by itself: masks add
#: such numbers to logits.
_FAR = 1e3
#: Fewer elements than these are exact by luck now and then; where the others are so much larger, luck does not go as far.
_ENOUGH, _FARTHEST = 8, 1e6
#: A gradient that is smaller than this share of the largest one is a sum of larger ones, with the roundings of those.
_SUMMED = 0.1
#: What may differ at most: zeros are off by 1.
_MOST = 0.5
#: By how many roundings a buffer may move that eager's forward leaves as it was, and how many of the largest output are 0.
_ROUNDINGS = 16
#: What is left in float64, at most, of an output that is 0 but for the roundings of its type.
_VANISHES = 1e-3


class Results(Protocol):
    """What a step gives: its output tensors, (kind, name) -> gradient, None where there is none, and what its forward makes of buffers."""

    @property
    def outputs(self) -> Sequence[torch.Tensor]: ...  # noqa: D102

    @property
    def gradients(self) -> Mapping[tuple[str, str], torch.Tensor | None]: ...  # noqa: D102

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...  # noqa: D102


def tolerance_of(dtype: str, precision: torch.dtype | None = None) -> float:
    """What a difference of two tensors of a float type may be at least, in units of the largest value.

    Args:
        dtype: Their type; "" of a row that stands for no tensor alone, which has no tolerance of its own: 0.
        precision: The type in which float32 is computed, where that is another.
    """
    if not dtype:
        return 0.0
    return _FLOOR.get(precision if precision is not None and dtype == "float32" else getattr(torch, dtype), 1e-1)


def coarser(one: torch.dtype | None, two: torch.dtype) -> torch.dtype | None:
    """Of two types of at most 32 bits the one whose roundings are larger; ``one`` where ``two`` is none of them."""
    if two not in _NARROWER:
        return one
    return two if one is None else max(one, two, key=_NARROWER.index)


def limit_of(row: Row) -> float:
    """Up to which error of its own eager in float64 is a row's reference, in the units of its error, but for gradients that are small sums."""
    return max(ROUGH, tolerance_of(row.half or row.dtype))


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs are none."""
    a, b = got.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs())
    return float(gap.max()) if gap.numel() else 0.0


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value."""
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def compare(
    wanted: Results,
    precise: Results | None,
    got: Results,
    lost: Mapping[str, str],
    precision: torch.dtype | None = None,
    untouched: Mapping[str, torch.Tensor] | None = None,
    opaque: Container[str] = (),
    half: torch.dtype | None = None,
) -> list[Row]:
    """A row per tensor: outputs, gradients, then the buffers that a forward changes. Of outputs of other shapes there are no gradients.

    Args:
        wanted: Eager's.
        precise: Eager's in float64, None where there is no such run.
        got: The file's.
        lost: What eager's forward changes and the file does not carry -> why.
        precision: The type in which the file computes float32, where that is another.
        untouched: The buffers that eager's forward leaves as they were.
        opaque: The parameters of opaque modules. A file has zeros for those on a way that a run does not take, where eager has no gradient.
        half: The type narrower than the model's own in which eager's operators gave results, None where there was none. Tensors that this does not
            reach, as eager's own error says, are allowed what they are without it.
    """
    rows, untouched = [], untouched or {}
    highest = max((largest(output) for output in wanted.outputs if output.is_floating_point()), default=0.0)
    for index, output in enumerate(wanted.outputs):
        found = got.outputs[index] if index < len(got.outputs) else None
        better = precise.outputs[index] if precise is not None else None
        noise = highest if _is_noise(output, better, highest) else 0.0
        rows.append(_row(f"output {index}", "output", output, found, better, noise, precision, half))
    if len(got.outputs) > len(wanted.outputs):
        problem = f"the file has {len(got.outputs)} outputs, eager {len(wanted.outputs)}"
        rows.append(Row("outputs", "output", (), "", float("nan"), None, 0.0, "", False, problem))
    noise = max((largest(g) for g in wanted.gradients.values() if g is not None), default=0.0)
    comparable = shapes_of(got.outputs) == shapes_of(wanted.outputs)
    for (kind, name), gradient in wanted.gradients.items() if comparable else ():
        found = got.gradients.get((kind, name))
        better = precise.gradients[kind, name] if precise is not None else None
        if gradient is None and found is None:
            continue
        if found is None and gradient is not None and not gradient.any():
            found = torch.zeros_like(gradient)  # where nothing can come through (torch.round), eager has zeros and a graph no path
        row = _row(name, kind, gradient, found, better, noise, precision, half)
        if gradient is None and kind == "parameter gradient" and name in opaque and found is not None and not found.any():
            row = replace(row, error=0.0, ok=True, problem="", note=ZEROS)
        rows.append(row)
    beside: dict[str, float] = {}
    for name, buffer in wanted.buffers.items():
        if buffer.is_floating_point():
            owner = name.rpartition(".")[0]
            beside[owner] = max(beside.get(owner, 0.0), largest(buffer))
    for name in dict.fromkeys((*wanted.buffers, *got.buffers)):
        if name not in lost:
            better = None if precise is None else precise.buffers.get(name)
            noise = beside.get(name.rpartition(".")[0], 0.0)
            mine, theirs = wanted.buffers.get(name), got.buffers.get(name)
            if mine is None and theirs is not None and _rounded(theirs, untouched.get(name)):
                mine = untouched[name]
            rows.append(_row(name, "buffer", mine, theirs, better, noise, precision, half))
    rows += [
        Row(name, "buffer", (), "", float("nan"), None, 0.0, "", False, f"the file does not carry it: {why}") for name, why in lost.items()
    ]
    return rows


def _is_noise(output: torch.Tensor, better: torch.Tensor | None, highest: float) -> bool:
    """Whether an output is 0 but for roundings (a model may return gradients): float64 says so, or of float64 itself the outputs beside it."""
    if not output.is_floating_point() or not output.any():
        return False
    if better is not None:
        return largest(better) < _VANISHES * largest(output)
    return output.dtype is torch.float64 and largest(output) <= _ROUNDINGS * torch.finfo(output.dtype).eps * highest


def _rounded(got: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether a buffer moved by a few roundings: eager's, in the last step of an iteration, may be where it was to the bit."""
    if before is None or got.shape != before.shape or got.dtype != before.dtype or not got.is_floating_point():
        return False
    return difference(got, before) <= _ROUNDINGS * torch.finfo(got.dtype).eps * largest(before)


def _row(
    name: str,
    kind: str,
    wanted: torch.Tensor | None,
    got: torch.Tensor | None,
    better: torch.Tensor | None,
    noise: float,
    precision: torch.dtype | None,
    half: torch.dtype | None,
) -> Row:
    shown = wanted if wanted is not None else got
    assert shown is not None
    about = (name, kind, tuple(shown.shape), _name(shown.dtype))
    problem = ""
    if wanted is None:
        problem = "eager's forward leaves it as it was" if kind == "buffer" else "eager has no gradient, the file has one"
    elif got is None:
        problem = "missing in the file, eager has it"
    elif got.shape != wanted.shape or got.dtype != wanted.dtype:
        problem = f"the file gives {_name(got.dtype)} of shape {list(got.shape)}"
    if problem:
        return Row(*about, float("nan"), None, 0.0, "", False, problem)
    assert wanted is not None and got is not None
    if not wanted.is_floating_point():
        differ = int((got != wanted).sum())
        return Row(
            *about, float(differ), None, 0.5, about[3], differ == 0, f"{differ} of {wanted.numel()} elements differ" if differ else ""
        )
    rest = None if better is None else _rest(wanted)
    judged = _judged(about, wanted, got, better, noise, precision, half)
    if better is None or rest is None or not _stands_alone(wanted[rest], better[rest], largest(wanted)):
        return judged
    apart = _judged(about, wanted[rest], got[rest], better[rest], 0.0, precision, half)
    return max(judged, apart, key=lambda row: row.badness)


def _rest(wanted: torch.Tensor) -> torch.Tensor | None:
    """Where the elements are that others exceed by far, as a mask; None where none do."""
    if largest(wanted) < _FAR:
        return None
    sizes = wanted.detach().double().nan_to_num(0.0, 0.0, 0.0).abs()
    values = sizes[sizes > torch.finfo(wanted.dtype).tiny].sort().values
    gaps = values[1:] / values[:-1]
    if not gaps.numel() or float(gaps.max()) < _FAR:
        return None
    return sizes <= values[int(gaps.argmax())]


def _stands_alone(wanted: torch.Tensor, better: torch.Tensor, beside: float) -> bool:
    """Whether eager's numbers are exact by their own size, so that they are no small sums of the larger ones ``beside``."""
    scale = largest(wanted)
    if not scale or difference(wanted, better) > tolerance_of(_name(wanted.dtype)) * scale:
        return False
    return wanted.numel() >= _ENOUGH or beside >= _FARTHEST * scale


def _judged(
    about: tuple[str, str, tuple[int, ...], str],
    wanted: torch.Tensor,
    got: torch.Tensor,
    better: torch.Tensor | None,
    noise: float,
    precision: torch.dtype | None,
    half: torch.dtype | None,
) -> Row:
    """The row of two tensors of one shape and float type, measured by the largest value."""
    # A gradient that is 0 but for rounding (a bias in front of a norm) is measured by the largest one of the model, an output that is by the
    # largest output, a buffer that is (a running mean behind a norm) by the largest one of its module.
    if better is not None and 0.01 * noise > _FAR * largest(wanted) and _stands_alone(wanted, better, 0.01 * noise):
        noise = 0.0
    scale = max(largest(wanted), 0.01 * noise) or 1.0
    floor = tolerance_of(about[3], precision)
    own = None if better is None else difference(wanted, better) / scale
    if own != own:
        own = None
    factor = 1 + FEW / max(1, wanted.numel())
    inside = "" if half is None or floor >= tolerance_of(_name(half)) else _name(half)
    if half is None or not inside or (own is not None and FACTOR * factor * own <= floor):
        inside, least, limit, allowed = "", floor, max(ROUGH, floor), FACTOR * factor * (own or 0.0)
    else:
        floor, least = tolerance_of(inside), HALF_FACTOR * torch.finfo(half).eps
        limit = min(_MOST, floor * max(1.0, _SUMMED * noise / scale))
        allowed = min(limit, factor * max(FACTOR * min(own or 0.0, ROUGH), HALF_FACTOR * (own or 0.0)))
    if better is not None and own is not None and own <= limit:
        error, tolerance, reference = difference(got, better) / scale, max(least, allowed), "float64"
    else:
        error, tolerance, reference = difference(got, wanted) / scale, floor, about[3]
        # In 16 bits eager is soon on the other side of a threshold (that of a ReLU for its gradient), where a file that rounds less is with float64.
        if better is not None and (inside or wanted.dtype in _HALVES) and (nearer := difference(got, better) / scale) < error:
            error, reference = nearer, "float64"
    return Row(*about, error, own, tolerance, reference, error <= tolerance, half=inside)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
