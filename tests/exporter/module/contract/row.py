"""What a row is, and what rows share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ALL", "OURS", "ROWS", "Row", "grads", "row", "said", "state", "step"]


@dataclass(frozen=True)
class Row:
    """One line of the contract.

    Attributes:
        area, what: Where the page has it, and its text there.
        run: From a module and an input to what is compared with eager's.
        refused: None where eager's result is the module's, too. Else what the error or the warning says, a regular expression, and `way`, for the page,
            the way out.
        net: The model.
        kinds: Which files; see `twins.KINDS`.
        training: The mode at export.
    """

    area: str
    what: str
    run: Callable[[nn.Module, torch.Tensor], Any]
    refused: str | None = None
    way: str = ""
    net: str = "net"
    kinds: tuple[str, ...] = ("dynamo", "foreign")
    training: bool = True

    @property
    def name(self) -> str:
        return self.run.__name__


ROWS: list[Row] = []
OURS, ALL = ("dynamo",), ("dynamo", "torchscript", "foreign")


def row(area: str, what: str, **more: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        ROWS.append(Row(area, what, run, **more))
        return run

    return add


def step(m: nn.Module, x: torch.Tensor) -> list[Any]:
    """A forward and a backward: the output, whether it has a gradient, and the gradients."""
    y = m(x)
    (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape) + y.square()).sum().backward()
    return [y, y.requires_grad, grads(m)]


def grads(m: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in m.named_parameters()}


def state(m: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in m.state_dict().items()}


def said(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run()
