"""Without the native library: what runs all the same, and what is said of the rest."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from exporter.runtime.absent import why_no_library
from tests.processes import ROOT

ERROR = ImportError("cannot import name '_native'", name="exporter.runtime.native")

USE = """
import numpy, onnxruntime, torch, exporter


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.conv = torch.nn.Conv1d(1, 2, 2)  # whose gradient torch's kernels take under load, as PythonOps

    def forward(self, x):
        return Halve.apply(self.conv(self.linear(x)[:, None]))


assert exporter.__file__.startswith({home!r}), exporter.__file__
model, x = Model(), torch.randn(2, 4, requires_grad=True)
y = model(x)
(gradient,) = torch.autograd.grad(y.sum(), x)

exporter.export(model, (x.detach(),), portable=True).save("portable.onnx")
(run,) = exporter.inference_session("portable.onnx").run(None, {{"x": x.detach().numpy()}})
numpy.testing.assert_allclose(run, y.detach().numpy(), atol=1e-6)
module = exporter.load("portable.onnx")
module(x).sum().backward()
torch.testing.assert_close(x.grad, gradient)
step = exporter.export_training_step(model, (x.detach(),), loss=torch.nn.functional.mse_loss, targets=(y.detach(),), optimizer="sgd", portable=True)
exporter.inference_session(step)

program = exporter.export(model, (x.detach(),))
program.save("python.onnx")
for call in (
    lambda: exporter.session_options(allow=[Halve]),
    lambda: exporter.inference_session("python.onnx", allow=[Halve]),
    lambda: exporter.load("python.onnx", allow=[Halve])(x),
):
    try:
        call()
    except exporter.RunError as error:
        print(error)
    else:
        raise SystemExit("it ran")
exporter.register(Halve)
(run,) = exporter.reference_evaluator("python.onnx").run(None, {{"x": x.detach().numpy()}})
numpy.testing.assert_allclose(run, y.detach().numpy(), atol=1e-6)
"""


@pytest.mark.slow
def test_files_without_pythonops_run(tmp_path):
    for package in ("exporter", "symbolics"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("_native*", "_cpu*", "__pycache__"))
    command = [sys.executable, "-W", "ignore", "-c", USE.format(home=str(tmp_path))]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("[torch.onnx]")]
    assert len(told) == 3 and len(set(told)) == 1
    assert "no C compiler was found" in told[0] and "portable=True" in told[0]


def test_what_is_said_where_the_sources_are_found_first(tmp_path):
    """In a clone: `pip install .` compiles elsewhere, and Python takes the packages of the current directory."""
    folder = tmp_path / "exporter" / "runtime" / "native"
    folder.mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    text = why_no_library(ERROR, folder)
    assert f"not compiled in {tmp_path}" in text and "run from another folder" in text and f"pip install -e '{tmp_path}'" in text


def test_what_is_said_of_a_library_that_does_not_load(tmp_path):
    folder = tmp_path / "exporter" / "runtime" / "native"
    folder.mkdir(parents=True)
    (folder / "_native.abi3.so").touch()
    text = why_no_library(ImportError("file too short"), folder)
    assert "does not load (file too short)" in text and "pip install --force-reinstall" in text


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (json.dumps({"url": "file:///home/me/pythonop", "dir_info": {}}), "'file:///home/me/pythonop'"),
        (json.dumps({"url": "file:///tmp/pythonop-0.1.0-cp311-abi3-any.whl"}), "--no-binary pythonop pythonop"),
        (None, "--no-binary pythonop pythonop"),
        ("{", "--no-binary pythonop pythonop"),
    ],
)
def test_the_way_out_names_what_it_was_installed_from(origin, source, tmp_path, monkeypatch):
    """pip writes it down (PEP 610)."""

    class Installed:
        def read_text(self, name):
            return origin if name == "direct_url.json" else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    text = why_no_library(ERROR, tmp_path / "exporter" / "runtime" / "native")
    assert "no C compiler was found" in text and "gcc python3-dev" in text
    assert f"pip install --force-reinstall --no-deps --no-cache-dir {source}. Without it" in text
