"""What one call returns: structure, dtypes, gradients and (symbolic) shapes of its outputs.

TorchScript runs on real tensors: forward runs once, on copies. torch.export runs on fake tensors: forward runs on
copies of those; where it cannot, or turns a size into a number (numpy, ctypes, ``.item()``, int(x.shape[0])), it runs on real tensors of the example sizes and of
sizes moved a little, and the output sizes are fitted to the dynamic sizes. A size that does not fit is data-dependent
("unbacked"), never a constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch

from symbolics import torch_private as private
from symbolics.capture.interception import original_apply
from symbolics.capture.side_effects import watched
from symbolics.errors import ExportError
from symbolics.node.containers import Slot, fill

__all__ = ["Fresh", "Output", "Outputs", "observe"]


@dataclass(frozen=True)
class Fresh:
    """A size that only a run can tell; equal labels are equal sizes."""

    label: str


@dataclass
class Output:
    """One tensor output.

    Attributes:
        shape: An int, a sympy expression over the sizes of the inputs, or Fresh, a dimension.
        dtype, device, requires_grad: As eager's.
        real: The tensor itself under TorchScript.
    """

    shape: list[Any]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    real: torch.Tensor | None = None


@dataclass
class Outputs:
    """What one call returns.

    Attributes:
        tensors: The tensor outputs in order.
        template: What apply returned, with `Slot`s in place of its tensors.
        dirty: (input slot, output) of each input that forward changed and declared with mark_dirty.
        mutated: Input slots that forward changed without saying so.
        habits: What else a run of the file does that eager does otherwise, as text for a warning: random draws, state.
        input_sizes: The sizes of the inputs when shapes were expressed: one list a slot, [value] for a size slot.
    """

    tensors: list[Output]
    template: Any
    dirty: list[tuple[int, int]] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    habits: list[str] = field(default_factory=list)
    input_sizes: list[list[Any]] = field(default_factory=list)


Call = tuple[Sequence[Any], dict[str, Any]]


def observe(cls: type, call: Call, values: Sequence[Any], quietly: Callable[[Callable[[], Any]], Any]) -> Outputs:
    """Run forward unseen and say what it returns.

    Args:
        cls: The Function.
        call: The positional and keyword arguments as the caller passed them.
        values: The tensors and sizes among them, by slot.
        quietly: Runs a callable outside the capture.

    Raises:
        ExportError: forward raised, or its outputs cannot be described.
    """
    grad, run = torch.is_grad_enabled(), _run_real if private.is_tracing() else _run_fake

    def observed() -> Outputs:
        # Under inference_mode the copies would be tensors without a version; eager's apply is under no_grad there too.
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            return run(cls, call, values)

    return quietly(observed)


# ------------------------------------------------------------------------------------------------------- one run


@dataclass
class _Run:
    result: Any
    copies: list[Any]
    changed: list[int]  # input slots that are not as they were
    habits: list[str]

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        fill(self.result, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
        return found

    def describe(self, shapes: list[list[Any]], keep: bool = False) -> Outputs:
        tensors = self.tensors()
        count = iter(range(len(tensors)))
        outputs = [
            Output(shape, t.dtype, t.device, t.requires_grad, t.detach() if keep else None)
            for shape, t in zip(shapes, tensors, strict=True)
        ]
        dirty = [(i, j) for i, copy in enumerate(self.copies) for j, t in enumerate(tensors) if t is copy]
        return Outputs(
            tensors=outputs,
            template=fill(self.result, lambda leaf: Slot(next(count)) if isinstance(leaf, torch.Tensor) else leaf),
            dirty=dirty,
            mutated=[i for i in self.changed if i not in {i for i, _ in dirty}],
            habits=self.habits,
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that forward may change, of the same standing: leaf or not, Parameter or not."""
    fresh = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    if tensor.requires_grad:
        fresh.requires_grad_()
        if not tensor.is_leaf:
            with torch.enable_grad():
                return fresh.clone()
    return fresh


