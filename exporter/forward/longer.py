"""Examples whose open axes are 1 long: torch.export takes such a size for one that broadcasts, and what it makes of that is wrong at all others."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics.capture.recorder import active_recorder
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["Example"]

_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)


class Example:
    """The arguments of one export, and the same with longer axes.

    Attributes:
        args, kwargs: Those to export with.
        fakes: Whether the exporter has shapes and dtypes from the fake kernels of operators.
    """

    def __init__(self, args: Any, kwargs: Any, opened: Iterable[tuple[torch.Tensor, Mapping[int, Any]]], *, fakes: bool) -> None:
        """Args:
        args, kwargs: The example arguments.
        opened: Each tensor of them with its open axes: axis -> what ``dynamic_shapes`` has for it.
        fakes: As the attribute.
        """
        self.args, self.kwargs = self._own = args, kwargs
        self.fakes, self._opened = fakes, list(opened)

    @functools.cached_property
    def _longer(self) -> tuple[Any, Any] | None:
        grown = _grown(self._opened)
        return pytree.tree_map(lambda leaf: grown.get(id(leaf), leaf), self._own) if grown else None

    def exported(self, export: Callable[[], Any]) -> Any:
        """Export, and once more with longer axes where torch.export has taken a size of 1 for fixed, or failed.

        Where that fails, or takes another way through the model, the first holds, with a warning.

        Args:
            export: Exports with the arguments that this has.

        Returns:
            What ``export`` returns.
        """
        recorder = active_recorder()
        assert recorder is not None
        try:
            result, failure = export(), None
        except ExportError:
            raise
        except Exception as error:
            if self._longer is None:
                raise
            result, failure = None, error
        first = recorder.capture
        if failure is None and first.strict:  # torch takes what it has compiled of a recurrence in an earlier export for other open sizes
            result, first = _quietly(export), recorder.capture
        if (failure is not None or first.ones) and self._longer is not None:
            self.args, self.kwargs = self._longer
            try:
                longer, found = _quietly(export), recorder.capture
                if not (found.ones or found.strict or found.branches) and (failure or _alike(first, found)):
                    return longer
            except Exception:
                pass  # the first holds
            self.args, self.kwargs = self._own
            if failure is not None:
                recorder.capture = first
                raise failure
            result, first = _quietly(export), recorder.capture
        if first.strict:
            warn(
                "torch could capture the model only with Dynamo (strict=True): detach() and no_grad() in it are not marked, so gradients of the file "
                "may flow where PyTorch stops them: run torch.export.export(model, args, strict=False) to see why, and mend that."
            )
        if first.ones:
            warn(
                f"the example's size of an open axis is 1, and {first.ones[0]}: the file may be wrong at other sizes: export with an example whose open axes "
                "are 2 or longer."
            )
        return result


def _quietly(export: Callable[[], Any]) -> Any:
    """Export once more, without what torch has compiled before; what there is to say has been said."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export()


def _alike(one: Any, other: Any) -> bool:
    """Whether two captures gave results of the same types and ranks."""
    return [(dtype, len(dims)) for dtype, dims in one.results] == [(dtype, len(dims)) for dtype, dims in other.results]


def _grown(opened: Sequence[tuple[torch.Tensor, Mapping[int, Any]]]) -> dict[int, torch.Tensor]:
    """The tensors that have open axes of size 1, repeated along these, by the identity of the tensor; none where sizes are limited to 1."""
    taken = {size for tensor, _ in opened for size in tensor.shape}
    free = (length for length in _LENGTHS if length not in taken)
    found: dict[Any, int] = {}
    of_axis: dict[int, int] = {}
    grown: dict[int, torch.Tensor] = {}
    auto = torch.export.Dim.AUTO
    ones = [(tensor, axis, dim) for tensor, axes in opened for axis, dim in axes.items() if tensor.shape[axis] == 1]
    for tensor, axis, dim in sorted(ones, key=lambda one: one[2] is auto):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return {}
        if dim is auto:  # as of a target that is not named: its rows are those of the inputs
            length = of_axis.get(axis)
            if length is None:
                continue
        else:
            key = dim if isinstance(dim, str) else getattr(dim, "__name__", axis)
            length = found.get(key) or next(free, None)
            if length is None or getattr(dim, "min", None) not in (None, 0, 1) or length > (getattr(dim, "max", None) or length):
                return {}
            found[key] = of_axis[axis] = length
        grown[id(tensor)] = torch.cat([grown.get(id(tensor), tensor).detach()] * length, axis).requires_grad_(tensor.requires_grad)
    return grown
