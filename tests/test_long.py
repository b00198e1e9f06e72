"""No test falls between `make test`, `make test-long` and `make pages`, and .ci/run runs all three."""

from __future__ import annotations

import re

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


def test_one_target_runs_what_the_others_leave():
    rules = (ROOT / "Makefile").read_text()
    for marks in ("not newest and not long and not pages", "long and not newest"):
        assert f"-m '{marks}'" in rules
    assert "-m pages" in rules
    job = (ROOT / ".ci" / "run").read_text()
    for target in ("test", "test-long", "pages", 'pages TORCH="$newest"'):
        assert re.search(rf"^stage \d+ make {re.escape(target)}$", job, re.M), target
