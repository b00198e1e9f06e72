"""What an export is called with: what no exporter can take is refused before any work, in words of the call."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.errors import ArgumentError, ExportError
from symbolics.text import cause, shown

__all__ = ["check_call", "check_model", "check_options", "check_shapes", "check_values", "in_order", "keywords_apart", "signature_of"]


def check_model(model: Any, *, dynamo: bool) -> None:
    """Refuse what is no module, or one that hides what it computes from the exporter.

    Raises:
        ArgumentError: It is a class, no module, a loaded file, or for TorchScript a DataParallel.
        ExportError: It is, or contains, a ScriptModule; TorchScript takes one whose gradient nothing in it stops.
    """
    if isinstance(model, type):
        made = "an instance of it" if issubclass(model, torch.nn.Module) else "a torch.nn.Module"
        raise ArgumentError(f"the model is a class: {model.__name__} is a class, and what is exported is {made}, {model.__name__}(...)")
    if isinstance(model, torch.jit.ScriptFunction):
        raise ExportError("the model is scripted: its Functions cannot be seen. Export the Python module that it was made from")
    if not isinstance(model, torch.nn.Module):
        what = (
            f"the {type(model).__name__} {shown(repr(model))}"
            if isinstance(model, (str, types.NoneType))
            else f"of type {type(model).__name__}"
        )
        raise ArgumentError(f"the model is {what}, not a torch.nn.Module{': exporter.load opens a file' if isinstance(model, str) else ''}")
    if said := getattr(type(model), "_not_exported", None):
        raise ArgumentError(said)
    if isinstance(model, torch.nn.DataParallel) and not dynamo:
        raise ArgumentError("the model is a DataParallel, which spreads a batch over devices: export what is inside of it, model.module")
    if isinstance(model, torch.jit.ScriptModule) and not dynamo:
        return _check_scripted(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ExportError(
                f"module {name or '<root>'} ({module.original_name}) is a ScriptModule: its Functions cannot be seen. "
                "Export the Python module that it was made from (leave out torch.jit.script / torch.jit.trace)"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            continue
        try:
            tensor.data_ptr()
        except TypeError as error:  # the class has a __torch_function__ of its own, which lets some calls pass
            raise ExportError(
                f"{name!r} is of {type(tensor).__module__}'s tensor class {type(tensor).__name__}, which refuses functions of torch: {cause(error)}.\n"
                "  way out: register a plain torch.nn.Parameter, and make the other of it in forward"
            ) from error
        except RuntimeError:  # fake, or of another layout: that is another's to say
            continue


#: What ends a gradient in a compiled graph, where nothing marks it; a Function of Python.
_UNSEEN = (
    "prim::PythonOp",
    "aten::detach",
    "aten::detach_",
    "prim::data",
    "prim::Enter",
    "aten::requires_grad_",
    "aten::set_grad_enabled",
    "aten::Float",
    "aten::FloatImplicit",
)


def _check_scripted(model: torch.jit.ScriptModule) -> None:
    """No trace sees what is in a ScriptModule."""
    for kind in _UNSEEN:
        if what := private.compiled_call(model, kind):
            raise ExportError(
                f"the model ({model.original_name}) is a ScriptModule that calls {what}: its gradient cannot be kept in what was compiled before. "
                "Export the Python module that it was made from (leave out torch.jit.script / torch.jit.trace)"
            )


def check_call(args: Any, kwargs: Any, *, dynamo: bool) -> None:
    """Refuse example arguments that no file can be made of.

    Raises:
        ArgumentError: They are no tuple and dictionary, or one of them is used up by one run, or hides parameters.
    """
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, (torch.Tensor, tuple, list)):
        way = ": arguments by name go into kwargs=" if isinstance(args, Mapping) else ""
        raise ArgumentError(f"args is of type {type(args).__name__}, not a tuple of forward's arguments{way}")
    if not isinstance(kwargs, (Mapping, types.NoneType)):
        raise ArgumentError(f"kwargs is of type {type(kwargs).__name__}, not a dict of forward's arguments by name")
    for where, value in _leaves(args, kwargs or {}):
        if why := _unusable(value, dynamo):
            raise ArgumentError(f"{where} of forward is {why}")


def check_values(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse tensors without values, of which an export can make a graph, and nobody can compare or train it.

    Raises:
        ArgumentError: An argument, a parameter or a buffer is on meta, or a FakeTensor.
    """
    for where, value in _leaves(args, kwargs or {}):
        if why := _without_values(value):
            raise ArgumentError(f"{where} of forward is {why}: give one with values")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if why := _without_values(tensor):
            raise ArgumentError(f"{name!r} of the model is {why}: load its weights first (model.to_empty(device='cpu'), load_state_dict)")


def signature_of(model: torch.nn.Module) -> inspect.Signature:
    """The signature of a model's forward, of a compiled one by its schema.

    Raises:
        ValueError: It has none.
    """
    if not isinstance(model.forward, torch.ScriptMethod):
        return inspect.signature(model.forward)
    names = [argument.name.partition(".")[0] for argument in model.forward.schema.arguments[1:]]  # a trace says input.1
    defaults = [
        argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        for argument in model.forward.schema.arguments[1:]
    ]
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in zip(names, defaults)]
    )


