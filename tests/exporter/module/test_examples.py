"""The examples run."""

from __future__ import annotations

import pytest

from tests.processes import python

pytestmark = pytest.mark.slow


def test_train(tmp_path):
    """One task: test_training_curves.py runs both, and the demo's own test both in one picture."""
    done = python("-m", "examples.train", "--only", "snn", "--picture", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("from the file") == 1
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_roundtrip_in_pytest():
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_roundtrip.py")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "2 passed" in done.stdout
