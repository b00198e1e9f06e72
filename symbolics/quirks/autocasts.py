"""What autocast does to the arguments of a call, for what stands in for the call: a formula's own operators are other ones to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.rewriting import Rewrite

__all__ = ["as_autocast_has_it"]

#: What autocast computes in its half type, or in the widest of the arguments' types: the formulas keep that by themselves.
_OTHERS = frozenset(
    (
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "cat",
        "index_copy",
        "linalg_vecdot",
        "linear",
        "matmul",
        "mm",
        "scaled_dot_product_attention",
        "stack",
    )
)


def as_autocast_has_it(rewrites: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """Around what stands in for an operator that autocast computes in float32 on the CPU: torch says which."""
    found: dict[Any, Rewrite] = {}
    for function, rewrite in rewrites.items():
        name, _, overload = getattr(function, "__name__", "").partition(".")
        if name in _OTHERS:
            continue
        # torch.ops.aten.name.overload is one of them
        cast, left = (
            [schema for schema in some if not overload or schema.overload_name == overload.replace("default", "")]
            for some in private.autocast_schemas(name)
        )
        if cast:
            found[function] = _in_float(rewrite, cast, left)
    return found


def _in_float(rewrite: Rewrite, cast: list[Any], left: list[Any]) -> Rewrite:
    """The call on tensors in float32 where autocast is on.

    Args:
        rewrite: What stands in for the call.
        cast: The overloads that autocast casts for.
        left: Those that it leaves alone.
    """

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            not torch.is_autocast_enabled("cpu")
            or kwargs.get("out") is not None
            or not (any(_fits(s, args) for s in cast) or not any(_fits(s, args) for s in left))
        ):
            return rewrite(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _float, (args, kwargs))
        with torch.autocast("cpu", enabled=False):  # a product in the formula is float32's, too
            return rewrite(func, args, kwargs)

    return functools.wraps(rewrite)(called)


def _fits(schema: Any, args: tuple[Any, ...]) -> bool:
    """Whether an overload takes tensors where the arguments have them, and numbers where they have those."""
    return all(
        value is None or isinstance(value, torch.Tensor) == ("Tensor" in str(argument.type))
        for value, argument in zip(args, schema.arguments)
    )


def _float(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALVES and x.device.type == "cpu" else x
