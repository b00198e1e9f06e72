"""Examples whose open axes are 1 long: torch.export takes such a size for one that broadcasts, and what it makes of that is wrong at all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from exporter.forward.arguments import keywords_apart
from exporter.forward.inputs import open_axes
from symbolics.capture.recorder import active_recorder
from symbolics.errors import ExportError
from symbolics.users import warn

__all__ = ["Example"]

_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)


class Example:
    """The arguments of one export, and the same with longer axes.

    Attributes:
        args, kwargs: Those to export with.
    """

    def __init__(self, model: Any, args: Any, kwargs: Any, shapes: Any) -> None:
        """Args:
        model, args, kwargs: The model and its example arguments.
        shapes: ``dynamic_shapes``, checked.
        """
        self.args, self.kwargs = self._own = args, kwargs
        self._longer = _longer(model, args, kwargs, shapes) if isinstance(model, torch.nn.Module) and shapes else None

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
        if self._longer is not None and (failure is not None or first.ones):
            self.args, self.kwargs = self._longer
            try:
                longer, found = _quietly(export), recorder.capture
                if not (found.ones or found.strict or found.branches) and (failure or _alike(first, found)):
                    return longer
            except Exception as error:
                failure = failure or error if result is None else None
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
                f"the example's size of an open axis is 1, and torch.export has taken it for fixed ({first.ones[0]}): the file may be wrong at other sizes: export "
                "with an example whose open axes are 2 or longer."
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


def _longer(model: torch.nn.Module, args: Any, kwargs: Any, shapes: Any) -> tuple[Any, Any] | None:
    """The arguments, repeated along their open axes of size 1; None where there is none, or where their sizes hang on one another."""
    try:
        opened = list(
            open_axes(model, *keywords_apart(model, (args,) if isinstance(args, torch.Tensor) else tuple(args or ()), kwargs), shapes)
        )
    except TypeError:  # the exporter says what does not fit
        return None
    taken = {size for tensor, _ in opened for size in tensor.shape}
    free = (length for length in _LENGTHS if length not in taken)
    found: dict[Any, int] = {}
    grown: dict[int, torch.Tensor] = {}
    for tensor, axes in opened:
        for axis, dim in axes.items():
            if tensor.shape[axis] != 1:
                continue
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                return None
            key = dim if isinstance(dim, str) else getattr(dim, "__name__", axis)
            length = found.get(key) or next(free, None)
            if length is None or getattr(dim, "min", None) not in (None, 0, 1) or length > (getattr(dim, "max", None) or length):
                return None
            found[key] = length
            rows = grown.get(id(tensor), tensor)
            grown[id(tensor)] = torch.cat([rows.detach()] * length, axis).requires_grad_(tensor.requires_grad)
    if not grown:
        return None
    return pytree.tree_map(lambda leaf: grown.get(id(leaf), leaf), (args, kwargs))
