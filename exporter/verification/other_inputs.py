"""Other inputs for a model whose example is all that is known: new values of the same kind, and new sizes of axes that a file leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.case import Case
from exporter.forward.inputs import named_tensors

__all__ = ["other_sizes", "other_values"]

_SEED = 20240311


def other_values(case: Case) -> Iterator[Case]:
    """The case with new values, in the order in which they should be tried: all tensors, then the float ones alone.

    Each new tensor has the shape and dtype of its example, and values of its kind. Integers are drawn from the example's
    own, so that an index stays one; masks stay masks. What is positive, sorted, symmetric, one-hot, zero in places, a
    distribution or of unit length stays so. What is constant and whole (an axis, a position) stays as it is.
    """
    seen: list[list[torch.Tensor]] = []
    for whole in (True, False):
        generator = torch.Generator().manual_seed(_SEED)
        made = _mapped(case, lambda x, whole=whole, generator=generator: _moved(x, generator, whole))  # type: ignore[misc]
        tensors = _tensors(made)
        known = any(all(map(_same, tensors, others)) for others in (*seen, _tensors(case)))
        seen.append(tensors)
        if not known:
            yield made


def other_sizes(case: Case, model: ir.Model) -> Iterator[tuple[str, Case]]:
    """(``batch=9, length=33``, the case of these sizes) for axes that the file leaves open, in the order in which they should be tried.

    Sizes of axes that are declared apart are apart, at first; then all are one larger, one smaller, or half. Values are those
    of `other_values`.
    """
    axes = _open_axes(case, model)
    sizes = _sizes_of(axes)
    if not sizes:
        return
    plans = [
        {name: size + 1 + place for place, (name, size) in enumerate(sizes.items())},
        {name: size + 1 for name, size in sizes.items()},
        {name: max(1, size - 1) for name, size in sizes.items()},
        {name: max(1, size // 2) for name, size in sizes.items()},
    ]
    for place, plan in enumerate(plans):
        if plan in plans[:place] or plan == sizes:
            continue
        wanted = {key: {axis: dim.evaluate(plan) for axis, (dim, _) in dims.items()} for key, dims in axes.items()}
        if not all(isinstance(size, int) and size > 0 for dims in wanted.values() for size in dims.values()):
            continue
        resized = _mapped(case, lambda x, wanted=wanted: _resized(x, wanted.get(id(x), {})))  # type: ignore[misc]
        for made in (*other_values(resized), resized):
            yield ", ".join(f"{name}={size}" for name, size in plan.items()), made


def _open_axes(case: Case, model: ir.Model) -> dict[int, dict[int, tuple[ir.SymbolicDim, int]]]:
    """The id of a tensor -> axis -> what the file calls its size, and the example's."""
    named = named_tensors(case.model, case.args, case.kwargs or {})
    inputs = {str(value.name): value for value in model.graph.inputs}
    if named.keys() <= inputs.keys():  # a file with gradients has more inputs: those of its outputs
        inputs = {name: inputs[name] for name in named}
    elif not inputs.keys() <= named.keys():
        if len(inputs) != len(named):
            return {}
        named = dict(zip(inputs, named.values(), strict=True))
    return {
        id(named[name]): {
            axis: (dim, size)
            for axis, (dim, size) in enumerate(zip(value.shape, named[name].shape, strict=False))
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None
        }
        for name, value in inputs.items()
        if value.shape is not None
    }


def _sizes_of(axes: Mapping[int, Mapping[int, tuple[ir.SymbolicDim, int]]]) -> dict[str, int]:
    """Each symbol -> its size in the example; empty where one cannot be told, or is 0."""
    dims = [each for found in axes.values() for each in found.values()]
    sizes = {str(dim.value): size for dim, size in dims if dim.free_symbols() == {dim.value}}
    for dim, size in dims:  # 2*n, where n alone stands nowhere
        for name in dim.free_symbols() - sizes.keys() if len(dim.free_symbols()) == 1 else ():
            found = next((n for n in range(min(size, 4096) + 1) if dim.evaluate({name: n}) == size), None)
            if found is not None:
                sizes[name] = found
    known = all(dim.evaluate(sizes) == size for dim, size in dims)
    return sizes if known and all(sizes.values()) else {}


