"""Reshapes of tensors without elements, for torch.onnx.export(dynamo=False)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite

__all__ = ["EMPTY_RESHAPES", "QUIRK", "reshapes_with_sizes"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript's shape inference divides by zero, which ends the process, at a Reshape to a shape with -1 of a tensor that has no elements",
)

_GIVES_UP = "no examples for shape_has_zero"


@contextlib.contextmanager
def reshapes_with_sizes() -> Iterator[None]:
    """While the block runs, torch's symbolic functions write such a shape with its sizes.

    Raises:
        ExportError: The sizes are computed, and torch's shape inference, which does not die of them now, gives up.
    """
    helpers, name = private.torchscript_reshape()
    original = getattr(helpers, name)

    def reshape(g: Any, x: Any, shape: Any, allowzero: int = 0) -> Any:
        known = x.type().sizes()
        if known is None or 0 not in known:
            return original(g, x, shape, allowzero)
        asked = private.torchscript_shape(shape)
        return original(g, x, shape if asked is None else _sizes(known, asked, bool(allowzero)), 1)

    setattr(helpers, name, reshape)
    try:
        yield
    except RuntimeError as error:
        if _GIVES_UP not in str(error):
            raise
        raise ExportError(
            "a tensor without elements is reshaped to a computed shape, which the TorchScript exporter cannot write: use dynamo=True, or an example "
            "with elements"
        ) from error
    finally:
        setattr(helpers, name, original)


def _sizes(known: list[int], asked: list[int], allowzero: bool) -> list[int]:
    """The size that -1 stands for is 0 where no other is, else what remains of the sizes that are not."""
    sizes = [known[i] if size == 0 and not allowzero else size for i, size in enumerate(asked)]
    given = math.prod(size for size in sizes if size > 0)
    rest = math.prod(size for size in known if size) // given if 0 in sizes else 0
    return [rest if size == -1 else size for size in sizes]


def _unfold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of nothing in the shape that there would be: TorchScript's im2col reshapes to computed sizes."""
    x = args[0] if args else None
    if not (private.is_tracing() and isinstance(x, torch.Tensor) and x.numel() == 0):
        return func(*args, **kwargs)
    with private.paused_capture():
        shape = tuple(int(size) for size in func(x.detach(), *args[1:], **kwargs).shape)
    return torch.zeros(shape, dtype=x.dtype, device=x.device) + x.sum()


EMPTY_RESHAPES: dict[Any, Rewrite] = {private.inner_function("im2col"): _unfold}
