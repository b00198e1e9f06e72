"""Looks at classes and objects that a file may name, without running any code of theirs.

``getattr`` asks metaclasses, ``__getattr__`` and properties; what is here reads what stands in the memory of CPython's own types.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

from symbolics.node.names import is_of_torch, qualified_name

__all__ = [
    "CONSTRUCTOR",
    "attributes_of",
    "find",
    "flag_of",
    "is_class",
    "is_filled",
    "is_function",
    "is_method",
    "look",
    "name_to_call",
    "names_in",
    "own_name",
    "place_of",
    "tuple_fields",
    "value_fields",
    "value_in",
    "why_not_plain",
]

_MRO = type.__dict__["__mro__"].__get__
_BASES = type.__dict__["__bases__"].__get__
_NAMES = type.__dict__["__dict__"].__get__
_MODULE = type.__dict__["__module__"].__get__
_QUALNAME = type.__dict__["__qualname__"].__get__

# Their attributes are read by C.
_PLAIN_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_C_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)

# Methods that are not called as they stand in the class.
_METHODS = (classmethod, staticmethod, functools.partialmethod, functools.singledispatchmethod)

# What runs where nobody calls it: when an object goes, is called, is copied, is given to torch.
_RUNS = ("__call__", "__del__", "__torch_function__", "__torch_dispatch__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")

#: What stands behind the name of a class that a file may call: an entry of ``allow=`` for the class is none for that.
CONSTRUCTOR = ".__init__"

# What enum.Flag asks of a class when it makes a combination of its members.
_FLAG_MACHINERY = "__getattribute__ __getattr__ __setattr__ __eq__ _iter_member_by_value_ _iter_member_by_def_ _numeric_repr_".split()


def is_class(obj: Any) -> bool:
    """Whether an object is a class, whatever its ``__class__`` says."""
    return issubclass(type(obj), type)


def is_function(cls: type) -> bool:
    """Whether a class is an autograd Function; torch is not imported for it."""
    return any(own_name(base)[0] == "torch.autograd.function" for base in cls.__mro__)


def names_in(cls: type) -> Mapping[str, Any]:
    """What a class defines itself."""
    return _NAMES(cls)


def look(cls: type, name: str, default: Any = None) -> Any:
    """The attribute of a class or of its bases, as it stands there: a property stays a property."""
    for base in _MRO(cls):
        if name in _NAMES(base):
            return _NAMES(base)[name]
    return default


def is_method(cls: type, name: str) -> bool:
    """Whether a class has a method of that name, of whatever kind: what an object holds under it would be called in the method's place."""
    kind = type(look(cls, name))
    bound = look(kind, "__get__") is not None and look(kind, "__set__") is None
    return bound and (issubclass(kind, _METHODS) or look(kind, "__call__") is not None)


def why_not_plain(cls: Any) -> str:
    """Why objects of a class cannot be made of their ``__dict__`` alone; "" where they can."""
    if not is_class(cls):
        return "it is no class"
    for name in _RUNS:
        if look(cls, name) is not look(object, name):
            return f"its class has {name}"
    if issubclass(cls, (type, BaseException)) or any(look(base, "__slots__") for base in cls.__mro__):
        return "it keeps more than its __dict__"
    try:
        made = object.__new__(cls)
    except TypeError:
        return "it keeps more than its __dict__"
    return "" if attributes_of(made) is not None else "it has no __dict__"


def is_filled(cls: Any) -> bool:
    """Whether files have objects of a class that are made without its constructor: a module's that is not torch's own, an enum's, a dataclass's,
    or one's of plain data. Who lets a file name such a class does not mean that it may call it.
    """
    if not is_class(cls):
        return False
    if any(own_name(base) == ("torch.nn.modules.module", "Module") for base in _MRO(cls)):
        return not is_of_torch(str(own_name(cls)[0]) + ":")
    return issubclass(cls, enum.Enum) or value_fields(cls) is not None or not why_not_plain(cls)


def name_to_call(obj: Any) -> str:
    """The name of a function or class that a file may have called; of a class that files hold objects of, the name of its constructor."""
    return qualified_name(obj) + (CONSTRUCTOR if is_filled(obj) else "")


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object; None where it has none, or one of its class's own making."""
    found = look(type(obj), "__dict__")
    return found.__get__(obj) if type(found) is types.GetSetDescriptorType else None


