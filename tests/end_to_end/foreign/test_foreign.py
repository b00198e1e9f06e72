"""Every row of docs/foreign-models.md; without the packages, three of onnx, and what the document says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.foreign.check import check
from tests.end_to_end.foreign.files import FILES, Foreign, path_of
from tests.end_to_end.foreign.table import DOCUMENT, _within
from tests.support import missing

FOLDER = "PYTHONOP_FOREIGN_DIR"
ALWAYS = ("light_inception_v1.onnx", "light_shufflenet.onnx", "light_squeezenet.onnx")  # in the installed onnx, and done in seconds


@pytest.mark.parametrize("foreign", FILES, ids=lambda each: each.path)
def test_a_file_runs_and_trains(foreign: Foreign):
    folder = os.environ.get(FOLDER, "")
    if not folder and not foreign.path.endswith(ALWAYS):
        missing("foreign", f"{FOLDER} names no folder of unpacked packages: make test-foreign")
    outcome = check(path_of(foreign, Path(folder)), foreign.feeds(), drawn=foreign.drawn)
    assert outcome.fine, outcome


def test_the_document_has_a_row_a_file_and_each_is_fine():
    lines = DOCUMENT.read_text().splitlines()
    rows = [
        line for line in lines[next(i for i, line in enumerate(lines) if line.startswith("| package | file |")) :] if line.startswith("|")
    ][2:]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {each.package}", _within(each)] for each in FILES]
    assert all(row.endswith("| fine |") for row in rows)
