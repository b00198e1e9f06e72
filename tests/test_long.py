"""No test falls between `make test` and `make test-long`."""

from __future__ import annotations

import pytest

from tests.long import FILES
from tests.processes import ROOT, python


def test_the_long_files_are_there():
    assert [path for path in FILES if not path.is_file()] == []
    assert len(set(FILES)) == len(FILES)


def test_they_are_marked(request):
    assert request.node.get_closest_marker("long") is None
    done = python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not long", str(FILES[-1]), cwd=ROOT)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


def test_one_target_runs_what_the_other_leaves():
    rules = (ROOT / "Makefile").read_text()
    assert "-m 'not newest and not long'" in rules
    assert "-m 'long and not newest'" in rules
    job = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in job
    assert "make test-long\n" in job
