"""Every row of rows.toml on both exporters: the outcome that the table expects, and the table that docs/functions.md shows."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.functions.case import CASES
from tests.end_to_end.functions.check import ROWS, Row, check_row
from tests.end_to_end.functions.extension import available
from tests.end_to_end.functions.operators import extension
from tests.end_to_end.functions.table import DOCUMENT, TORCH, WORKING, cells_of, expected_of, portable_summary, share, summary, table_of
from tests.end_to_end.functions.worker import ENGINES, Worker
from tests.support import missing


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("worker"))
    yield worker
    worker.close()


#: Rows of the C++ extension, which takes a minute to build.
BUILT = {name for name, case in CASES.items() if case.setup is extension}
FIRST = {row.group: row.id for row in reversed(ROWS)}
#: torch.export takes most of the time of the table: by it, a quick run makes the first row of each group.
CELLS = [
    pytest.param(
        row, dynamo, id=f"{kind}-{row.id}", marks=[pytest.mark.slow] * ((dynamo and FIRST[row.group] != row.id) or row.id in BUILT)
    )
    for kind, dynamo in (("dynamo", True), ("torchscript", False))
    for row in ROWS
]


def _needs_a_compiler(row: Row) -> None:
    if row.id in BUILT and not available():
        missing("compiler", "no g++ or ninja, and the row is of a C++ extension")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "dynamo"), CELLS)
def test_row(row: Row, dynamo, worker, tmp_path):
    _needs_a_compiler(row)
    expected, says = (row.dynamo, row.dynamo_says) if dynamo else (row.torchscript, row.torchscript_says)
    cell = check_row(row.id, dynamo, worker, tmp_path)
    assert cell.outcome == expected, cell.message
    assert re.search(says, cell.message), cell.message
    if cell.engines and len(cell.engines) < len(ENGINES):
        missing("native", "the native library is not built, onnx.reference alone ran the row")
    shown, engines = cells_of(cell)
    line = table_of(DOCUMENT.read_text())[row.group, row.what]
    hint = "docs/functions.md is not current: python -m tests.end_to_end.functions.table"
    assert line[0 if dynamo else 1] == shown, hint
    assert not engines or engines == line[2:4], hint


#: torch.export again: make test leaves these to make test-torch, whose torch is newer, and has the TorchScript column.
PORTABLE_CELLS = [
    pytest.param(*cell.values, id=cell.id, marks=[*cell.marks, *([pytest.mark.newest] if cell.values[1] else [])]) for cell in CELLS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "dynamo"), PORTABLE_CELLS)
def test_portable_row(row: Row, dynamo, worker, tmp_path):
    _needs_a_compiler(row)
    cell = check_row(row.id, dynamo, worker, tmp_path, portable=True)
    assert cell.outcome == expected_of(row, dynamo, True), cell.message
    if cell.outcome == "opaque":
        assert re.search(row.portable_says or "nothing is said of it", cell.message), cell.message
    if row.portable_since:
        return  # the document is of the pinned torch
    line = table_of(DOCUMENT.read_text())[row.group, row.what]
    assert line[4 if dynamo else 5] == cell.outcome, "docs/functions.md is not current: python -m tests.end_to_end.functions.table"


def test_the_table_has_the_rows_of_the_list():
    assert list(table_of(DOCUMENT.read_text())) == [(row.group, row.what) for row in ROWS]


def test_every_outcome_that_is_not_works_says_something():
    for row in ROWS:
        for outcome, says in ((row.dynamo, row.dynamo_says), (row.torchscript, row.torchscript_says)):
            assert outcome in {*WORKING, *TORCH, "inlined", "registered", "refused"}, f"{row.id}: {outcome}"
            assert outcome == "works" or says, f"{row.id}: what does it say?"


def test_a_row_that_does_not_simply_work_is_meant_so():
    for row in ROWS:
        works = {row.dynamo, row.torchscript} <= {"works", *TORCH}
        assert works == (not row.rule), f"{row.id}: either it works, or a rule says why not"


@pytest.mark.parametrize(("column", "name", "least"), [(0, "dynamo=True", 0.91), (1, "dynamo=False", 0.90)])
def test_share_of_rows_that_work(column, name, least):
    """By the document's cells, which test_row holds against what each row did; its first lines count them."""
    text = DOCUMENT.read_text()
    outcomes = [cells[column] for cells in table_of(text).values()]
    assert share(outcomes) >= least
    assert summary(name, outcomes) in text.splitlines()


@pytest.mark.parametrize(("column", "name", "least"), [(4, "dynamo=True", 126), (5, "dynamo=False", 119)])
def test_how_many_rows_run_without_python(column, name, least):
    text = DOCUMENT.read_text()
    outcomes = [cells[column] for cells in table_of(text).values()]
    assert outcomes.count("works") >= least
    assert portable_summary(name, outcomes) in text.splitlines()
