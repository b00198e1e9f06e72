"""Who may import whom, measured in fresh processes: contracts read imports, this runs them."""

from __future__ import annotations

import json

import onnx
import pytest

from exporter.pictures import layout
from tests.processes import ROOT, python

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


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    """Of no exporter of ours, with a weight and an initializer that is an input too."""
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        plain (float[n, 2] x) => (float[n, 3] y) <float[2, 3] w = {1, -2, 3, -4, 5, -6}, float[3] b = {1, 2, 3}> {
            product = MatMul(x, w)
            sum = Add(product, b)
            y = Softmax(sum)
        }"""
    )
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("calls", "absent"),
    [
        (["exporter.inference_session(FILE).run(None, {'x': [[1.0, 2.0]]})", "exporter.session_options()"], ["onnx_ir"]),
        (["exporter.RunError", "main(['--help'], standalone_mode=False)"], ["onnx_ir", "onnxruntime", "numpy"]),
        (
            ["exporter.build_gradient_graph(FILE)", "exporter.build_tangent_graph(FILE)"]
            + [f"main([{', '.join(line.split())}], standalone_mode=False)" for line in (
                "'run' FILE", "'inspect' FILE", "'diff' FILE FILE", "'draw' FILE '-o' OUT+'html'", "'gradient' FILE '-o' OUT+'onnx'",
                "'tangent' FILE '-o' OUT+'onnx'", "'profile' FILE '--times' '1'",
            ) if "draw" not in line or layout.missing() is None],
            [],
        ),
    ],
    ids=["session", "help", "commands"],
)  # fmt: skip
def test_a_plain_file_needs_no_torch(calls, absent, plain_file, tmp_path):
    code = f"""
import sys, exporter
from exporter.cli import main
FILE, OUT = {str(plain_file)!r}, {str(tmp_path / "out.")!r}
for call in {calls}:
    eval(call)
    print(call, [name for name in {["torch", "onnxscript", *absent]} if name in sys.modules], file=sys.stderr)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1:] == [f"{calls[-1]} []"], done.stderr


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


@pytest.mark.parametrize("room", ["exporter", "symbolics", "tests", "benchmarks", "examples"])
def test_no_file_is_long(room):
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 500} == {}
