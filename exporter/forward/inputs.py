"""Names and dynamic axes of a model's inputs, by forward's signature: what torch.export does, for TorchScript; names that outputs were to have."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.arguments import signature_of
from symbolics.capture.torch_calls import holds_tensor
from symbolics.errors import ArgumentError, ExportError
from symbolics.graph.values import name_of
from symbolics.node.metadata import read_changes

__all__ = [
    "axes_by_name",
    "check_asked_names",
    "check_dynamic",
    "check_output_names",
    "checked_axes",
    "dynamic_axes",
    "dynamic_sizes",
    "each_once",
    "input_names",
    "named_leaves",
    "named_tensors",
    "open_axes",
    "shapes_by_axes",
    "without_numbers",
]


def input_names(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """One name a tensor input: ``x``, ``xs_0`` in a list, ``batch_mask`` in a dict; None where forward cannot be bound."""
    try:
        return [name for name, *_ in _tensors(model, args, kwargs, None)]
    except TypeError:  # the exporter says what does not fit
        return None


def named_tensors(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by the names of the inputs that they become: positional arguments, then keywords as they are given."""
    return {
        name: tensor for argument, value, _ in _arguments(model, args, kwargs, None) for name, tensor, _ in _leaves(argument, value, None)
    }


def named_leaves(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors inside one argument by the names of the inputs that they become."""
    return {leaf: tensor for leaf, tensor, _ in _leaves(name, value, None)}


def each_once(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with a copy of a tensor wherever it is given again, as it is another input of the file there, with a gradient of its own."""
    seen = set[int]()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, once, (args, kwargs))


def without_numbers(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[int, Any]]:
    """Positional arguments without those that hold no tensor, and these by position: torch.jit would make inputs of numbers."""
    constants = {i: value for i, value in enumerate(args) if value is not None and not holds_tensor(value)}
    return tuple(value for i, value in enumerate(args) if i not in constants), constants


def dynamic_axes(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, names: list[str] | None = None
) -> dict[str, dict[int, str]]:
    """The ``dynamic_axes`` of torch's older exporter for the ``dynamic_shapes`` of the newer one.

    Args:
        model, args, kwargs: The model and its example arguments.
        dynamic_shapes: As torch.export.export takes them.
        names: Names that the caller gave the inputs.
    """
    axes: dict[str, dict[int, str]] = {}
    for index, (name, _, dims) in enumerate(_tensors(model, args, kwargs, dynamic_shapes)):
        name = names[index] if names and index < len(names) else name
        if dims:
            axes[name] = {axis: _dim_name(dim, f"{name}_{axis}") for axis, dim in dims.items()}
    return axes


def open_axes(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> Iterator[tuple[torch.Tensor, dict[int, Any]]]:
    """Each tensor of the arguments with those of its axes that ``dynamic_shapes`` leaves open, or to torch (Dim.AUTO)."""
    try:
        yield from ((tensor, dims) for _, tensor, dims in _tensors(model, args, kwargs, shapes))
    except (TypeError, ValueError):  # what does not fit is told by eager mode
        return


def axes_by_name(arguments: Any, names: Sequence[str] | None, axes: Any) -> Iterator[tuple[str, torch.Tensor, dict[int, Any]]]:
    """(input, tensor, its open axes) by ``dynamic_axes``; an axis that has no name there has its number.

    Args:
        arguments: The example arguments.
        names: The names of the inputs, in their order.
        axes: ``dynamic_axes``, checked.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    for tensor, name in zip(tensors, names or ()):
        dims = (axes or {}).get(name) or ()
        yield name, tensor, dict(dims) if isinstance(dims, dict) else {axis: axis for axis in dims}


def shapes_by_axes(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], axes: Any
) -> dict[str, Any]:
    """The ``dynamic_shapes`` for ``dynamic_axes``.

    Args:
        model, args, kwargs: The model and its example arguments.
        names: The names of the inputs, in their order.
        axes: ``dynamic_axes``, checked.
    """
    inputs = iter(names)

    def opened(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        dims = axes.get(name := next(inputs, "")) or {}
        return dict(dims) if isinstance(dims, dict) else {axis: f"{name}_dim_{axis}" for axis in dims}

    return {name: pytree.tree_map(opened, value) for name, value, _ in _arguments(model, args, kwargs, None)}


def checked_axes(arguments: Any, names: Sequence[str] | None, axes: Any, outputs: Sequence[str] | None = None) -> Any:
    """``dynamic_axes`` with axes that count from the front: one from behind ends the process in torch's older exporter, as one does that is not there.

    Args:
        arguments: The example arguments.
        names: The names of the inputs; None where forward cannot be bound, and nothing is looked at.
        axes: ``dynamic_axes`` as torch.onnx.export takes them.
        outputs: ``output_names``.

    Raises:
        ArgumentError: No input or output has such a name, or an input has no such axis.
    """
    checked = dict(axes or {})
    for name in checked:
        if names is not None and name not in {*names, *(outputs or ())}:
            there = f"the inputs are {', '.join(map(repr, names)) or 'none'}"
            there += f", the outputs {', '.join(map(repr, outputs))}" if outputs else "; an output is named by output_names"
            raise ArgumentError(f"dynamic_axes names {name!r}: {there}")
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    for name, tensor in zip(names or (), tensors):
        dims, rank = checked.get(name), tensor.dim()
        for axis in dims or ():
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise ArgumentError(f"dynamic_axes of {name!r} has an axis {axis!r}, and the input has {rank}: {list(tensor.shape)}")
        if dims:
            checked[name] = {axis % rank: dim for axis, dim in dims.items()} if isinstance(dims, dict) else [axis % rank for axis in dims]
    return checked if axes else axes


def dynamic_sizes(arguments: Any, names: list[str] | None, axes: Any) -> dict[tuple[str, int], int]:
    """(input, axis) -> the example's size, of the dimensions that ``dynamic_axes`` names."""
    return {
        (name, axis): int(tensor.shape[axis])
        for name, tensor, dims in axes_by_name(arguments, names, axes)
        for axis in dims
        if axis < tensor.dim()
    }


def check_dynamic(model: torch.nn.Module, args: Any, kwargs: dict[str, Any], dynamic_shapes: Any, graph: ir.Graph) -> None:
    """Torch may give up a dimension that was declared dynamic without a word; the file would hold today's size.

    Raises:
        ExportError: An input of the graph has a fixed size where ``dynamic_shapes`` has a Dim.
    """
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args or ())
    try:
        declared = list(_tensors(model, args, kwargs, dynamic_shapes))
    except TypeError:
        return
    if len(declared) != len(graph.inputs):
        return
    for (name, _, dims), value in zip(declared, graph.inputs, strict=True):
        for axis, dim in dims.items():
            if dim is not torch.export.Dim.AUTO and value.shape is not None and isinstance(value.shape[axis], int):
                raise ExportError(
                    f"dimension {axis} of the input {name} was declared dynamic and came out as {value.shape[axis]}: the model turned it into a number, for "
                    "example by int(x.shape[0]) in an argument, by len(x), or by as many parts as it has (unbind, split(n), a loop over x): pass the size itself, "
                    "slice, name the module of a loop in opaque=, or leave the dimension out of dynamic_shapes"
                )


