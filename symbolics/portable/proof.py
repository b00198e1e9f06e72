"""The graph of a call beside the call itself, in eager mode, on the example: outputs, and gradients for cotangents drawn at random.

A tracer runs code on tensors of a class of its own, without values: who asks for their type, their text or their memory may go another way there.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from symbolics import torch_private as private
from symbolics.capture.draws import Draws
from symbolics.capture.opaque_op import Record
from symbolics.capture.raised import Raised
from symbolics.capture.side_effects import was_freed
from symbolics.node.dtypes import DTYPES
from symbolics.portable.kernels import Untraceable

__all__ = ["Eager", "check_caught", "check_graph", "eager_step", "own_generators"]

#: How far a result may be from eager's, in parts of the largest: the same operators ran, in another order at most.
_NEAR = {torch.float64: 1e-3, torch.float32: 1e-3}
_NEAR_OF_HALVES = 5e-2


@dataclass
class Eager:
    """The call in eager mode.

    Attributes:
        inputs: What it was given: tensors, and sizes as numbers.
        cotangents: For each output that has a gradient.
        results: What it gave, by name: the outputs, then a gradient for each input that needs one, None where there is none.
        caught: What torch raised in it, and it caught: the function's name and the kind of the error.
    """

    inputs: list[Any]
    cotangents: list[torch.Tensor]
    results: dict[str, torch.Tensor | None]
    caught: set[tuple[str, type]]


def eager_step(
    record: Record,
    numbers: Sequence[Sequence[Any]],
    differentiated: Sequence[int],
    run: Callable[[Sequence[Any]], list[torch.Tensor]],
    held: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]],
) -> Eager | None:
    """Run a call forward and backward, on the values of the example where they are known, else on random ones.

    Args:
        record: What was captured of it.
        numbers: The sizes of its inputs in a trace, for random values.
        differentiated: The outputs that have a gradient, by number.
        run: Makes the call: its tensor outputs.
        held: While it is open, the modules among the arguments hold what stands among the inputs for their parameters and buffers.

    Returns:
        None where there are no values to run it on, it raises on them (what raises is no silent difference), or gives sparse tensors.

    Raises:
        Untraceable: It draws random numbers.
    """
    call = record.traced or record.call
    values = _values(record, call.input_types, numbers)
    if values is None:
        return None
    inputs = [_stand_in(value, flag) for value, flag in zip(values, call.input_requires_grads, strict=True)]
    wanted = [i for i, flag in enumerate(call.input_requires_grads) if flag] if differentiated else []
    targets, raised, found = [inputs[i] for i in wanted], Raised(), list[torch.Tensor | None]()
    with own_generators() as sources:
        try:
            with torch.enable_grad(), held(inputs), raised.mode():
                outputs = run(inputs)
                chosen = [outputs[i] for i in differentiated]
                generator = torch.Generator().manual_seed(0)
                cotangents = [torch.empty_like(y).copy_(torch.randn(y.shape, generator=generator)) for y in chosen]
                if wanted:
                    own = [g.clone() for g in cotangents]  # a backward may change what it is given
                    found = list(torch.autograd.grad(chosen, targets, own, allow_unused=True))
        except Exception:  # it wants other values, or takes no cotangent of this kind
            return None
    if sources:
        raise Untraceable(f"its forward or its backward draws random numbers ({', '.join(sources)})")
    added = [target.grad if target.is_leaf else None for target in targets]  # by torch.autograd.backward inside
    sums = [a if g is None else g if a is None else g + a for g, a in zip(found, added, strict=True)]
    if any(tensor is not None and tensor.layout is not torch.strided for tensor in (*outputs, *sums)):
        return None
    results: dict[str, torch.Tensor | None] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    results |= {f"the gradient of input {i}": g for i, g in zip(wanted, sums, strict=True)}
    # As the tracer had them: its graph has views of what lies so in memory.
    given = [v.detach().clone(memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else v for v in values]
    return Eager(given, cotangents, results, {(each.name, type(each.error)) for each in raised.errors})


def check_caught(raised: Raised, eager: Eager | None, reason: Callable[[BaseException], str]) -> None:
    """Refuse a call that has caught what the tracer raised, unless eager mode raises it as well.

    Raises:
        Untraceable: It has.
    """
    for name, error, _ in raised.errors:
        if eager is None or (name, type(error)) not in eager.caught:
            if isinstance(error, Untraceable) and not name:
                raise error
            what = (str(error) if isinstance(error, Untraceable) else reason(error)).rstrip(".")
            raise Untraceable(
                f"its code catches an error that a tracer's tensors alone raise ({name or 'a condition'}), and goes on: {what}"
            )


def check_graph(eager: Eager, graph: Callable[..., Sequence[torch.Tensor]], outputs: int, gradients: Sequence[int]) -> None:
    """Compare what a graph gives with what eager mode gives.

    Args:
        eager: The call in eager mode.
        graph: Takes its inputs and cotangents; gives outputs, what is kept, gradients.
        outputs: How many outputs it has.
        gradients: The inputs that it gives a gradient for.

    Raises:
        Untraceable: They differ by more than rounding.
    """
    try:
        with torch.no_grad():
            given = graph(*eager.inputs, *eager.cotangents)
    except RuntimeError:  # a view of what lies otherwise in memory, which is nothing to a file
        return
    found = {f"output {i}": value for i, value in enumerate(given[:outputs])}
    found |= {f"the gradient of input {i}": value for i, value in zip(gradients, given[len(given) - len(gradients) :], strict=True)}
    largest = max((_size(value) for value in eager.results.values() if value is not None), default=0.0)
    for name, value in eager.results.items():
        pair = _apart(value, found.get(name), 1e-6 * max(largest, 1.0))
        if pair is not None:
            raise Untraceable(
                f"on the example a graph of it gives {pair[1]} in {name} where eager mode gives {pair[0]}: its code does something else on a tracer's tensors "
                "(it may ask for their type, text or memory), or does not do the same twice"
            )


def _apart(eager: torch.Tensor | None, graph: torch.Tensor | None, floor: float) -> tuple[str, str] | None:
    """Where they differ most, both numbers; None where they are alike. No gradient is one of zeros."""
    if eager is None or graph is None:
        some = graph if eager is None else eager
        if some is None or not _size(some):
            return None
        shown = f"{_size(some):.6g}"
        return ("none", shown) if eager is None else (shown, "none")
    if eager.shape != graph.shape:
        return str(tuple(eager.shape)), str(tuple(graph.shape))
    one, two = eager.detach().cpu().double().flatten(), graph.detach().cpu().double().flatten()
    near = _NEAR.get(eager.dtype, _NEAR_OF_HALVES) * _size(eager) + floor if eager.is_floating_point() else 0.0
    off = (one - two).abs()
    off[(one == two) | (one.isnan() & two.isnan())] = 0.0
    off[off.isnan()] = torch.inf
    if not len(off) or off.max() <= near:
        return None
    at = off.argmax()
    return f"{float(one[at]):.6g}", f"{float(two[at]):.6g}"


def _size(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    values = tensor.detach().double().abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def _values(record: Record, types: Sequence[Any], numbers: Sequence[Sequence[Any]]) -> list[Any] | None:
    """The inputs of the example, parameters and buffers of modules among the arguments last; else random ones, if all are floats."""
    hidden = [operator.attrgetter(path)(module) for module, path, _ in record.hidden]
    values = [*record.example, *hidden] if record.example else []
    usable = len(values) == len(types) and not any(isinstance(v, torch.Tensor) and (private.is_fake(v) or was_freed(v)) for v in values)
    if usable:
        return [v.detach().cpu() if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter) else v for v in values]
    dtypes = [DTYPES[kind] for kind in types]
    if not all(dtype.is_floating_point for dtype in dtypes):
        return None
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(numbers, dtypes, strict=True)]


def _stand_in(value: Any, flag: bool) -> Any:
    """What the call may change: a copy of the same kind, with this ``requires_grad``. What has a gradient is no leaf, as behind another layer."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().cpu().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=flag)
    if not flag:
        return copy
    with torch.enable_grad():
        return copy.requires_grad_().clone()


@contextlib.contextmanager
def own_generators() -> Iterator[list[str]]:
    """What the block draws is drawn again after it; the names of the generators that it drew from, filled in the end."""
    found, draws = list[str](), Draws()
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            yield found
        finally:
            draws.look()
            found += draws.sources + ([] if torch.equal(before, torch.get_rng_state()) else ["torch"])
            random.setstate(python)
            np.random.set_state(numpy)
