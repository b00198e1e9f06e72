"""How a file reaches the disk: whole, or not at all."""

from __future__ import annotations

import os

import pytest

from exporter.files.program import whole
from symbolics.errors import ExportError, RunError


def test_files_appear_when_they_are_whole(tmp_path):
    path = tmp_path / "model"
    path.write_text("old")
    with whole(path) as draft:
        draft.write_text("new")
        draft.with_name("model.data").write_text("more")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["model", "model.data"]


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(28, "No space left on device")])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "model"
    path.write_text("old")

    def write():
        with whole(path) as draft:
            draft.write_text("half")
            raise error

    with pytest.raises(ExportError if isinstance(error, OSError) else ValueError):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_the_message_and_the_type(tmp_path):
    with pytest.raises(RunError, match=r"cannot write .*absent/file: No such file or directory; nothing was written"):
        whole(tmp_path / "absent" / "file", RunError).__enter__()


def test_the_data_file_comes_first(tmp_path, monkeypatch):
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(new.name), replace(old, new)))
    with whole(tmp_path / "a") as draft:
        draft.write_text("")
        draft.with_name("a.data").write_text("")
        draft.with_name("Z").write_text("")
    assert moved[-1] == "a"
