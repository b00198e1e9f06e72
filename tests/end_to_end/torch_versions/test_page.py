"""docs/versions.md says what was run, and pyproject.toml, the code and the Makefile say the same."""

from __future__ import annotations

import tomllib

import torch

import exporter
from symbolics.capture.interception import TESTED
from tests.end_to_end.models.table import NAMES
from tests.end_to_end.torch_versions import table
from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_is_made_of_the_records():
    assert table.DOCUMENT.read_text() == table.page(), "python -m tests.end_to_end.torch_versions.table"


def test_every_release_that_is_called_tested_has_a_record_of_rows_that_are_there_and_of_every_model():
    assert {".".join(record["torch"].split(".")[:2]) for record in table.records()} == set(TESTED)
    for record in table.records():
        rows = table.expected()  # those of a release that is not at hand may be fewer: what was added since
        assert list(record["functions"]) == [row for row in rows if row in record["functions"]], (
            f"{record['torch']}: python -m tests.end_to_end.torch_versions.table"
        )
        assert list(record["models"]) == list(NAMES), f"{record['torch']}: python -m tests.end_to_end.torch_versions.table"


def test_this_torch_does_what_its_record_says():
    """test_rows and test_zoo hold the list on this torch: its record can say nothing else."""
    here = next(r for r in table.records() if r["torch"] == torch.__version__.split("+")[0])
    assert here["functions"] == table.expected()
    assert {status for found in here["models"].values() for status in found} == {"equal"}


def test_every_python_of_the_classifiers_has_a_record():
    classifiers = {c.rsplit(" ", 1)[-1] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")}
    assert {record["python"] for record in table.records()} == classifiers


def test_the_oldest_torch_is_the_one_that_is_required():
    assert f"torch>={TESTED[0]}" in PROJECT["dependencies"]


def test_a_newer_torch_warns_once(monkeypatch, recwarn):
    import symbolics.capture.tripwire

    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    symbolics.capture.tripwire._warn_of_newer_torch.cache_clear()
    for _ in range(2):
        with exporter.hook():
            pass
    said = [str(w.message) for w in recwarn if "newer than what pythonop was tested with" in str(w.message)]
    assert len(said) == 1 and "torch 2.99.1+cu140" in said[0] and f"torch<{TESTED[-1].split('.')[0]}." in said[0]
    symbolics.capture.tripwire._warn_of_newer_torch.cache_clear()
