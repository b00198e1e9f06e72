"""The examples and the demo, each command whole, and parts of them that are functions.

`make demo` is run by .ci/run as well, in a clone of its own.
"""

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
    done = python("-W", "ignore", "-m", "examples.demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\u2502 equal") == 4
    output = tmp_path / "demo-output"
    exported = {
        f"{name}.onnx" for name in "bloom-dynamo bloom-torchscript ibert-dynamo ibert-torchscript bloom-training snn-training".split()
    }
    assert {path.name for path in output.glob("*.onnx")} == exported
    assert done.stdout.count("steps of AdamW from the file") == 2
    assert "demo-output/report.html" in done.stdout
    assert "equals eager PyTorch" in (output / "report.html").read_text()
    assert len(PIL.Image.open(output / "training.png").convert("L").getcolors()) > 20


def test_train_draws_its_curves(tmp_path: Path) -> None:
    done = python("-m", "examples.train", "--picture", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("from the file") == 2
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_roundtrip_in_pytest() -> None:
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_roundtrip.py")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "2 passed" in done.stdout


def test_the_demos_status_where_a_file_differs(tmp_path: Path) -> None:
    """A tolerance below float32 makes every file differ: `main` must say so; one row will do."""
    code = "import sys; from examples import demo; demo.TOLERANCE = -1.0; sys.exit(demo.main(['--only', 'bloom', '--exporter', 'TorchScript', '--no-training']))"
    done = python("-W", "ignore", "-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "differs from eager" in " ".join(done.stdout.split())


def test_a_figure_of_a_benchmark_is_json(tmp_path: Path) -> None:
    """How the programs of benchmarks/ print: the smallest of their figures; `make bench` measures them all."""
    done = python("-W", "ignore", "-m", "benchmarks.export", "--only", "1 call", "--exporter", "TorchScript", "--runs", "1", cwd=tmp_path)
    told = json.loads(done.stdout)
    (figure,) = told["figures"]
    assert (told["program"], figure["what"]) == ("export", "1 call, TorchScript: hook / bare")
    assert figure["value"] > 0
    assert told["machine"]["torch"]
    assert done.returncode == (1 if figure["missed"] else 0)
