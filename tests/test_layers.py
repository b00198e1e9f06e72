"""Who may import whom, measured in fresh processes: contracts read imports, this runs them."""

from __future__ import annotations

import json

import pytest

from tests.processes import python

WITHOUT_TORCH = [
    f"symbolics.node.{name}" for name in ("arguments", "attributes", "call", "dialects", "metadata", "patterns", "schema")
] + ["exporter", "exporter.cli", "exporter.files.inspect", "exporter.files.trust", "exporter.gradient_graph.build"]  # fmt: skip


def test_works_without_torch():
    """Each of them first, in a fork of a Python that has imported nothing of ours."""
    code = f"""
import importlib, os, sys, traceback
sys.modules["torch"] = None
import numpy, onnx_ir  # what most of them import; nothing of ours
failed = 0
for name in {WITHOUT_TORCH}:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("cannot import", name, file=sys.stderr)
        failed += 1
print("failed:", failed)
"""
    done = python("-c", code)
    assert done.stdout == "failed: 0\n", done.stderr


def test_symbolics_does_not_know_the_exporter():
    code = """
import importlib, pkgutil, sys
sys.modules["exporter"] = None
import symbolics
print([name for name in sys.modules if name.startswith("symbolics.")])
for module in pkgutil.walk_packages(symbolics.__path__, "symbolics."):
    importlib.import_module(module.name)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", "importing symbolics imports nothing of it"


def test_public_names():
    done = python(
        "-c", "import exporter, json; [getattr(exporter, name) for name in exporter.__all__]; print(json.dumps(exporter.__all__))"
    )
    assert done.returncode == 0, done.stderr
    assert {"export", "hook", "load", "verify", "build_gradient_graph", "export_training_step"} <= set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        ("export", ["onnx_ir", "onnxscript", "sympy", "onnxruntime", "symbolics.capture"]),
        ("load", ["onnxscript", "transformers", "symbolics.capture"]),
        ("inference_session", ["onnxscript", "transformers", "symbolics.capture"]),
    ],
)
def test_a_first_touch_imports_no_more_than_it_needs(name, heavy):
    done = python("-c", f"import sys, torch, exporter; exporter.{name}; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr
