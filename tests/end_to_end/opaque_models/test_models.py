"""Models that torch.onnx refuses: exported with `opaque=`, beside eager in a fresh process; and that torch.onnx alone still refuses them."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys

import pytest
import torch

import exporter
from tests.end_to_end.opaque_models import fields, signals, solvers
from tests.end_to_end.opaque_models.rows import MODELS, Row
from tests.processes import ROOT
from tests.support import missing

assert fields and signals and solvers
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_ALONE = """
import io, sys, torch
from tests.end_to_end.opaque_models import fields, signals, solvers
from tests.end_to_end.opaque_models.rows import MODELS
torch.manual_seed(0)
model, args = MODELS[sys.argv[1]].make()
model(*args)
try:
    torch.onnx.export(model, args, io.BytesIO(), dynamo=sys.argv[2] == "True")
except Exception:
    print("refused")
"""


def _needs(row: Row) -> None:
    if importlib.util.find_spec(row.module) is None:
        missing("opaque_models", f"{row.module} is not installed: make test-opaque-models")


@pytest.mark.parametrize("name", MODELS)
def test_as_eager_in_a_fresh_process(name: str, dynamo: bool) -> None:
    row = MODELS[name]
    _needs(row)
    torch.manual_seed(0)
    model, args = row.make()
    program = exporter.export(copy.deepcopy(model), args, dynamo=dynamo, opaque=row.opaque)
    assert program.opaque or row.opaque == "missing"
    report = exporter.verify(model, args, dynamo=dynamo, opaque=row.opaque, steps=1)
    assert report.ok or max(each.error for each in report.rows) <= row.loose, str(report)


@pytest.mark.parametrize("name", MODELS)
def test_torch_alone_refuses(name: str, dynamo: bool) -> None:
    """In a process of its own: an exporter that fails in the midst of a transform leaves torch in it."""
    _needs(MODELS[name])
    ended = subprocess.run(
        [sys.executable, "-c", _ALONE, name, str(dynamo)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.rstrip().endswith("refused")


def test_the_document_has_them() -> None:
    lines = [f"| {row.package} | {row.title} |" for row in MODELS.values()]
    text = (ROOT / "docs" / "opaque-models.md").read_text()
    assert [
        line[: line.index("|", line.index("|", 2) + 1) + 1]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| package")
    ] == lines
