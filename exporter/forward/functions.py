"""What a file says of its Functions themselves: their fingerprints; and, at the export, which of its names no other process could open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from exporter.files.named import functions_in, names_in
from exporter.files.trust import registered
from symbolics.errors import ExportError, Faq
from symbolics.node.arguments import is_importable
from symbolics.node.classes import is_class
from symbolics.node.fingerprints import fingerprint
from symbolics.node.metadata import Fingerprint, write_functions, write_values
from symbolics.node.names import FUNCTIONS_KEY, VALUES_KEY, is_operator, why_not_importable
from symbolics.node.outside_values import USUAL, outside_values
from symbolics.users import warn

__all__ = ["describe_functions", "say_names"]

_WAY_OUT = (
    "move it to the top level of a module that can be imported, or call exporter.register() for it in each process that opens the file "
    "(verify calls setup= there, the command line --register)"
)


_OF_OPERATORS = (
    "move what registers the operator into a module that can be imported, or register it in each process before that opens the file"
)


def describe_functions(model: ir.Model, classes: Mapping[str, Any], read: Mapping[Any, Mapping[str, Any]]) -> None:
    """Record the fingerprints of the Functions that the PythonOps of a model call, and the values that these read beside their arguments.

    Args:
        model: The model, in place.
        classes: name -> the class or operator that an export met under it.
        read: What a class read at its first call, where that is known: forward may have set it for the call alone.
    """
    taken = {name: fingerprint(classes[name]) for name in functions_in(model) if name in classes and name.partition(".")[0] != "symbolics"}
    found = {name: each for name, each in taken.items() if each != Fingerprint()}
    values = {name: dict(set({**outside_values(cls), **read.get(cls, {})}.items()) - {USUAL}) for name in taken for cls in [classes[name]]}
    values = {name: dict(sorted(of_one.items())) for name, of_one in values.items() if of_one}
    for key, text in ((FUNCTIONS_KEY, write_functions(found)), (VALUES_KEY, write_values(values))):
        model.metadata_props.pop(key, None)
        if text != "{}":
            model.metadata_props[key] = text


def say_names(model: ir.Model, classes: Mapping[str, Any]) -> None:
    """Warn of each name of a model that another process cannot open without being told what it means.

    Args:
        model, classes: As `describe_functions` has them.

    Raises:
        ExportError: A module has a name that no process can import.
    """
    known = registered()
    for name in names_in(model):
        if name in known or is_operator(name):
            continue
        what, cls = name.removesuffix(":*"), classes.get(name)
        why = why_not_importable(f"{what}:all" if what != name else name)
        if not why and is_class(cls) and not is_importable(cls):
            why = "its module leads to something else under that name, or to nothing"
        way_out = _WAY_OUT if what == name else _OF_OPERATORS
        if not all(part.isidentifier() for part in what.partition(":")[0].split(".")):
            raise ExportError(f"{what} cannot be opened by any process, for {why}: {way_out}", faq=Faq.IN_A_FUNCTION)
        if why:
            warn(f"{what} cannot be opened by another process, for {why}: {way_out}.")
