"""The public models of the zoo and the standard architectures, verified by both exporters, as docs/models.md says."""

from __future__ import annotations

import pytest

from tests.end_to_end.models import table
from tests.zoo.exported import exported, models

SAID = table.table_of(table.DOCUMENT.read_text())


def test_the_document_has_every_model_and_no_other():
    assert list(SAID) == [(title, kind) for title in table.NAMES.values() for kind in table.EXPORTERS]
    assert {cells.status for cells in SAID.values()} == {"equal"}


@pytest.mark.usefixtures("quick_verify")
@pytest.mark.parametrize("kind", table.EXPORTERS)
@models(quick=())
def test_equal_in_a_fresh_process(name, kind, monkeypatch):
    """Of the file that the other tests of the model look at: verify's own export has its tests in test_verify.py."""
    program = exported(name, table.EXPORTERS[kind]).program
    monkeypatch.setattr("exporter.verification.verify.export", lambda *args, **options: program)
    report = table.verified(name, table.EXPORTERS[kind])
    assert report.ok, "\n".join(
        f"{row.kind} {row.name}: {row.error:.1e} of {row.tolerance:.1e} {row.problem}" for row in report.worst() if not row.ok
    )
    said, found = SAID[table.NAMES[name], kind], table.cells_of(report)
    assert (found.python_ops, found.nodes) == (said.python_ops, said.nodes), (
        "python -m tests.end_to_end.models.table writes docs/models.md anew"
    )
