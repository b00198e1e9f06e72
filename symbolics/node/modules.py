"""A module in a file: its class, its configuration and the modules inside it, without its tensors.

Parameters and buffers are inputs of the node. The modules of a file, and those of a capture, take them in for the time of one call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError, FormatError, PythonopError
from symbolics.node.arguments import Resolver, decode, encode, has_codec
from symbolics.node.classes import find, is_class, is_method, names_in, own_name
from symbolics.node.containers import Slot, expand_leaves, slots
from symbolics.node.held_modules import Held, attributes_of, is_said, with_slots
from symbolics.node.limits import MAX_DEPTH, MAX_EXPANDED, MAX_ITEMS
from symbolics.node.names import is_of_torch, qualified_name
from symbolics.node.outside_values import SHORT
from symbolics.node.plain_objects import ModuleResolver, PlainObject, as_plain, hidden_by, made
from symbolics.node.records import read_record
from symbolics.text import shown

__all__ = ["read_module", "written_module"]

_WAY_OUT = (
    "way out: give the module a name with exporter.register(module, name), here and in the process that runs the file (setup= does so); or name a "
    "module inside it in opaque=, in its place"
)


# ----------------------------------------------------------------------------------------------------------- writing


def written_module(
    module: torch.nn.Module, held: Held, tensors: Sequence[torch.Tensor], names: Callable[[Any], str | None]
) -> dict[str, Any]:
    """A module as JSON.

    Args:
        module: The module.
        held, tensors: As `Held.of` gives them.
        names: The name under which an object is registered, or None.

    Raises:
        ExportError: Something of it cannot be written down; the message names class and attribute.
    """
    if (name := names(module)) is not None:
        return {"object": name}
    numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
    places = {(id(place), key): index for place, key, index in held.places}
    known: dict[int, str] = {}

    def visit(inner: torch.nn.Module, path: str) -> Any:
        if id(inner) in known:
            return known[id(inner)]
        known[id(inner)] = path
        title = f"{qualified_name(type(inner))}" + (f" (its {path})" if path else "")
        _check_kind(inner, path, title)
        parameters, buffers, modules = private.parts_of(inner)
        return {
            "name": qualified_name(type(inner)),
            "training": inner.training,
            "attributes": {
                key: _attribute(type(inner), title, key, with_slots(_with_plain(title, key, value, names), numbers), names)
                for key, value in {**_of_class(type(inner)), **attributes_of(inner)}.items()
            },
            "parameters": {key: places.get((id(parameters), key)) for key in parameters},
            "buffers": {key: places.get((id(buffers), key)) for key in buffers},
            "modules": {key: None if each is None else visit(each, f"{path}.{key}".lstrip(".")) for key, each in modules.items()},
        }

    tree: dict[str, Any] = visit(module, "")
    if why := _too_many(tree):
        raise ExportError(f"{qualified_name(type(module))}: {why}.\n  {_WAY_OUT}")
    return tree


def _of_class(cls: type) -> dict[str, Any]:
    """The numbers and short texts of a class and its bases: a program may have set them, ``Block.scale = 3.0``, where another process has what the source says."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for key, value in names_in(base).items() if not is_of_torch(qualified_name(base)) else ():
            plain = type(value) in (bool, int, float) or (type(value) is str and len(value) <= SHORT)
            found.pop(key, None)
            if plain and not key.startswith("__") and not private.is_base_attribute(key):
                found[key] = value
    return found


def _too_many(tree: dict[str, Any]) -> str:
    """Why a tree has more modules than a file may hold, each counted as often as it stands somewhere; "" where it has not.

    A few modules under several names each, one inside another, would be called without end.
    """
    sizes: dict[str, tuple[int, int]] = {}

    def visit(record: dict[str, Any], path: str) -> tuple[int, int]:
        count, height = 1, 0
        for key, inner in record["modules"].items():
            if inner is not None:
                around = (MAX_EXPANDED, MAX_DEPTH)  # of what is not yet done: it stands around this
                below = sizes.get(inner, around) if isinstance(inner, str) else visit(inner, f"{path}.{key}".lstrip("."))
                count, height = count + below[0], max(height, below[1] + 1)
        sizes[path] = count, height
        return count, height

    count, height = visit(tree, "")
    return (
        f"there are more than {MAX_EXPANDED} modules, or they nest deeper than {MAX_DEPTH}"
        if count > MAX_EXPANDED or height > MAX_DEPTH
        else ""
    )


def _with_plain(title: str, key: str, value: Any, names: Callable[[Any], str | None]) -> Any:
    """An attribute with a `PlainObject` in the place of each object of plain data."""
    try:
        return as_plain(value, lambda one: names(one) is not None or is_said(one))
    except ExportError as error:
        raise ExportError(f"{title}: its attribute {key!r} cannot be written: {error}.\n  {_WAY_OUT}") from error


