"""Who may import whom, measured in fresh processes: contracts read imports, this runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

WITHOUT_TORCH = [
    f"symbolics.node.{name}" for name in ("arguments", "attributes", "call", "dialects", "metadata", "patterns", "schema")
] + ["exporter", "exporter.cli", "exporter.files.inspect", "exporter.files.trust", "exporter.gradient_graph.build"]  # fmt: skip


def _run(code):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_works_without_torch(module):
    done = _run(f"import sys; sys.modules['torch'] = None; import {module}")
    assert done.returncode == 0, done.stderr


def test_symbolics_does_not_know_the_exporter():
    code = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['exporter'] = None\n"
        "import symbolics\n"
        "for module in pkgutil.walk_packages(symbolics.__path__, 'symbolics.'): importlib.import_module(module.name)\n"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr


def test_importing_symbolics_imports_nothing_of_it():
    assert _run("import sys, symbolics; print([m for m in sys.modules if m.startswith('symbolics.')])").stdout == "[]\n"


def test_public_names():
    done = _run("import exporter; [getattr(exporter, name) for name in exporter.__all__]; print(len(exporter.__all__))")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