def check_asked_names(names: Any) -> None:
    """Refuse ``output_names`` that no outputs can have.

    Raises:
        ArgumentError: They are no list of names, each once.
    """
    if names is not None and (isinstance(names, str) or not all(isinstance(name, str) and name for name in names)):
        raise ArgumentError(f"output_names is {names!r}: give a list of names")
    if twice := [name for name, count in Counter(names or ()).items() if count > 1]:
        raise ArgumentError(f"output_names has {twice[0]!r} twice: give each output a name of its own")


def check_output_names(names: Any, model: ir.Model, inputs: Iterable[str] = ()) -> None:
    """Torch gives an output another name where the one that was asked for is taken, and drops names that are too many, without a word.

    Args:
        names: ``output_names`` as the caller gave them.
        model: What the export made.
        inputs: Names that its inputs were to have.

    Raises:
        ArgumentError: The outputs have other names.
    """
    changes = read_changes(model.metadata_props)
    values = model.graph.outputs[: len(model.graph.outputs) - len(changes.carried if changes else ())]
    if names and len(names) > len(values):
        raise ArgumentError(
            f"output_names has {len(names)} names, and the model has {len(values)} outputs: {', '.join(map(name_of, values))}"
        )
    taken = {*inputs, *(name_of(value) for value in model.graph.inputs)}
    for name, value in zip(names or (), values, strict=False):
        # An output that is a constant is an initializer itself.
        if value.name != name or name in taken or model.graph.initializers.get(name, value) is not value:
            raise ArgumentError(
                f"output_names asks for {name!r}, which an input, a parameter or a buffer of the model has: give another name"
            )


def _tensors(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> Iterator[tuple[str, torch.Tensor, dict[int, Any]]]:
    """(name, tensor, axis -> what dynamic_shapes has for it where that leaves the axis open) of each tensor, in the order of forward's signature."""
    for name, value, given in _arguments(model, args, kwargs, shapes):
        for leaf, tensor, spec in _leaves(name, value, given):
            dims = spec.items() if isinstance(spec, dict) else enumerate(spec if isinstance(spec, (tuple, list)) else ())
            yield leaf, tensor, {a: dim for a, dim in dims if not isinstance(dim, int) and dim not in (None, torch.export.Dim.STATIC)}


def _arguments(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, what dynamic_shapes has for it) of each argument: positional ones, then keywords as they are given.

    What forward takes as ``**kwargs`` has its own names.
    """
    signature = signature_of(model)
    arguments = signature.bind(*args, **kwargs).arguments
    if isinstance(shapes, (tuple, list)):
        shapes = dict(zip(arguments, shapes, strict=False))
    shapes = shapes if isinstance(shapes, dict) else {}
    named: dict[str, tuple[Any, Any]] = {}
    for name, value in arguments.items():
        spec = shapes.get(name)
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= {key: (item, spec.get(key) if isinstance(spec, dict) else None) for key, item in value.items()}
        else:
            named[name] = value, spec
    yield from ((name, *named[name]) for name in (*(name for name in named if name not in kwargs), *kwargs))


def _leaves(name: str, value: Any, spec: Any) -> Iterator[tuple[str, torch.Tensor, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, value, spec
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}_{index}", item, spec[index] if isinstance(spec, (tuple, list)) and index < len(spec) else None)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}_{key}", item, spec.get(key) if isinstance(spec, dict) else None)


def _dim_name(dim: Any, fallback: str) -> str:
    """The name of a Dim, or of the string that stands for one; AUTO and DYNAMIC have none."""
    name = dim if isinstance(dim, str) else getattr(dim, "__name__", "")
    return name if name.isidentifier() else fallback