def _check_kind(module: torch.nn.Module, path: str, title: str) -> None:
    """Refuse a module that is more than its class, its configuration and its tensors."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        raise ExportError(
            f"{title} has parametrizations, which are a class of their own.\n  way out: torch.nn.utils.parametrize.remove_parametrizations, or "
            f"{_WAY_OUT.removeprefix('way out: ')}"
        )
    # Those of the module itself run outside of its forward, as part of the model.
    hooks = private.forward_or_backward_hooks(module) if path else []
    if hooks:
        raise ExportError(
            f"{title} has the hook {getattr(hooks[0], '__qualname__', type(hooks[0]).__qualname__)}, which no file can name.\n  way out: take it off for the "
            f"export (handle.remove()); or {_WAY_OUT.removeprefix('way out: ')}"
        )
    if not getattr(
        vars(module).get("forward"), "stands_in", "forward" not in vars(module)
    ):  # an export stands in for those of opaque modules
        raise ExportError(f"{title} has a forward of its own, set on the instance, which no file can name.\n  {_WAY_OUT}")
    for base in type(module).__mro__:
        if base.__dict__.get("__slots__"):
            raise ExportError(
                f"{title} keeps {', '.join(base.__dict__['__slots__'])} in __slots__, which a file does not hold.\n  {_WAY_OUT}"
            )


def _hides(cls: type, key: str, value: Any) -> bool:
    """Whether an attribute would run, or be read, in the place of a method: so a file would choose what a layer of torch calls, and with what."""
    return is_method(cls, key) and (callable(value) or is_of_torch(qualified_name(cls)))


def _attribute(cls: type, title: str, key: str, value: Any, names: Callable[[Any], str | None]) -> Any:
    """One attribute of a module of a class as JSON."""
    place = f"{title}: its attribute {key!r}"
    _check_leaves(cls, place, key, value, names)
    try:
        return encode(value, names)
    except ExportError as error:
        raise ExportError(f"{place} cannot be written: {error}.\n  {_WAY_OUT}") from error


def _check_leaves(cls: type, place: str, key: str, value: Any, names: Callable[[Any], str | None]) -> None:
    """See that a file can hold an attribute, whose ``place`` messages name, and all that objects in it hold."""
    if _hides(cls, key, value):
        raise ExportError(f"{place} stands in the place of a method of its class, which no file may do.\n  {_WAY_OUT}")
    for leaf in expand_leaves(value):
        if type(leaf) is PlainObject:
            for name, inner in leaf.attributes.items():
                where = f"{place}: the attribute {name!r} of a {qualified_name(leaf.cls)}"
                if hidden_by(leaf.cls, name):
                    raise ExportError(f"{where} stands in the place of a method of its class, which no file may do.\n  {_WAY_OUT}")
                _check_leaves(object, where, name, inner, names)
            continue
        if isinstance(leaf, torch.Tensor):
            if leaf is value:
                raise ExportError(
                    f"{place} is a tensor and no buffer, so that it is no input of the node.\n"
                    f"  way out: self.register_buffer({key!r}, tensor) in __init__"
                )
            raise ExportError(
                f"{place} holds a tensor that is no buffer, so that it is no input of the node.\n"
                "  way out: empty it before the export, if forward fills it again as it needs; or keep the tensor in a buffer (self.register_buffer)"
            )
        if isinstance(leaf, Slot) or names(leaf) is not None:
            continue
        if isinstance(leaf, torch.nn.Module):
            raise ExportError(
                f"{place} holds a module of type {qualified_name(type(leaf))}, which is no submodule.\n  way out: make it one (nn.ModuleList, nn.ModuleDict); or "
                f"{_WAY_OUT.removeprefix('way out: ')}"
            )
        if not has_codec(leaf):
            kind = "a function that no other process can import" if callable(leaf) else f"of type {qualified_name(type(leaf))}"
            raise ExportError(f"{place} is {kind}, which no file can hold.\n  {_WAY_OUT}")


# ----------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Record:
    """One module of a tree, as docs/format.md has it."""

    name: str
    training: bool
    attributes: dict[str, Any]
    parameters: dict[str, int | None]
    buffers: dict[str, int | None]
    modules: dict[str, Any]


def read_module(tree: Any, state: Sequence[str], resolver: Resolver, title: str, complex_: tuple[int, ...] = ()) -> Callable[[], Held]:
    """Read a tree, and see that all that it names is allowed and there.

    Args:
        tree: As `written_module` writes it.
        state: The names of the parameters and buffers.
        resolver: Of names; kind "module" asks for a class of modules.
        title: For messages.
        complex_: The numbers of those that are complex in the module.

    Returns:
        Makes the module anew, each time it is called; no code of its classes runs.

    Raises:
        FormatError, TrustError: It is no such tree, or names what is not allowed.
    """
    plans: dict[str, tuple[_Record, type, dict[str, Any]]] = {}

    def visit(data: Any, path: str, depth: int) -> None:
        place = f"{title}, module {shown(path) or '<root>'}"
        if depth > MAX_DEPTH or len(plans) > MAX_ITEMS:
            raise FormatError.damaged(place, "there are more modules, or they nest deeper, than a file may hold")
        record: _Record = read_record(data, _Record, place)
        for index in (*record.parameters.values(), *record.buffers.values()):
            if index is not None and not 0 <= index < len(state):
                raise FormatError.damaged(place, f"it has the tensor {index}, the call has {len(state)}")
        cls = _class_of(record.name, resolver)
        for key in record.attributes:
            if private.is_base_attribute(key) or key == "forward":
                raise FormatError.damaged(place, f"it has an attribute {shown(key)}, which is torch's own")
        try:
            attributes = {key: decode(value, _functions_of_torch(resolver)) for key, value in record.attributes.items()}
            private.blank_module(cls)
        except PythonopError as error:
            raise error.at(place) from error
        except TypeError as error:
            raise FormatError.damaged(place, f"a module of {shown(record.name)} cannot be made so: {shown(str(error))}") from error
        if hiding := [key for key, value in attributes.items() if _hides(cls, key, value)]:
            raise FormatError.damaged(place, f"its attribute {shown(hiding[0])} stands in the place of a method of its class")
        if any(slot.index >= len(state) or slot.kind != "tensor" for value in attributes.values() for slot in slots(value)):
            raise FormatError.damaged(place, "an attribute holds a tensor that the call does not have")
        plans[path] = record, cls, attributes
        for key, inner in record.modules.items():
            if not key or "." in key:  # its path would be another module's
                raise FormatError.damaged(place, f"a module inside it has the name {shown(key)!r}")
            if isinstance(inner, str):
                if inner not in plans or f"{path}.".startswith(f"{inner}." if inner else ""):
                    raise FormatError.damaged(
                        place, f"its module {shown(key)} is said to be {shown(inner)}, which stands nowhere before it, or around it"
                    )
            elif inner is not None:
                visit(inner, f"{path}.{key}".lstrip("."), depth + 1)

    visit(tree, "", 0)
    if why := _too_many(tree):
        raise FormatError.damaged(title, f"{why}, each counted wherever it stands")

    return functools.partial(_made, plans, list(state), complex_)


def _made(plans: dict[str, tuple[_Record, type, dict[str, Any]]], state: list[str], complex_: tuple[int, ...]) -> Held:
    """The module that a tree says, with its places and no tensors in them."""
    modules = {path: private.blank_module(cls) for path, (_, cls, _) in plans.items()}
    held = Held(modules[""], state, modules=list(modules.values()), complex=complex_)
    for path, (record, _, attributes) in plans.items():
        module = modules[path]
        parameters, buffers, children = private.parts_of(module)
        for place, said in ((parameters, record.parameters), (buffers, record.buffers)):
            place.update(dict.fromkeys(said))
            held.places += [(place, key, index) for key, index in said.items() if index is not None]
        for key, inner in record.modules.items():
            children[key] = None if inner is None else modules[inner if isinstance(inner, str) else f"{path}.{key}".lstrip(".")]
        for key, value in attributes.items():
            vars(module)[key] = made(value)
            if slots(value):
                held.lists.append((vars(module), key, value))
            if not is_of_torch(record.name):
                held.watch(f"{path}.{key}".lstrip("."), vars(module)[key], anew=bool(slots(value)))
        vars(module)["training"] = record.training
    # Torch's own layers compute, and remember nothing.
    held.own += [(path, vars(module), dict(vars(module))) for path, module in modules.items() if not is_of_torch(plans[path][0].name)]
    return held


def _class_of(name: str, resolver: Resolver) -> type:
    if not is_of_torch(name):
        found: type = resolver("module", name)
        return found
    module, _, qualname = name.partition(":")
    try:
        found = find(vars(sys.modules[module]), qualname)
    except (KeyError, TypeError):
        found = object
    if not (is_class(found) and issubclass(found, torch.nn.Module) and own_name(found) == (module, qualname)):
        raise FormatError(f"the file names the module {shown(name)} of torch, which this torch does not have")
    return found


def _functions_of_torch(resolver: Resolver) -> ModuleResolver:
    """A resolver that knows torch's activations without being asked, and gives classes of objects of plain data."""

    def resolved(kind: str, name: str) -> Any:
        if kind == "callable" and isinstance(name, str):
            module, _, qualname = name.partition(":")
            found = private.activation_of_torch(module, qualname)
            if found is not None and (module == "torch" or own_name(found) == (module, qualname)):
                return found
        return resolver(kind, name)

    return ModuleResolver(resolved, lambda name: resolver("plain", name))