def _mapped(case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """The case with each tensor of its arguments changed; one that is given twice stays one."""
    done: dict[int, torch.Tensor] = {}

    def once(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in done:
            done[id(x)] = change(x)
        return done[id(x)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, once, (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs)


def _tensors(case: Case) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(leaf, torch.Tensor)]


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one is two or (one.shape == two.shape and _is_plain(one) and bool(((one == two) | ((one != one) & (two != two))).all()))


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_quantized and x.device.type != "meta"


def _resized(x: torch.Tensor, sizes: Mapping[int, Any]) -> torch.Tensor:
    """Other sizes of some axes: cut, or gone on with from the start; what is sorted goes on with its end."""
    for axis, size in sizes.items():
        old = x.shape[axis]
        places = torch.arange(size, device=x.device)
        x = x.detach().index_select(axis, places.clamp(max=old - 1) if _is_sorted(x, axis) else places % old)
    return x


# ------------------------------------------------------------------------------------------------------- new values


def _moved(x: torch.Tensor, generator: torch.Generator, whole: bool) -> torch.Tensor:
    """New values of the same kind; ``whole`` says whether those of integers and flags may change."""
    floats = x.is_floating_point() or x.is_complex()
    if not x.numel() or not _is_plain(x) or not (floats or whole):
        return x
    with torch.no_grad():
        values = x.detach().cpu()
        if floats:  # not every type has all operators
            values = values.to(torch.complex128 if x.is_complex() else torch.float64)
        made = _float(values, generator) if floats else _integer(values, generator)
        return made.to(x.dtype).to(x.device)


def _uniform(shape: Any, generator: torch.Generator, low: float = 0.0) -> torch.Tensor:
    return low + (1 - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def _rolled(x: torch.Tensor) -> torch.Tensor:
    """Each axis by one: sums, lengths and ones along an axis are kept."""
    return x.roll([1] * x.dim(), list(range(x.dim()))) if x.dim() else x


def _axis_of(x: torch.Tensor) -> int:
    """The axis along which values are of one kind: the first one, unless hardly anything lies along it."""
    return 0 if x.shape[0] > 2 else max(range(x.dim()), key=lambda axis: x.shape[axis])


def _is_sorted(x: torch.Tensor, axis: int) -> bool:
    if x.is_complex() or x.dtype == torch.bool or not x.dim() or x.shape[axis] < 3 or not _is_plain(x):
        return False
    steps = x.detach().double().diff(dim=axis)
    return bool(steps.any()) and (bool((steps >= 0).all()) or bool((steps <= 0).all()))


def _drawn(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """At each place a value that stands elsewhere on the axis, in a sorted one in its order and between the same ends."""
    axis = _axis_of(x)
    size = x.shape[axis]
    if _is_sorted(x, axis):
        inner = torch.randint(size, (max(0, size - 2),), generator=generator).sort().values
        return x.index_select(axis, torch.cat([torch.tensor([0]), inner, torch.tensor([size - 1])]))
    return x.gather(axis, torch.randint(size, tuple(x.shape), generator=generator))


def _integer(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    first = x.flatten()[0]
    if bool((x == first).all()):
        is_mask = x.dtype == torch.bool or int(first) == 1
        if not is_mask or not x.dim() or x.shape[-1] < 2:
            return x
        other = torch.rand(tuple(x.shape), generator=generator) < 0.3
        other[..., 0] = False  # no row is masked as a whole
        return torch.where(other, (1 - first.int()).to(x.dtype), x)
    axis = _axis_of(x)
    if _is_sorted(x, axis):
        return _drawn(x, generator) if bool((x.diff(dim=axis) == 0).any()) else x  # places, each another one
    if x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all()):
        return _rolled(x)
    if x.dim() == 1 and bool((x.sort().values == torch.arange(x.numel()) + x.min()).all()):
        return x[torch.randperm(x.numel(), generator=generator)]
    return _drawn(x, generator)


def _is_symmetric(x: torch.Tensor) -> bool:
    """But for rounding: of ``a @ a.T``, some processors compute the two halves each in its own order."""
    return torch.allclose(x, x.mT, rtol=0, atol=1e-5 * float(x.abs().max()))


def _float(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if x.is_complex():
        return _mixed(x, generator) if x.dim() else x * _uniform((), generator, 0.5)
    if bool((x == x.flatten()[0]).all()):
        return _uniform(x.shape, generator) / 2 if not x.any() else x * _uniform(x.shape, generator, 0.5)
    if not bool(x.isfinite().all()) or bool(((x == x.min()) | (x == x.max())).all()):
        return _rolled(x)
    if x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and _is_symmetric(x):
        order = torch.randperm(x.shape[-1], generator=generator)
        return x[..., order, :][..., order] * _uniform((), generator, 0.5)
    if any(_sums_to_one(x, axis) for axis in range(x.dim())):
        weight = _uniform((), generator, 0.25)
        return weight * _rolled(x) + (1 - weight) * x
    if x.shape[-1] > 1 and bool((x.square().sum(-1) - 1).abs().max() < 1e-4):
        return _rolled(x)
    if bool((x == x.round()).all()):
        return _drawn(x, generator)
    if float((x == 0).double().mean()) > 0.1:  # padding, or the half of a matrix
        return x * _uniform(x.shape, generator, 0.5)
    if _is_sorted(x, x.dim() - 1) or _is_sorted(x, 0) or _are_boxes(x):
        middle = x.mean() if bool((x > 0).all()) or bool((x < 0).all()) else 0.0
        return middle + (x - middle) * _uniform((), generator, 0.5)
    return _mixed(x, generator)


def _mixed(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """At each place a mixture of two values that stand on the axis: in their range, and few of them there before."""
    axis, weight = _axis_of(x), _uniform(x.shape, generator)
    one, two = (x.gather(axis, torch.randint(x.shape[axis], tuple(x.shape), generator=generator)) for _ in range(2))
    return weight * one + (1 - weight) * two


def _sums_to_one(x: torch.Tensor, axis: int) -> bool:
    return x.shape[axis] > 1 and bool((x >= 0).all()) and bool((x.sum(axis) - 1).abs().max() < 1e-4)


def _are_boxes(x: torch.Tensor) -> bool:
    return x.dim() > 1 and x.shape[-1] == 4 and x.shape[:-1].numel() > 2 and bool((x[..., :2] < x[..., 2:]).all())
