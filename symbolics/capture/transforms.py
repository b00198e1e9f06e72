"""Derivatives by torch.func inside a forward: what stands in for the functions of torch that grad, vjp, jvp and the Jacobians end in.

In eager mode they wrap tensors, which no exporter sees through. Here each is made of ``pythonop::gradient``: what is differentiated
with respect to is a `variable` of its own, so that a function may also close over the tensor itself. A jvp is the gradient of a vjp,
which is linear in its cotangent, with respect to that cotangent. A Jacobian runs once for each row, one after the other.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.gradients_in_forward import edges_behind, gradients, variable
from symbolics.capture.recorder import Recorder
from symbolics.errors import ExportError

__all__ = ["STAND_INS"]


def _grad_and_value(recorder: Recorder, func: Any, argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    what = "torch.func.grad"
    _check(recorder, what)
    with _level() as leave:
        args, chosen, spec = _varied(args, argnums)
        output = func(*args, **kwargs)
        aux = None
        if has_aux:
            output, aux = _with_aux(recorder, what, output)
        if not isinstance(output, torch.Tensor) or output.dim():
            recorder.refuse(
                what, f"the function returns {_shown(output)}, it has to return a scalar tensor: take torch.func.vjp or jacrev of another"
            )
        found = _zero_filled(recorder, what, [output], chosen, [None])
    gradient, output, aux = leave((pytree.tree_unflatten(found, spec), output, aux))
    return (gradient, (output, aux)) if has_aux else (gradient, output)


def _vjp(recorder: Recorder, func: Any, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    what = "torch.func.vjp"
    _check(recorder, what)
    with _level() as leave:
        args, chosen, spec = _varied(primals, argnums)
        output = func(*args)
        aux = None
        if has_aux:
            output, aux = _with_aux(recorder, what, output)
        results, out_spec = pytree.tree_flatten(output)
        _check_floats(recorder, what, results)

    def pull(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        flat, given = pytree.tree_flatten(cotangents)
        if given != out_spec:
            recorder.refuse(what, "cotangents are not in the structure of the outputs of the function")
        with torch.enable_grad():
            found = _zero_filled(recorder, what, results, chosen, flat)
        tree = pytree.tree_unflatten(found, spec)
        return tree if (torch.is_grad_enabled() if create_graph is None else create_graph) else _stopped(tree)

    shown = leave(output)
    return (shown, pull, leave(aux)) if has_aux else (shown, pull)


def _jvp(recorder: Recorder, func: Any, primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool) -> Any:
    what = "torch.func.jvp"
    _check(recorder, what)
    if not isinstance(primals, tuple):
        recorder.refuse(what, "primals has to be a tuple")
    shared = recorder.capture.taken.shared
    key = (func, *map(id, pytree.tree_leaves(primals)))
    with _level() as leave:
        if shared is None or key not in shared:
            pushed = _pushed(recorder, what, func, primals, argnums, has_aux)
            if shared is not None:  # the rows of one Jacobian: the function runs once for all
                shared[key] = pushed
        else:
            pushed = shared[key]
        output, aux, results, pulled, dummies = pushed
        flat, _ = pytree.tree_flatten(tangents)
        used = [(g, t) for g, t in zip(pulled, flat, strict=True) if g is not None]
        found = _zero_filled(recorder, what, [g for g, _ in used], dummies, [t for _, t in used]) if used else []
        if not used:
            found = [torch.zeros_like(y) for y in results]
        out = pytree.tree_unflatten(found, pytree.tree_structure(output))
    return (leave(output), leave(out), leave(aux)) if has_aux else (leave(output), leave(out))


def _pushed(recorder: Recorder, what: str, func: Any, primals: Any, argnums: Any, has_aux: bool) -> Any:
    """A function run once, and its vjp at cotangents that stand for any."""
    args, chosen, _ = _varied(primals, argnums)
    with _own_jvps_refused(recorder, chosen):
        output, aux = func(*args), None
    if has_aux:
        output, aux = _with_aux(recorder, what, output)
    results = pytree.tree_leaves(output)
    _check_floats(recorder, what, results)
    dummies = [variable(torch.zeros_like(y)) for y in results]
    open_ = [(y, u) for y, u in zip(results, dummies, strict=True) if y.requires_grad]
    pulled: Sequence[torch.Tensor | None] = [None] * len(chosen)
    if open_:
        pulled = gradients(recorder, what, [y for y, _ in open_], chosen, [u for _, u in open_], create_graph=True)
    return output, aux, results, pulled, dummies


@contextlib.contextmanager
def _own_jvps_refused(recorder: Recorder, variables: Sequence[torch.Tensor]) -> Iterator[None]:
    """Eager pushes tangents through a Function by its jvp; what stands in for that knows its backward alone."""

    def check(cls: type, arguments: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        with private.unheard():
            if private.has_own_jvp(cls) and edges_behind(tensors) & edges_behind(variables, variables):
                raise ExportError(
                    "it has a jvp of its own, which torch.func.jvp (jacfwd, hessian) runs in eager mode, and a file would have the derivative by its backward.\n"
                    "  way out: take torch.func.vjp or jacrev, which run its backward; name it in inline= if the derivative of its forward is right; or take "
                    "the jvp in the forward of an autograd Function, which stays one node"
                )

    recorder.capture.taken.pushing.append(check)
    try:
        yield
    finally:
        recorder.capture.taken.pushing.pop()


def _rows(recorder: Recorder, func: Any, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", **options: Any) -> Any:
    """In place of the vmap of a Jacobian: a call for each row, and their results stacked."""

    def run(*args: Any) -> Any:
        count = next(leaf.shape[0] for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        outer, recorder.capture.taken.shared = recorder.capture.taken.shared, {}
        try:
            rows = [func(*pytree.tree_map_only(torch.Tensor, operator.itemgetter(i), args)) for i in range(count)]
        finally:
            recorder.capture.taken.shared = outer
        return pytree.tree_map(lambda *parts: torch.stack(parts), *rows)

    return run


def _basis(recorder: Recorder, tensors: Sequence[torch.Tensor], numels: Sequence[Any], chunk_size: int | None = None) -> Iterator[Any]:
    """The rows of the identity matrix, as tensors of these shapes."""
    if private.is_tracing():  # a size is a tensor there
        with private.paused_capture():
            dynamic = set(recorder.capture.dynamic)
            numels = [None if dynamic.intersection(map(int, tensor.shape)) else tensor.numel() for tensor in tensors]
    if not all(type(count) is int for count in numels):
        recorder.refuse(
            "torch.func.jacrev, jacfwd or hessian",
            "it writes down a row for each element, and how many there are is known when the file runs (a dynamic dimension): differentiate the sum over "
            "that dimension where its elements do not mix (torch.func.grad), or export without dynamic_shapes",
        )
    total = sum(numels)
    step = total if chunk_size is None else chunk_size
    for first in range(0, total, step):
        rows, start, parts = min(step, total - first), 0, []
        for tensor, count in zip(tensors, numels, strict=True):
            one = torch.eye(total, dtype=tensor.dtype, device=tensor.device)[first : first + rows, start : start + count]
            parts.append(one.reshape(rows, *tensor.shape))
            start += count
        yield tuple(parts)


#: What stands in for functions of `symbolics.torch_private.functional_transforms`, by their names; each takes the recorder first.
STAND_INS: dict[str, Callable[..., Any]] = {
    "grad_and_value_impl": _grad_and_value,
    "_vjp_with_argnums": _vjp,
    "_jvp_with_argnums": _jvp,
    "vmap": _rows,
    "_chunked_standard_basis_for_": _basis,
}


# --------------------------------------------------------------------------------------------------------------- parts


def _check(recorder: Recorder, what: str) -> None:
    if private.transforms_active():
        recorder.refuse(
            what,
            "under torch.func.vmap the gradient of each sample would be one of its own: call it outside vmap, on the sum over the batch (the gradient of "
            "sum(f(x)) with respect to x has each sample's in its row, where samples do not mix), or in the forward of an autograd Function that is not named "
            "in inline=, which stays one node",
        )


@contextlib.contextmanager
def _level() -> Iterator[Callable[[Any], Any]]:
    """Gradients inside, whatever surrounds; what leaves takes its gradient along only where that is wanted outside."""
    outer = torch.is_grad_enabled()
    with torch.enable_grad():
        yield (lambda tree: tree) if outer else _stopped


def _stopped(tree: Any) -> Any:
    def stop(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.pythonop.stop_gradient(tensor.detach()) if tensor.requires_grad else tensor

    return pytree.tree_map_only(torch.Tensor, stop, tree)


def _varied(args: tuple[Any, ...], argnums: Any) -> tuple[tuple[Any, ...], list[torch.Tensor], Any]:
    """The arguments with variables in the place of those that are chosen (None: of all); these, and their structure."""
    numbers = range(len(args)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    places = [number % len(args) for number in numbers]
    varied = list(args)
    for place in dict.fromkeys(places):
        varied[place] = pytree.tree_map_only(torch.Tensor, variable, args[place])
    chosen = varied[places[0]] if isinstance(argnums, int) else tuple(varied[place] for place in places)
    leaves, spec = pytree.tree_flatten(chosen)
    return tuple(varied), leaves, spec


def _zero_filled(
    recorder: Recorder, what: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> list[torch.Tensor]:
    """Gradients, zeros where there is none: torch.func knows no None."""
    open_ = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if open_:
        found = gradients(recorder, what, [y for y, _ in open_], inputs, [g for _, g in open_], create_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _with_aux(recorder: Recorder, what: str, output: Any) -> tuple[Any, Any]:
    if not (isinstance(output, tuple) and len(output) == 2):
        recorder.refuse(what, "with has_aux=True the function has to return a tuple (output, aux)")
    return output


def _check_floats(recorder: Recorder, what: str, results: Sequence[Any]) -> None:
    for result in results:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            recorder.refuse(what, f"the function returns {_shown(result)}, it has to return floating point tensors")


def _shown(value: Any) -> str:
    return (
        f"a tensor of {value.dim()} dimensions and type {value.dtype}"
        if isinstance(value, torch.Tensor)
        else f"something of type {type(value).__name__}"
    )
