"""Calls of a half type whose result comes out in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.pytorch.masked_rows import nothing_where_all_is_masked
from symbolics.quirks.pytorch.scalars import SCALARS
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call

__all__ = ["HALF_RESULTS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="torch.onnx computes sums, products and extrema of a half type in float32, as eager does, and forgets to cast the result back; so does "
    "TorchScript with attention under a mask",
)


def _in_float(inner: Rewrite | None, torchscript: bool = False) -> Rewrite:
    """The call in float32, and its result in the half type."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        half = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        if half not in HALVES or kwargs.get("dtype") is not None or (torchscript and not private.is_tracing()):
            return call(inner, func, args, kwargs)
        wide = pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype is half else t, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(half) if t.is_floating_point() else t, call(inner, func, *wide))

    return called


_NAMES = ("sum", "nansum", "prod", "cumsum", "cumprod", "amax", "amin", "aminmax")
HALF_RESULTS: dict[Any, Rewrite] = {
    functional.scaled_dot_product_attention: _in_float(nothing_where_all_is_masked, torchscript=True),
    **{function: _in_float(SCALARS.get(function)) for name in _NAMES for function in (getattr(torch, name), getattr(torch.Tensor, name))},
}
