"""What the command line says about the inputs of a TARGET: --input and --dynamic."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import exporter
from exporter.commands.shared import Failure, load_target
from symbolics.text import shown

if TYPE_CHECKING:
    import torch

__all__ = ["input_options", "load_case"]

_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>[a-z]+[a-z0-9_]*)\[(?P<shape>[0-9, ]*)\]")
_DYNAMIC = re.compile(r"(?P<name>\w+):(?P<axis>-?[0-9]+)=(?P<dim>[A-Za-z_]\w*)")


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--input and --dynamic; `load_case` does what they say."""
    for option in (
        click.option(
            "--dynamic",
            multiple=True,
            metavar="NAME:AXIS=DIM",
            help="Leave this axis of an input open in the file, under the name DIM: x:0=batch. May be repeated. Takes the place of the Case's dynamic_shapes.",
        ),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="[NAME=]DTYPE[SHAPE]",
            help="An example input for forward, random: x=float32[2,3]; without NAME, the next argument. May be repeated. "
            "With it TARGET may be a module, a class of modules or a function that returns one.",
        ),
    ):
        command = option(command)
    return command


def load_case(target: str, inputs: tuple[str, ...], dynamic: tuple[str, ...], *, targets: bool = False) -> exporter.Case:
    """The case that TARGET names, with the inputs and the dynamic axes that the command line names.

    Args:
        target, inputs, dynamic: As given.
        targets: Whether the axes may be those of the loss's targets, too: of ``target``, or ``target_0``, ...

    Raises:
        Failure: TARGET is none, one of the options cannot be read, or forward has no such argument.
    """
    case = load_target(target, bare=bool(inputs))
    if inputs:
        case = _with_examples(case, inputs)
    return replace(case, dynamic_shapes=_shapes(case, dynamic, targets)) if dynamic else case


def _with_examples(case: exporter.Case, inputs: tuple[str, ...]) -> exporter.Case:
    import torch

    random = torch.Generator().manual_seed(0)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for text in inputs:
        match = _INPUT.fullmatch(text)
        dtype = getattr(torch, match["dtype"], None) if match is not None else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise Failure(f"--input {text!r} is not of the form NAME=DTYPE[SHAPE], such as x=float32[2,3] or ids=int64[1,16]")
        tensor = _example(dtype, [int(size) for size in match["shape"].split(",") if size.strip()], random)
        if match["name"] is None:
            args.append(tensor)
        elif kwargs.setdefault(match["name"], tensor) is not tensor:
            raise Failure(f"--input {text!r}: the input {match['name']} is given twice")
    _bind(case.model, tuple(args), kwargs, "--input")
    return replace(case, args=tuple(args), kwargs=kwargs or None)


def _example(dtype: torch.dtype, shape: list[int], random: torch.Generator) -> torch.Tensor:
    """Normal floats; zeros and ones of every other type, which are indices of anything that has two."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=random).to(dtype)
    return torch.randint(0, 2, shape, generator=random).to(dtype)


def _bind(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> dict[str, Any]:
    """The arguments of a call of forward by name."""
    signature = inspect.signature(model.forward)
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise Failure(f"{what}: {error}: forward of {type(model).__name__} takes {shown(str(signature))}") from error


def _shapes(case: exporter.Case, dynamic: tuple[str, ...], targets: bool) -> dict[str, Any]:
    """The dynamic_shapes of torch.export: a part for each argument, with the containers that it has."""
    from exporter.forward.inputs import named_leaves

    args = case.args if isinstance(case.args, (tuple, list)) else (case.args,)
    arguments = _bind(case.model, tuple(args), case.kwargs or {}, "the example arguments")
    given = () if not targets else case.targets if isinstance(case.targets, (tuple, list)) else (case.targets,)
    wanted = {"target" if len(given) == 1 else f"target_{number}": value for number, value in enumerate(given)}
    leaves = {name: tensor for argument, value in {**arguments, **wanted}.items() for name, tensor in named_leaves(argument, value).items()}
    open_axes: dict[str, dict[int, str]] = {}
    for text, name, axis, dim in _axes(dynamic):
        if name not in leaves:
            raise Failure(f"--dynamic {text!r}: there is no input {shown(name)}: its inputs are {', '.join(map(shown, leaves)) or 'none'}")
        rank = leaves[name].dim()
        if not -rank <= axis < rank:
            raise Failure(f"--dynamic {text!r}: the example of {name} has the shape {list(leaves[name].shape)}, which has no axis {axis}")
        if open_axes.setdefault(name, {}).setdefault(axis % rank, dim) != dim:
            raise Failure(f"--dynamic {text!r}: the axis has two names, {open_axes[name][axis % rank]} and {dim}")
    # Of a target without an axis of its own here, the sizes follow from the model.
    told = {name: value for name, value in wanted.items() if set(named_leaves(name, value)) & set(open_axes)}
    return {argument: _spec(argument, value, open_axes) for argument, value in {**arguments, **told}.items()}


def _axes(dynamic: tuple[str, ...]) -> Iterator[tuple[str, str, int, str]]:
    for text in dynamic:
        match = _DYNAMIC.fullmatch(text)
        if match is None:
            raise Failure(f"--dynamic {text!r} is not of the form NAME:AXIS=DIM, such as x:0=batch")
        yield text, match["name"], int(match["axis"]), match["dim"]


def _spec(name: str, value: Any, axes: dict[str, dict[int, str]]) -> Any:
    """The part of one argument; its tensors go by the names that `named_leaves` gives them."""
    if isinstance(value, (tuple, list)):
        return type(value)(_spec(f"{name}_{index}", item, axes) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _spec(f"{name}_{key}", item, axes) for key, item in value.items()}
    return axes.get(name)
