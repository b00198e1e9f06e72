"""A fresh Python process that runs a module of this very pythonop."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

__all__ = ["fresh_python"]

# The path is the caller's from the first import on: PYTHONPATH has no place for a folder with a colon in its name, and would put where we are
# installed, with all that lies beside us there, before the standard library. We are found by ourselves: the current directory may have a namesake.
_START = """
import importlib.machinery, importlib.util, json, runpy, sys
root, places, module = json.loads(sys.argv.pop(1))
sys.path[:] = places
for name in ("symbolics", "exporter"):
    spec = importlib.machinery.PathFinder.find_spec(name, [root])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def fresh_python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of pythonop as ``__main__``, where modules are looked for as here.

    Args:
        module: Its full name.
        arguments: What it finds in ``sys.argv[1:]``.
    """
    places = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]  # Python passes over what is no str, a Path among them
    return [sys.executable, "-P", "-c", _START, json.dumps([str(Path(__file__).parents[2]), places, module]), *arguments]
