"""The examples, the demo and the benchmark run as the scripts that they are."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest

from tests.processes import ROOT, python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("export_third_party", "entmax.activations:Entmax15Function: arguments 'dcc'"),
        ("numpy_function", "torch.export"),
        ("numpy_function", "TorchScript"),
    ],
)
def test_an_example_runs(script: str, said: str, tmp_path: Path) -> None:
    done = python("-W", "ignore", str(ROOT / "examples" / f"{script}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_the_demo_runs_and_writes_its_files(tmp_path: Path) -> None:
    done = python("-W", "ignore", "-m", "examples.demo", "--only", "bloom", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\u2502 equal") == 2
    output = tmp_path / "demo-output"
    exported = {"bloom-dynamo.onnx", "bloom-torchscript.onnx", "bloom-training.onnx", "snn-training.onnx"}
    assert {path.name for path in output.glob("*.onnx")} == exported
    assert done.stdout.count("steps of AdamW from the file") == 2
    assert "demo-output/report.html" in done.stdout
    assert "equals eager PyTorch" in (output / "report.html").read_text()
    assert len(PIL.Image.open(output / "training.png").convert("L").getcolors()) > 20


def test_the_demo_fails_where_a_file_differs(tmp_path: Path) -> None:
    """A tolerance below float32 makes every file differ: the status must say so."""
    code = "import sys; from examples import demo; demo.TOLERANCE = -1.0; sys.exit(demo.main(['--only', 'bloom', '--exporter', 'TorchScript', '--no-training']))"
    done = python("-W", "ignore", "-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "differs from eager" in " ".join(done.stdout.split())


def test_the_benchmark_prints_json(tmp_path: Path) -> None:
    done = python("-W", "ignore", "-m", "benchmarks.export", "--only", "1 call", "--exporter", "TorchScript", "--runs", "1", cwd=tmp_path)
    told = json.loads(done.stdout)
    (figure,) = told["figures"]
    assert (told["program"], figure["what"]) == ("export", "1 call, TorchScript: hook / bare")
    assert figure["value"] > 0
    assert told["machine"]["torch"]
    assert done.returncode == (1 if figure["missed"] else 0)
