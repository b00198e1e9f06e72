"""The command of a fresh process, run where little is left of what a process expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from exporter.files import fresh

TOLD = "import json, sys, dataclasses, exporter; print(json.dumps([sys.path, sys.argv[1:], dataclasses.__file__, exporter.__file__]))"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder as PYTHONPATH cannot name it, where we are installed beside a package that the standard library has; the current one hides us."""
    site, here = tmp_path / "si:te ", tmp_path / "here"
    for folder, text in ((site, ""), (here, "raise ImportError('the current directory has it')")):
        for package in ("exporter", "symbolics"):
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text(text)
    (site / "exporter" / "told.py").write_text(TOLD)
    (site / "dataclasses.py").write_text("raise ImportError('a backport for Python 3.6')")
    monkeypatch.chdir(here)
    monkeypatch.setattr(fresh, "__file__", str(site / "exporter" / "files" / "fresh.py"))
    return site


def test_it_finds_us_alone_elsewhere(site, monkeypatch):
    path = ["", *sys.path, site.parent, None, str(site)]  # Python passes over a Path and None
    monkeypatch.setattr(sys, "path", path)
    command = fresh.fresh_python("exporter.told", "one", "two words")
    monkeypatch.undo()
    done = subprocess.run(command, cwd=site.parent / "here", capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    places, arguments, library, ours = json.loads(done.stdout)
    assert places == [entry or str(site.parent / "here") for entry in path if isinstance(entry, str)]
    assert arguments == ["one", "two words"]
    assert os.path.dirname(library) == os.path.dirname(os.__file__)
    assert ours == str(site / "exporter" / "__init__.py")