def place_of(cls: type, name: str) -> types.MemberDescriptorType | None:
    """Where the instances of a class keep an attribute: a slot, or None for their ``__dict__``.

    Raises:
        TypeError: The class computes it, by a property or another descriptor.
    """
    found = look(cls, name)
    if type(found) is types.MemberDescriptorType:
        return found
    if look(type(found), "__set__") is not None or look(type(found), "__delete__") is not None:
        raise TypeError(f"its {name} is of type {_QUALNAME(type(found))} in the class, not a plain field")
    return None


def value_in(cls: type, name: str) -> Any:
    """What a class holds under a name for all its instances.

    Raises:
        AttributeError: Nothing, or something that is asked for its value (a function, another descriptor).
    """
    for base in _MRO(cls):
        if name in _NAMES(base):
            found = _NAMES(base)[name]
            if look(type(found), "__get__") is None:
                return found
            break
    raise AttributeError(f"its field {name} is not set")


def value_fields(cls: Any) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass in their order; None for any other object."""
    found = look(cls, "__dataclass_fields__") if is_class(cls) else None
    if type(found) is not dict:
        return None
    return tuple(f.name for f in dataclasses.fields(types.SimpleNamespace(__dataclass_fields__=found)))  # type: ignore[arg-type]


def tuple_fields(cls: Any) -> tuple[str, ...] | None:
    """The names of the items of a named tuple; None for any other object, and for a class derived from one."""
    found = look(cls, "_fields") if is_class(cls) and _BASES(cls) == (tuple,) else None
    return found if type(found) is tuple else None


def flag_of(cls: type, number: int) -> Any:
    """The member of an enum.Flag with this number, or the combination of members, made by enum's own code alone.

    Raises:
        ValueError: There is no such combination within the boundary of the class.
        TypeError: The class is no Flag, or has a way of its own to make combinations.
    """
    if not issubclass(cls, enum.Flag):
        raise TypeError("it is not a Flag, its members are named")
    for member in look(cls, "_member_map_").values():
        if type(member._value_) is int and member._value_ == number:
            return member
    changed = [name for name in _FLAG_MACHINERY if _taken_from(cls, name) not in (enum.Flag, enum.Enum, int, object, None)]
    if type(cls) is not enum.EnumType or look(cls, "_member_type_") not in (object, int) or changed:
        raise TypeError(f"its class makes combinations of flags in its own way ({', '.join(changed) or 'by its metaclass or type'})")
    if number < 0:
        raise ValueError(f"{number} is not the number of a combination")
    found = enum.Flag._missing_.__func__(cls, number)  # type: ignore[attr-defined]  # the class may have one of its own
    if type(found) is not cls:
        raise ValueError(f"{number} is outside of its members")
    return found


def _taken_from(cls: type, name: str) -> type | None:
    return next((base for base in _MRO(cls) if name in _NAMES(base)), None)


def own_name(obj: Any) -> tuple[Any, Any]:
    """The module and qualified name that a class, function or other callable says of itself; None for what it does not say."""
    if is_class(obj):
        return _text(_MODULE(obj)), _text(_QUALNAME(obj))
    if type(obj) in _PLAIN_FUNCTIONS:
        return _text(obj.__module__), _text(obj.__qualname__)
    found = []
    for name in ("__module__", "__qualname__"):
        value = inspect.getattr_static(obj, name, None)
        found.append(_text(value.__get__(obj) if type(value) in _C_ATTRIBUTES else value))
    return found[0], found[1]


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def find(names: Mapping[str, Any], qualname: str) -> Any:
    """What a qualified name leads to from the names of a module, through nested classes and nothing else.

    Raises:
        KeyError: A part does not exist.
        TypeError: A step goes through something that is no class; the message names the part.
    """
    found: Any = None
    for depth, part in enumerate(qualname.split(".")):
        # No step from a class into an instance or a module.
        if depth and not is_class(found):
            raise TypeError(part)
        owner, found = found, (_NAMES(found) if depth else names)[part]
        if type(found) is staticmethod:
            found = found.__func__
        elif type(found) is classmethod and type(found.__func__) is types.FunctionType:
            found = types.MethodType(found.__func__, owner)
    return found
