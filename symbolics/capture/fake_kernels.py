"""What an operator's fake kernel says of its outputs, beside what the operator returned: torch.export believes the fake kernel."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.callsite import Call
from symbolics.errors import ExportError
from symbolics.node.operators import Operator

__all__ = ["FakeKernels"]


class FakeKernels:
    """The calls of operators in an eager run, each compared once."""

    def __init__(self) -> None:
        self._compared: set[Any] = set()

    def check(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, call: Call) -> None:
        """Compare the outputs of a call with what the fake kernel says of them.

        A size that it leaves open (``get_ctx().new_dynamic_size()``) is any size.

        Args:
            operator: The operator.
            args, kwargs: What it was given.
            result: What it returned.
            call: Where it was called.

        Raises:
            ExportError: An output has another dtype, rank or size, or there is another number of them.
        """
        leaves, _ = pytree.tree_flatten((args, kwargs))
        key = (operator, *((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves))
        if key in self._compared or private.transforms_active() or not private.has_fake_kernel(operator.overload):
            return
        self._compared.add(key)
        said = None
        with contextlib.suppress(Exception):  # it raises: the capture then runs the operator itself
            said = _tensors(_faked(operator, args, kwargs))
        if said is None:
            return
        real = _tensors(result)
        what = f"that there are {len(said)} outputs, there are {len(real)}" if len(said) != len(real) else ""
        for index, (fake, tensor) in enumerate(zip(said, real, strict=False)):
            if not what and (fake.dtype != tensor.dtype or not _fits(fake, tensor)):
                what = f"that output {index} is {_shown(fake)}, it is {_shown(tensor)}"
        if what:
            raise ExportError(
                f"{operator.name}, called in module {call.module or '<root>'} at {call.source or 'a line unknown'}: its fake kernel says {what}.\n"
                "  why: torch's exporter has shapes and dtypes from the fake kernel, so that the file would say what is not so\n"
                "  way out: mend the function that was given to register_fake (torch.library.opcheck(operator, args) tests it), or the operator;\n"
                "  or export with dynamo=False, which asks no fake kernel"
            )


def _faked(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator returns for tensors without values."""
    _, mode = private.fake_mode()

    def fake(leaf: Any) -> Any:
        return private.fake_tensor(mode, leaf.detach(), [False] * leaf.dim(), 0) if isinstance(leaf, torch.Tensor) else leaf

    with private.unheard(), torch.no_grad():
        args, kwargs = pytree.tree_map(fake, args), pytree.tree_map(fake, kwargs)
        with mode:
            return private.unwrapped_operator(operator.overload)(*args, **kwargs)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _fits(fake: torch.Tensor, tensor: torch.Tensor) -> bool:
    return fake.dim() == tensor.dim() and all(not isinstance(a, int) or a == b for a, b in zip(fake.shape, tensor.shape, strict=True))


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[n if isinstance(n, int) else '?' for n in tensor.shape]}".replace("'", "")