def keywords_apart(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as torch's exporters call forward: a dictionary that comes last is keyword arguments, where forward can be called so.

    Where it cannot, the dictionary is the value of the argument that it stands for, which gets its name: torch's exporters would take it apart.
    """
    if kwargs or not args or not isinstance(args[-1], dict):
        return args, dict(kwargs or {})
    try:
        signature_of(model).bind(*args[:-1], **args[-1])
    except (TypeError, ValueError):
        pass
    else:
        return args[:-1], dict(args[-1])
    try:
        *_, name = signature_of(model).bind(*args).arguments
        signature_of(model).bind(*args[:-1], **{name: args[-1]})
    except (TypeError, ValueError):  # what does not fit is told by eager mode
        return args, {}
    return args[:-1], {name: args[-1]}


def in_order(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of forward's signature: the older exporter's inputs come so, those of the newer one as they are given."""
    try:
        order = list(signature_of(model).parameters)
    except (TypeError, ValueError):
        return dict(kwargs)
    return dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate((args,) if isinstance(args, torch.Tensor) else args):
        yield from ((f"argument {index}", leaf) for leaf in pytree.tree_leaves(value))
    for name, value in kwargs.items():
        yield from ((f"argument {name!r}", leaf) for leaf in pytree.tree_leaves(value))


def _unusable(value: Any, dynamo: bool) -> str:
    """Why an argument is none that a file can be made with; "" where it may be."""
    if isinstance(value, np.ndarray):
        return "a numpy.ndarray, and inputs of a file are tensors: torch.from_numpy(...)"
    if isinstance(value, Iterator):
        return f"of type {type(value).__name__}, which one run uses up: make it a list or a tuple"
    if isinstance(value, torch.nn.Module) and any(parameter.requires_grad for parameter in value.parameters()):
        return f"the module {type(value).__name__}: make it a submodule of the model, so that its parameters are the file's"
    if dynamo and isinstance(value, (types.FunctionType, types.MethodType)):  # TorchScript calls it
        return f"of type {type(value).__name__}, and a file takes tensors: let the model keep it (self.{value.__name__.strip('<>')} = ...)"
    return ""


def _without_values(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    if private.is_fake(value):
        return "a FakeTensor, which has no values"
    return "a tensor on the device meta, which has no values" if value.is_meta else ""


def check_options(options: Mapping[str, Any], dynamo: Any, opset: Any) -> None:
    """Refuse options that torch.onnx.export does not have, or would take for others.

    Raises:
        TypeError: There is no such option.
        ArgumentError: ``dynamo`` or ``opset_version`` is of another type.
    """
    if not (isinstance(dynamo, (int, np.bool_, np.integer)) and dynamo in (0, 1)):
        raise ArgumentError(f"dynamo={dynamo!r}: give True (torch.export) or False (TorchScript)")
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, (int, np.integer))):
        raise ArgumentError(f"opset_version={opset!r} is of type {type(opset).__name__}: give an int, or leave it out for torch's own")
    if "f" in options:
        raise TypeError("exporter.export returns a Program and writes no file: call program.save(path)")
    known = [*inspect.signature(torch.onnx.export).parameters, "inline", "portable", "opaque", "functions", "fallback", "eager_check"]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1) or [each for each in known if each.startswith(name)]
            raise TypeError(
                f"exporter.export has no option {name!r}" + (f": did you mean {close[0]}?" if close else ", and torch.onnx.export has none")
            )


