"""What a file says becomes values, and no code of the classes that it names runs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from symbolics.errors import ExportError, FormatError
from symbolics.node.arguments import decode, encode
from symbolics.node.classes import find, own_name
from symbolics.node.containers import Slot, expand, fields_of, fill, slots
from symbolics.node.result import rebuild

ran: list[str] = []
on: list[bool] = []


def _alarm(name):
    def method(*args, **kwargs):
        if not on:
            raise AttributeError(name)  # pytest looks at everything in a module
        ran.append(name)
        raise RuntimeError(f"{name} of a class that a file names has run")

    return method


def armed(cls, *names):
    for name in names:
        setattr(cls, name, _alarm(name))
    return cls


def resolver(kind, name):
    return globals()[name]


class Meta(type):
    """A metaclass all of whose questions are answered by code."""

    __call__ = __getattribute__ = __getattr__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = _alarm("metaclass")  # type: ignore[assignment]


EVERY = "__new__ __init__ __post_init__ __setattr__ __getattr__ __getattribute__ __delattr__ __hash__ __eq__ __repr__ __reduce__ __set_name__".split()


@dataclasses.dataclass
class Plain:
    size: Any
    name: Any = "x"


@dataclasses.dataclass(slots=True)
class Slotted:
    size: Any
    name: Any = "x"


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: Any
    name: Any = "x"


@dataclasses.dataclass
class Mapping(OrderedDict):
    size: Any = None
    name: Any = None


class Item(NamedTuple):
    size: Any
    name: Any = "x"


for _cls in (Plain, Slotted, Frozen):
    armed(_cls, *EVERY)
armed(Mapping, *EVERY, *"__setitem__ __getitem__ __iter__ __missing__ keys items values update setdefault".split())
armed(Item, *EVERY, "__iter__", "__getitem__", "__len__", "_make", "_replace")


@dataclasses.dataclass
class OfMeta:
    size: Any
    name: Any = "x"


OfMeta = Meta("OfMeta", (OfMeta,), {"__module__": __name__, "__qualname__": "OfMeta"})  # type: ignore[misc]


@pytest.fixture(autouse=True)
def silent():
    ran.clear()
    on.append(True)
    yield
    on.clear()
    assert ran == []


@pytest.mark.parametrize("name", ["Plain", "Slotted", "Frozen", "OfMeta"])
def test_a_dataclass_is_filled_by_none_of_its_code(name):
    cls = globals()[name]
    found = decode({"$dataclass": [name, {"size": {"$tensor": 0}, "name": [1, {"$tuple": []}]}]}, resolver)
    assert type(found) is cls
    assert fields_of(found) == {"size": Slot(0), "name": [1, ()]}
    assert slots(found) == [Slot(0)]
    assert expand([found]) == [Slot(0), 1]
    filled = fill(found, lambda leaf: 7 if type(leaf) is Slot else leaf)
    assert type(filled) is cls
    assert fields_of(filled) == {"size": 7, "name": [1, ()]}


def test_a_dataclass_that_is_a_dict_is_filled_by_dicts_own_code():
    found = decode({"$mapping": ["Mapping", {"name": {"$tensor": 0}}]}, resolver)
    assert type(found) is Mapping
    assert list(OrderedDict.items(found)) == [("name", Slot(0))]
    assert object.__getattribute__(found, "__dict__") == {"size": None, "name": Slot(0)}
    filled = fill(found, lambda leaf: 7)
    assert list(OrderedDict.items(filled)) == [("name", 7)]


def test_a_named_tuple_is_filled_by_tuples_own_code():
    found = decode({"$namedtuple": ["Item", [{"$tensor": 0}, 2]]}, resolver)
    assert type(found) is Item
    assert tuple.__repr__(fill(found, lambda leaf: 7)) == "(7, 7)"


@pytest.mark.parametrize("form", ["now", "first"])
def test_the_result_of_a_model_is_filled_in_the_same_way(form):
    now = '{"$dataclass": ["Plain", {"size": {"$tensor": 0}, "name": 1}]}'
    first = '{"dataclass": ["Plain", [["size", {"tensor": 0}], ["name", {"value": 1}]]]}'
    assert fields_of(rebuild(now if form == "now" else first, ["t"], resolver)) == {"size": "t", "name": 1}
    less = '{"$dataclass": ["Plain", {"size": 1}]}' if form == "now" else '{"dataclass": ["Plain", [["size", {"value": 1}]]]}'
    more = less.replace('{"size": 1}', '{"size": 1, "name": 2, "x": 3}').replace(
        '[["size", {"value": 1}]]', '[["size", {"value": 1}], ["name", {"value": 1}], ["x", {"value": 1}]]'
    )
    for text in (less, more):
        with pytest.raises(FormatError, match="Plain is another class than at the export"):
            rebuild(text, [], resolver)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"$dataclass": ["Plain", {"size": 1}]}, "the file has no value for its field name"),
        ({"$dataclass": ["Plain", {"size": 1, "name": 2, "y": 3, "x": 3}]}, "it has no field x, y"),
        ({"$dataclass": ["Plain", {"size": 1, "x": 3}]}, "the file has no value for its field name; it has no field x"),
        ({"$mapping": ["Mapping", {"x": 1}]}, "it has no field x"),
        ({"$mapping": ["Plain", {"size": 1, "name": 2}]}, "it was no dict, or is one now"),
        ({"$namedtuple": ["Item", [1, 2, 3]]}, "the file 3 values"),
        ({"$enum": ["Color", "GREY"]}, "it has no member GREY; its members are "),
    ],
)
def test_a_class_that_has_changed_since(value, says):
    """Each says what of it has changed, and what to do."""
    with pytest.raises(FormatError, match="is another class than at the export: ") as error:
        decode(value, resolver)
    first, way_out = str(error.value).splitlines()
    assert says in first and "export again" in way_out
    assert error.value.faq


class Descriptor:
    __get__ = __set__ = __delete__ = _alarm("descriptor")


@dataclasses.dataclass
class Computed:
    size: int
    name: int = 0


Computed.size = property(_alarm("getter"), _alarm("setter"))


@dataclasses.dataclass
class Described:
    size: int
    name: int = 0


Described.size = Descriptor()


@pytest.mark.parametrize("cls", [Computed, Described])
def test_a_computed_field_is_refused_by_readers_and_writers(cls):
    with pytest.raises(FormatError, match=r"\$dataclass.*size is of type (property|Descriptor) in the class"):
        decode({"$dataclass": [cls.__name__, {"size": 1, "name": 2}]}, resolver)
    with pytest.raises(ExportError, match=r"\$dataclass: its size is of type (property|Descriptor) in the class"):
        encode(object.__new__(cls))
    assert slots([object.__new__(cls)]) == []  # a leaf, which may be registered


def test_a_default_that_the_class_holds_is_read():
    @dataclasses.dataclass
    class Late:
        size: int = dataclasses.field(init=False, default=3)

    assert fields_of(Late()) == {"size": 3}


# ----------------------------------------------------------------------------------------------------------- enums


class Color(enum.Enum):
    RED = 1
    ALIAS = 1
    BLUE = 2


class Bits(enum.Flag):
    A = 1
    B = 2
    AB = 3
    C = 4


class Bounded(enum.IntFlag, boundary=enum.STRICT):
    A = 1
    B = 2


class Own(enum.Flag):
    A = 1
    B = 2


class Values(enum.Enum):
    ONE = Frozen


for _cls in (Color, Bits, Bounded):
    _cls._missing_ = classmethod(_alarm("_missing_"))
    for _name in ("__init__", "__hash__", "__getattr__"):
        if _cls is Color:
            setattr(_cls, _name, _alarm(_name))
Own.__setattr__ = _alarm("__setattr__")


def test_members_are_looked_up_in_the_table():
    assert decode({"$enum": ["Color", "RED"]}, resolver) is Color.RED
    assert decode({"$enum": ["Color", "ALIAS"]}, resolver) is Color.RED
    for name in ("GREEN", "__class__", "_missing_", "mro", "__init__"):
        with pytest.raises(FormatError, match=r"Color is another class than at the export: it has no member"):
            decode({"$enum": ["Color", name]}, resolver)


def test_combinations_of_flags_are_made_by_enums_own_code():
    found = decode({"$enum": ["Bits", 6]}, resolver)
    assert found is Bits.B | Bits.C
    assert decode({"$enum": ["Bits", 3]}, resolver) is Bits.AB
    assert decode({"$enum": ["Bits", 0]}, resolver) is Bits(0)
    assert decode({"$enum": ["Bounded", 3]}, resolver) is Bounded.A | Bounded.B
    assert encode(found) == {"$enum": [f"{__name__}:Bits", 6]}
    for data in (
        ["Bits", 8],
        ["Bits", -1],
        ["Bits", True],
        ["Bits", 1.0],
        ["Bounded", 4],
        ["Color", 1],
        ["Bits", {"$int": "0x100000000000000000"}],
    ):
        with pytest.raises(FormatError, match=r"\$enum"):
            decode({"$enum": data}, resolver)


def test_a_flag_with_ways_of_its_own_has_only_its_members():
    assert decode({"$enum": ["Own", 2]}, resolver) is Own.B
    with pytest.raises(FormatError, match=r"\$enum.*combinations of flags in its own way"):
        decode({"$enum": ["Own", 3]}, resolver)


def test_members_behind_a_metaclass_with_code():
    class Quiet(enum.EnumType):
        pass

    class Flags(enum.Flag, metaclass=Quiet):
        A = 1
        B = 2

    both = Flags.A | Flags.B
    for name in ("__call__", "__getitem__", "__contains__", "__iter__", "__len__"):
        setattr(Quiet, name, _alarm(name))
    Quiet.__members__ = property(_alarm("__members__"))
    assert decode({"$enum": ["x", "B"]}, lambda *_: Flags) is Flags.B
    with pytest.raises(FormatError, match="in its own way"):
        decode({"$enum": ["x", 3]}, lambda *_: Flags)
    with pytest.raises(ExportError, match="in its own way"):
        encode(both)


# ---------------------------------------------------------------------------------------------------- keys and slots


def test_keys_ask_for_their_hash_and_what_it_raises_is_a_format_error():
    class Key(NamedTuple):
        size: int

    def fail(self):
        raise RuntimeError("no hash today")

    Key.__hash__ = fail
    with pytest.raises(FormatError, match=r"\$set.*no hash today"):
        decode({"$set": [{"$namedtuple": ["Key", [1]]}]}, lambda *_: Key)


# ------------------------------------------------------------------------------------------------------------- names


class Nested:
    class Inner:
        pass

    def method(self):
        pass

    @classmethod
    def made(cls):
        pass

    @staticmethod
    def plain():
        pass

    computed = property(_alarm("property"))
    chained = classmethod(property(_alarm("chained")))


@functools.lru_cache
def cached():
    pass


def test_a_qualified_name_leads_through_classes_without_running_anything():
    for qualname in ("Nested.Inner", "Nested.method", "Nested.plain", "cached"):
        found = find(globals(), qualname)
        assert own_name(found) == (__name__, qualname)
    assert find(globals(), "Nested.made") == Nested.made
    assert type(find(globals(), "Nested.computed")) is property
    assert type(find(globals(), "Nested.chained")) is classmethod
    assert own_name(find(globals(), "Nested.chained"))[1] != "Nested.chained"
    assert own_name(np.add) == ("numpy", "add")
    for qualname, error in [("Nested.made.__func__", TypeError), ("Nested.__mro__", KeyError), ("Nested.method.__globals__", TypeError)]:
        with pytest.raises(error):
            find(globals(), qualname)


def test_what_an_object_says_of_itself_is_read_and_not_asked_for():
    class Sly:
        __getattr__ = __getattribute__ = __call__ = _alarm("instance")

    assert own_name(Sly()) == (__name__, None)
    assert own_name(types.SimpleNamespace(__module__="m", __qualname__="q")) == ("m", "q")
    assert own_name(Meta("Made", (), {"__module__": "m", "__qualname__": "q"})) == ("m", "q")
