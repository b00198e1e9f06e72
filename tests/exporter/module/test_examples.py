"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_train(tmp_path):
    done = run("examples.train", "--picture", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("from the file") == 2
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_roundtrip_in_pytest():
    done = run("pytest", "-q", "-p", "no:cacheprovider", "examples/test_roundtrip.py")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "2 passed" in done.stdout
