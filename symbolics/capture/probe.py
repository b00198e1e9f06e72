"""What one call returns: structure, dtypes, gradients and (symbolic) shapes of its outputs.

TorchScript runs on real tensors: forward runs once, on copies. torch.export runs on fake tensors: forward runs on
copies of those; where it cannot, or turns a size into a number (numpy, ctypes, ``.item()``, int(x.shape[0])), the eager run says what it returned, it runs on the
values of that run and on sizes moved a little, and the output sizes are fitted to the dynamic sizes. A size that does not fit is data-dependent
("unbacked"), never a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.eager_calls import EagerCall
from symbolics.capture.fitting import Example, as_known, fitted_outputs, run_on_other_values
from symbolics.capture.outputs import Fresh, Outputs, expression_of, sizes_of
from symbolics.capture.returned_numbers import moved_numbers, numbers_of
from symbolics.capture.told import agreed
from symbolics.capture.trial import Call, Trial, forward_raised, stand_in_for, trial
from symbolics.node.containers import fill
from symbolics.node.names import qualified_name

__all__ = ["observe"]


def observe(
    cls: type,
    call: Call,
    values: Sequence[Any],
    quietly: Callable[[Callable[[], Any]], Any],
    seen: EagerCall | None = None,
    missing: str = "",
    dynamic: Collection[int] = (),
) -> Outputs:
    """Run forward unseen and say what it returns.

    Args:
        cls: The Function.
        call: The positional and keyword arguments as the caller passed them.
        values: The tensors and sizes among them, by slot.
        quietly: Runs a callable outside the capture.
        seen: The same call in an eager run, None where there is none.
        missing: Why there is none, and the way out.
        dynamic: The example sizes of dynamic dimensions, in a trace.

    Raises:
        ExportError: forward raised, or its outputs cannot be described.
    """
    grad, tracing = torch.is_grad_enabled(), private.is_tracing()

    def observed() -> Outputs:
        # Under inference_mode the copies would be tensors without a version; eager's apply is under no_grad there too.
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            return _run_real(cls, call, values, dynamic) if tracing else _run_fake(cls, call, values, seen, missing)

    return quietly(observed)


def _run_real(cls: type, call: Call, values: Sequence[Any], dynamic: Collection[int]) -> Outputs:
    tensors: list[Any] = []
    fill((tuple(call[0]), dict(call[1])), lambda leaf: tensors.extend(leaf if isinstance(leaf, torch.Size) else [leaf]))
    originals = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
    copies = [int(v) if not isinstance(v, torch.Tensor) else stand_in_for(v) for v in values]
    try:
        run = trial(cls, call, originals, copies)
    except Exception as error:
        raise forward_raised(error) from error
    outputs = run.describe([list(t.shape) for t in run.tensors()], keep=True)
    if outputs.told or numbers_of(outputs.template):
        others = _run_otherwise(cls, call, originals, copies, dynamic)
        outputs.told = agreed(outputs.told, [other.told for other in others], qualified_name(cls)) if outputs.told else []
        outputs.moved = moved_numbers(outputs.template, [numbers_of(other.result) for other in others])
    return outputs


def _run_otherwise(cls: type, call: Call, values: Sequence[Any], copies: Sequence[Any], dynamic: Collection[int]) -> list[Trial]:
    """Runs on other values, drawn among its own, and on other sizes of dynamic dimensions: none where forward takes no others."""
    runs = []

    def run(seed: int, draw: Example) -> None:
        torch.manual_seed(seed)
        tensors = iter(values)
        others = [_other(next(tensors), dynamic if seed else (), draw) if isinstance(c, torch.Tensor) else c for c in copies]
        runs.append(trial(cls, call, values, others))

    with torch.random.fork_rng(devices=[]):
        run_on_other_values(run)
    return runs


def _other(value: torch.Tensor, dynamic: Collection[int], draw: Example) -> torch.Tensor:
    shape = [n + (n in dynamic) for n in value.shape]
    return draw(value, shape, as_known(value, shape, value.detach()).detach())


def _run_fake(cls: type, call: Call, values: Sequence[Any], seen: EagerCall | None, missing: str) -> Outputs:
    mode = private.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    shape_env = mode.shape_env if mode is not None else None
    input_sizes = [sizes_of(v) for v in values]
    try:
        with private.sizes_watched(shape_env) as asked:
            run = trial(cls, call, values, [stand_in_for(v) if isinstance(v, torch.Tensor) else v for v in values])
        symbolic: list[Any] = []
        kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
        fill(
            run.result, lambda leaf: symbolic.extend(n for n in (leaf if isinstance(leaf, torch.Size) else [leaf]) if isinstance(n, kinds))
        )
        usable = not symbolic and not asked
    except Exception:
        usable = False  # code that needs data: numpy, ctypes, .item(). The real run raises what is a real error.
    if usable:
        if seen is not None:
            seen.release()
        known = {s for sizes in input_sizes for size in sizes for s in getattr(size, "free_symbols", ())}
        outputs = run.describe([[_known_or_fresh(expression_of(n), known) for n in t.shape] for t in run.tensors()])
    else:
        with private.real_tensors():
            outputs = fitted_outputs(cls, call, values, input_sizes, seen, missing)
    outputs.input_sizes = input_sizes
    return outputs


def _known_or_fresh(size: Any, known: set[Any]) -> Any:
    if isinstance(size, int) or not size.free_symbols - known:
        return size
    return Fresh(str(size))