def check_shapes(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """Refuse ``dynamic_shapes`` that do not fit the arguments; TorchScript would ignore them, torch.export raises them behind 100 lines.

    Returns:
        The same as torch.export takes it: with a None for each argument that is given and not named, without one for an argument that is not given,
        axes as int, counted from the front.

    Raises:
        ArgumentError: They name an argument or a dimension that is not there, or a dimension is no name, Dim, int or None.
    """
    if shapes is None:
        return None
    try:
        arguments, inner = signature_of(model).bind(*args, **kwargs).arguments, _wrapped(model)
        if inner is not None:
            signature_of(inner).bind(*args, **kwargs)
    except (TypeError, ValueError):  # what does not fit is told by eager mode
        return shapes
    if inner is not None:
        shapes = _of_wrapped(model, inner, args, kwargs, shapes)
    names = list(arguments)
    if isinstance(shapes, Mapping):
        shapes = {name: spec for name, spec in shapes.items() if spec is not None or name in arguments or name in kwargs}
        for name in shapes:
            if name not in arguments and name not in kwargs:
                raise ArgumentError(
                    f"dynamic_shapes names {name!r}; the arguments that are given are {', '.join(map(repr, names)) or 'none'}{_way_of_many(model)}"
                )
        found = {name: _checked_axes(repr(name), arguments.get(name, kwargs.get(name)), spec) for name, spec in shapes.items()}
        kinds = {signature_of(model).parameters[name].kind for name in arguments}
        for name in names:
            if signature_of(model).parameters[name].kind is inspect.Parameter.VAR_KEYWORD and name not in shapes:
                inside = {key: found.pop(key) for key in list(found) if key in arguments[name]}
                found |= {name: {key: inside.get(key) for key in arguments[name]}} if inside else {}
        if kinds.isdisjoint((inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)):  # of which torch wants every one named
            return {name: found.get(name, pytree.tree_map(lambda leaf: None, value)) for name, value in arguments.items()}
        return found
    if isinstance(shapes, (tuple, list)):
        kept = len(shapes)
        while kept > len(names) and shapes[kept - 1] is None:
            kept -= 1
        if kept > len(names):
            raise ArgumentError(
                f"dynamic_shapes has {len(shapes)} entries, the arguments that are given are {len(names)}: {', '.join(names)}"
            )
        each = [_checked_axes(repr(name), arguments[name], spec) for name, spec in zip(names, shapes[:kept])]
        return type(shapes)(each) if type(shapes) in (tuple, list) else tuple(each)
    if hasattr(shapes, "dynamic_shapes"):  # torch.export.ShapesCollection and AdditionalInputs, which torch reads
        return shapes
    raise ArgumentError(
        f"dynamic_shapes is of type {type(shapes).__name__}: give a dict by the names of forward's arguments, or a tuple in their order"
    )


def _wrapped(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside of one that torch made, whose forward takes ``(*args, **kwargs)``."""
    kinds = [one.kind for one in signature_of(model).parameters.values()]
    return private.wrapped_module(model) if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] else None


def _of_wrapped(model: torch.nn.Module, inner: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """``dynamic_shapes`` by the names of a module's forward, or in their order, as those of what wraps it."""
    many, named = signature_of(model).parameters
    parameters = signature_of(inner).parameters
    if isinstance(shapes, Mapping):
        by_wrapper = any(name in (many, named) and name not in parameters for name in shapes)
    else:
        by_wrapper = not isinstance(shapes, (tuple, list)) or (bool(args) and isinstance(args[0], torch.Tensor) and _is_of_axes(shapes))
    if by_wrapper:
        return shapes
    found = check_shapes(inner, args, kwargs, shapes)
    names = list(signature_of(inner).bind(*args, **kwargs).arguments)
    found = dict(found) if isinstance(found, Mapping) else dict(zip(names, found, strict=False))
    places: list[Any] = []  # an entry for each positional argument
    for one in parameters.values():
        spec = found.get(one.name)
        if one.kind is inspect.Parameter.VAR_POSITIONAL:
            places += spec or [None] * (len(args) - len(places))
        elif one.kind is inspect.Parameter.VAR_KEYWORD:
            found |= spec or {}
        elif one.kind is not inspect.Parameter.KEYWORD_ONLY and len(places) < len(args):
            places.append(spec)
    result: dict[str, Any] = {many: tuple(places)} if args else {}
    return result | ({named: {name: found.get(name) for name in kwargs}} if kwargs else {})


def _is_of_axes(shapes: Sequence[Any]) -> bool:
    """Whether the first entry stands for several arguments, and not for the axes of one."""
    return bool(shapes) and isinstance(shapes[0], (tuple, list)) and any(isinstance(each, (Mapping, tuple, list)) for each in shapes[0])


def _way_of_many(model: torch.nn.Module) -> str:
    """How dynamic_shapes names what a forward takes as ``*args``."""
    many = [one.name for one in signature_of(model).parameters.values() if one.kind is inspect.Parameter.VAR_POSITIONAL]
    return f"; of those in *{many[0]} say {{{many[0]!r}: ({{0: 'n'}}, ...)}}, an entry for each" if many else ""


def _checked_axes(name: str, tensor: Any, spec: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):  # what a container holds
        if isinstance(tensor, Mapping) and isinstance(spec, Mapping):
            return {key: _checked_axes(f"{name}[{key!r}]", tensor.get(key), item) for key, item in spec.items()}
        if type(tensor) in (list, tuple) and type(spec) in (list, tuple):
            return (
                type(spec)(_checked_axes(f"{name}[{i}]", item, each) for i, (item, each) in enumerate(zip(tensor, spec)))
                + spec[len(tensor) :]
            )
        return spec
    if not isinstance(spec, (Mapping, tuple, list, types.NoneType)):
        raise ArgumentError(f"dynamic_shapes of {name} is {spec!r}: give a dict axis -> name, such as {{0: 'batch'}}")
    for axis, dim in spec.items() if isinstance(spec, Mapping) else enumerate(spec or ()):
        if not isinstance(axis, (int, np.integer)) or not -tensor.dim() <= axis < tensor.dim():
            raise ArgumentError(f"dynamic_shapes of {name} has an axis {axis!r}, and the argument has {tensor.dim()}: {list(tensor.shape)}")
        if not isinstance(dim, (str, int, types.NoneType)) and type(dim).__module__.partition(".")[0] != "torch":
            raise ArgumentError(
                f"dynamic_shapes of {name}, axis {axis}, is {dim!r}: give a name, a torch.export.Dim, or None where the size is fixed"
            )
    return {int(axis) % tensor.dim(): dim for axis, dim in spec.items()} if isinstance(spec, Mapping) else spec
