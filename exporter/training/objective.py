"""A model and its loss as one module: what a training step differentiates."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from exporter.forward.inputs import named_tensors
from symbolics.errors import ExportError

__all__ = ["Objective"]


class Objective(torch.nn.Module):
    """forward(*args, *targets) -> the loss, a 0-d tensor.

    Its signature has the names of the arguments that are given, then ``target`` (``target_0``, ... where there are
    several): the exporters name the inputs after them.

    Attributes:
        args: Example arguments, targets included.
        names: The inputs that the model's own arguments become.
        target_names: The inputs that the targets become.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Callable[..., Any] | None,
        targets: tuple[Any, ...],
        precision: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.training = model.training  # not train(): that would reach into the model
        self.model = model
        self.loss = loss
        bound = _bind(model, args, kwargs)
        count = len(bound)
        names = ["target"] if len(targets) == 1 else [f"target_{i}" for i in range(len(targets))]
        for name in names:
            if name in bound:
                raise ExportError(f"the model has an argument {name!r}, which is the name of the loss's target: rename it")
        self.args = (*(value for _, value in bound.values()), *targets)
        keywords = {name for name, (keyword, _) in bound.items() if keyword}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in (*bound, *names)])

        def forward(*given: Any) -> torch.Tensor:
            values = dict(zip(bound, given[:count], strict=True))
            rest = {name: values.pop(name) for name in keywords}
            with torch.autocast("cpu", precision) if precision is not None else contextlib.nullcontext():
                output = model(*values.values(), **rest)
                return _scalar(output if loss is None else loss(output, *given[count:]), loss)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward
        every = list(named_tensors(self, self.args, {}))
        ours = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(targets))
        self.names, self.target_names = every[: len(every) - ours], every[len(every) - ours :]

    def dynamic(self, shapes: Any) -> Any:
        """``dynamic_shapes`` of the model's arguments for all of this module's; sizes of targets follow where nothing is said."""
        if shapes is None:
            return None
        names = list(inspect.signature(self.forward).parameters)
        given = dict(shapes) if isinstance(shapes, Mapping) else dict(zip(names, shapes, strict=False))
        if unknown := set(given) - set(names):
            raise ExportError(f"dynamic_shapes names {sorted(unknown)}; the step's arguments are {', '.join(names)}")
        every = dict(zip(names, self.args, strict=True))
        for name in names:
            if name not in given:
                given[name] = pytree.tree_map(_automatic if name.startswith("target") else _static, every[name])
        return {name: given[name] for name in names}


def _automatic(leaf: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _static(leaf: Any) -> None:
    return None


def _bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[bool, Any]]:
    """name -> (whether it is passed by keyword, value) of the arguments that are given.

    Raises:
        ExportError: forward cannot be called so.
    """
    try:
        signature = inspect.signature(model.forward)
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ExportError(f"{type(model).__name__}.forward cannot be called with the example arguments: {error}") from error
    out: dict[str, tuple[bool, Any]] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            out.update((f"{name}_{i}", (False, item)) for i, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            out.update((key, (True, item)) for key, item in value.items())
        else:
            out[name] = (name in kwargs, value)
    return out


def _scalar(loss: Any, function: Any) -> torch.Tensor:
    """The one number in what the loss, or a model that computes its loss, returned."""
    if function is None and not isinstance(loss, torch.Tensor):
        if isinstance(loss, Mapping) and "loss" in loss:
            loss = loss["loss"]
        elif isinstance(loss, (tuple, list)) and loss:
            loss = loss[0]
    who = (
        "the model (loss=None: it returns its loss)"
        if function is None
        else f"the loss {getattr(function, '__name__', type(function).__name__)}"
    )
    if not isinstance(loss, torch.Tensor):
        raise ExportError(f"{who} returned a {type(loss).__name__}: a training step needs one floating-point number, a tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ExportError(
            f"{who} returned a tensor of {loss.dtype} with shape {list(loss.shape)}: a training step needs one floating-point number (reduce it, for example with .mean())"
        )
    return loss.reshape(())
