"""Ways out that only the command line knows: what somebody who typed this may have meant."""

from __future__ import annotations

import difflib
import importlib.util
import os
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path

import click

from symbolics.errors import PythonopError, TrustError
from symbolics.text import clean

__all__ = ["instead_of_a_name", "instead_of_a_target", "no_such_module", "on_the_command_line"]

_TARGET = re.compile(r"[\w.]+:[\w.]+")


def instead_of_a_name(name: str, names: Iterable[str]) -> str:
    """The close ones among the names that are there, as the end of a message; "" where none is."""
    close = difflib.get_close_matches(name, names, n=2)
    return f": did you mean {' or '.join(close)}?" if close else ""


def instead_of_a_target(text: str) -> str:
    """For what is not of the form package.module:name."""
    path, _, name = text.partition(":")
    if path.endswith(".py"):
        module = ".".join(part for part in Path(path).with_suffix("").parts if part not in (".", ".."))
        return f": write {module}:{name or 'NAME'}, where NAME is a function of that file" if not name else f": write {module}:{name}"
    if text.endswith(".onnx") or os.path.isfile(text):
        return ": it looks like a file, and a TARGET is the function that makes the model (inspect, run, profile and draw take files)"
    return "" if ":" in text else f": which name of it? {clean(text, 200)}:NAME"


def no_such_module(module: str, error: Exception) -> str | None:
    """Where a module that a TARGET names was looked for; None where it is there, and what failed is something that it imports."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or not f"{module}.".startswith(f"{error.name}."):
        return None
    package, _, name = error.name.rpartition(".")
    if package:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        where = f"a module is written without .py, {package}:NAME" if name == "py" else f"there is no {name} in the package {package}"
    else:
        places = [os.getcwd()]
        where = f"there is no {name} in {os.getcwd()}, nor among the packages that are installed"
    return where + instead_of_a_name(name, [found.name for found in pkgutil.iter_modules(places)] + _folders(places))


def _folders(places: Iterable[str]) -> list[str]:
    """Folders without an __init__.py: packages, too."""
    return [path.name for place in places for path in Path(place).iterdir() if path.is_dir() and path.name.isidentifier()]


def on_the_command_line(context: click.Context, error: PythonopError) -> str:
    """A line to add to an error of the library, which speaks of arguments of Python; "" where there is nothing to add."""
    options = {parameter.name for parameter in context.command.params}
    if isinstance(error, TrustError) and "allow" in options and (named := re.search(r"pass allow=\[('[^']+')\]", str(error))):
        return f"\nhere: --allow {'$' if chr(92) in named[1] else ''}{named[1]}"  # $'...': bash reads \\u in it
    if context.params.get("portable_only") and "leave it out of portable=" in str(error):
        return "\nhere: --portable in place of --portable-only, which writes as a PythonOp what no ONNX function can stand for"
    file = context.params.get("file")
    if isinstance(file, Path) and _TARGET.fullmatch(str(file)) and not file.exists():
        return f"\n{context.info_name} takes a file, and this looks like a TARGET: pythonop export {file} -o model.onnx writes its file"
    return ""
