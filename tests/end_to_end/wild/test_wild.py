"""Real packages: what each of their Functions becomes, forward and backward beside eager, in a fresh process.

The packages are optional: one that is not installed is an xfail that names it. docs/wild.md shows the same table.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.end_to_end.functions.case import CASES
from tests.end_to_end.functions.check import check_row
from tests.end_to_end.functions.worker import Worker
from tests.end_to_end.wild.packages import PACKAGES, Package, allowed
from tests.processes import ROOT
from tests.support import missing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("worker"))
    yield worker
    worker.close()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.row)
def test_package(package: Package, dynamo, worker, tmp_path):
    if importlib.util.find_spec(package.module) is None:
        missing("packages", f"{package.module} is not installed: make test-wild")
    CASES[package.row].allow = allowed(package)
    cell = check_row(package.row, dynamo, worker, tmp_path)
    assert cell.outcome == (package.dynamo if dynamo else package.torchscript), cell.message
    assert re.search(package.says, cell.message), cell.message


def test_the_document_is_current():
    """docs/wild.md has a row a package, with what it needs."""
    lines = [f"| {p.module} | {p.what} | {p.dynamo} | {p.torchscript} | {p.needs} |" for p in PACKAGES]
    text = (ROOT / "docs" / "wild.md").read_text().partition("## Models")[0]
    assert [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| package")] == lines