def _apply(cls: type, call: Call, values: Sequence[Any], stand_ins: Sequence[Any]) -> _Run:
    """Run apply with other tensors and sizes in the places of its own."""
    by_id = {id(value): stand_in for value, stand_in in zip(values, stand_ins, strict=True)}
    sizes = iter([s for v, s in zip(values, stand_ins, strict=True) if not isinstance(v, torch.Tensor) and not isinstance(s, torch.Tensor)])

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return by_id.get(id(value), value)
        if isinstance(value, torch.SymInt):
            known = value.node.maybe_as_int()
            return next(sizes) if known is None else known
        if isinstance(value, torch.Size):
            return torch.Size([leaf(n) for n in value])
        return value

    args, kwargs = fill(tuple(call[0]), leaf), fill(dict(call[1]), leaf)
    with watched(cls, (args, kwargs), stand_ins) as seen:
        result = original_apply(cls, args, kwargs)
    return _Run(result, list(stand_ins), seen.changed, seen.habits)


def _run_real(cls: type, call: Call, values: Sequence[Any]) -> Outputs:
    tensors: list[Any] = []
    fill((tuple(call[0]), dict(call[1])), lambda leaf: tensors.extend(leaf if isinstance(leaf, torch.Size) else [leaf]))
    originals = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
    copies = [int(v) if not isinstance(v, torch.Tensor) else _copy(v) for v in values]
    try:
        run = _apply(cls, call, originals, copies)
    except Exception as error:
        raise _forward_raised(error) from error
    return run.describe([list(t.shape) for t in run.tensors()], keep=True)


def _forward_raised(error: Exception) -> ExportError:
    return ExportError(
        f"its forward raised {type(error).__name__}: {str(error)[:500]}; make it run on the example arguments, or name the Function in inline="
    )


# -------------------------------------------------------------------------------------------------- fake tensors


def _expr(size: Any) -> Any:
    """An int, or the sympy expression of a symbolic one."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None else int(size)


def sizes_of(value: Any) -> list[Any]:
    """The sizes of a slot: a dimension each of a tensor, the value itself of a size."""
    return [_expr(n) for n in value.shape] if isinstance(value, torch.Tensor) else [_expr(value)]


def _run_fake(cls: type, call: Call, values: Sequence[Any]) -> Outputs:
    mode = private.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    shape_env = mode.shape_env if mode is not None else None
    input_sizes = [sizes_of(v) for v in values]
    try:
        with private.sizes_watched(shape_env) as asked:
            run = _apply(cls, call, values, [_copy(v) if isinstance(v, torch.Tensor) else v for v in values])
        symbolic: list[Any] = []
        fill(run.result, lambda leaf: symbolic.append(leaf) if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None)
        usable = not symbolic and not asked
    except Exception:
        usable = False  # code that needs data: numpy, ctypes, .item(). The real run raises what is a real error.
    if usable:
        known = {s for sizes in input_sizes for size in sizes for s in getattr(size, "free_symbols", ())}
        outputs = run.describe([[_known_or_fresh(_expr(n), known) for n in t.shape] for t in run.tensors()])
    else:
        with private.real_tensors():
            outputs = _Probe(cls, call, values, input_sizes).outputs()
    outputs.input_sizes = input_sizes
    return outputs


def _known_or_fresh(size: Any, known: set[Any]) -> Any:
    if isinstance(size, int) or not size.free_symbols - known:
        return size
    return Fresh(str(size))


class _Probe:
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
            raise _forward_raised(error) from error
        shapes = self._shapes(first)
        fitted = self._fit(shapes) if self.hints else [list(shape) for shape in shapes]
        try:
            second = self._run(self.hints, seed=1)
        except Exception as error:
            raise _forward_raised(error) from error
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

    def _run(self, assignment: dict[Any, int], seed: int) -> _Run:
        torch.manual_seed(seed)
        stand_ins: list[Any] = []
        for value, sizes in zip(self.values, self.input_sizes, strict=True):
            numbers = [int(s.subs(assignment)) if isinstance(s, sympy.Basic) else s for s in sizes]
            stand_ins.append(_example(value, numbers) if isinstance(value, torch.Tensor) else numbers[0])
        return _apply(self.cls, self.call, self.values, stand_ins)

    @staticmethod
    def _shapes(run: _Run) -> list[list[int]]:
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
    def _same_python_values(first: _Run, second: _Run) -> None:
        def leaves(run: _Run) -> list[Any]:
            found: list[Any] = []
            fill(run.result, lambda leaf: found.append(leaf) if not isinstance(leaf, torch.Tensor) else None)
            return found

        for one, two in zip(leaves(first), leaves(second), strict=False):
            if type(one) is not type(two) or (isinstance(one, (bool, int, float, str)) and one != two and one == one):
                raise ExportError(
                    f"it returns a Python value computed from its inputs ({one!r} in one run, {two!r} in another); a file would hold one of them: return a tensor"
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
