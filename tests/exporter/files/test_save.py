"""How files reach the disk: whole and together, or not at all."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading

import numpy as np
import pytest

from exporter.files.program import save_model
from exporter.files.save import saving, writable
from symbolics.errors import ExportError, RunError
from tests.exporter.files.killed import data_of, model, version_of
from tests.processes import python

DIGITS = "0123456789abcdef"


@pytest.fixture(params=["unnamed", "named"])
def drafts(request, monkeypatch):
    """Both kinds of drafts, on a system that has files without names."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return request.param


def text_of(path):
    """What is in a folder."""
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def save_pair(folder):
    """Two files, the first with data."""
    with saving() as files:
        name = files.add_data(folder / "a", lambda file: file.write(b"data of new"))
        files.open(folder / "a").write(b"new a: " + name.encode())
        files.open(folder / "b").write(b"new b")


class TestTogether:
    def test_files_appear_at_the_end(self, tmp_path, drafts):
        (tmp_path / "a").write_text("old")
        with saving() as files:
            files.open(tmp_path / "a").write(b"new")
            files.open(tmp_path / "b").write(b"more")
            assert (tmp_path / "a").read_text() == "old"
            assert not (tmp_path / "b").exists()
        assert text_of(tmp_path) == {"a": b"new", "b": b"more"}

    @pytest.mark.parametrize("error", [ValueError("a bug"), OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_a_failure_leaves_what_was_there(self, tmp_path, drafts, error):
        (tmp_path / "a").write_text("old")

        def write():
            with saving() as files:
                files.open(tmp_path / "a").write(b"half")
                files.add_data(tmp_path / "b", lambda file: file.write(b"x"))
                files.open(tmp_path / "b").write(b"half")
                raise error

        with pytest.raises(ExportError if isinstance(error, OSError) else type(error)):
            write()
        assert text_of(tmp_path) == {"a": b"old"}

    @pytest.mark.parametrize("before", [{}, {"a": b"old a"}, {"b": b"old b"}, {"a": b"old a", "b": b"old b"}])
    @pytest.mark.parametrize("late", [False, True])
    def test_interrupted_at_any_call(self, tmp_path, drafts, monkeypatch, before, late):
        """Before, or after, each call that makes or moves a name: all as it was, or all in place."""
        folder = tmp_path / "all"
        folder.mkdir()
        save_pair(folder)
        new = text_of(folder)
        for call in range(1, 50):
            folder = tmp_path / str(call)
            folder.mkdir()
            for name, text in before.items():
                (folder / name).write_bytes(text)
            calls = [0]
            with monkeypatch.context() as patch:
                for name in ("link", "replace"):
                    patch.setattr(os, name, _interrupting(getattr(os, name), calls, call, late))
                try:
                    save_pair(folder)
                except KeyboardInterrupt:
                    pass
            if calls[0] < call:
                break
            assert text_of(folder) in (before, new), call
        assert 3 < call < 15

    def test_a_second_file_that_cannot_be_placed(self, tmp_path, drafts, monkeypatch):
        for name in "ab":
            (tmp_path / name).write_text(f"old {name}")
        replace = os.replace

        def refusing(old, new):
            if new == tmp_path / "b":
                raise PermissionError(1, "Operation not permitted")
            replace(old, new)

        monkeypatch.setattr(os, "replace", refusing)
        with pytest.raises(ExportError, match=r"cannot write .*b: Operation not permitted; nothing was written"):
            save_pair(tmp_path)
        assert text_of(tmp_path) == {"a": b"old a", "b": b"old b"}

    def test_one_place_for_two_files(self, tmp_path):
        (tmp_path / "link").symlink_to("a")
        with saving() as files:
            files.open(tmp_path / "a").write(b"new")
            with pytest.raises(ExportError, match="another file of the same save"):
                files.open(tmp_path / "link")
        assert text_of(tmp_path) == {"a": b"new", "link": b"new"}


def _interrupting(function, calls, call, late):
    def wrapped(*args, **keywords):
        calls[0] += 1
        if calls[0] == call and not late:
            raise KeyboardInterrupt
        result = function(*args, **keywords)
        if calls[0] == call:
            raise KeyboardInterrupt
        return result

    return wrapped


class TestPlaces:
    @pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "link to a device", "loop", "below a file"])
    def test_no_place_for_a_file(self, tmp_path, kind):
        path = tmp_path / "m.onnx"
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a device":
            path.symlink_to("/dev/null")
        elif kind == "loop":
            path.symlink_to("loop")
            (tmp_path / "loop").symlink_to("m.onnx")
        elif kind == "below a file":
            (tmp_path / "file").write_text("keep")
            path = tmp_path / "file" / "m.onnx"
        else:
            path = "/dev/full"
        before = os.lstat(path) if kind != "below a file" else None
        with pytest.raises(ExportError, match="cannot write .*; nothing was written"):
            writable(path)
        if "device" not in kind:  # which a save that does not refuse would replace, where root runs this
            with pytest.raises(ExportError, match="cannot write .*; nothing was written"):
                save_model(model(1, 4), path)
        assert before is None or os.lstat(path) == before

    def test_the_type_of_the_error(self, tmp_path):
        with pytest.raises(RunError, match="there is no folder"), saving(RunError) as files:
            files.open(tmp_path / "absent" / "file")

    @pytest.mark.parametrize("there", [True, False])
    def test_a_link_stays(self, tmp_path, drafts, there):
        (tmp_path / "far").mkdir()
        if there:
            (tmp_path / "far" / "m.onnx").write_text("old")
        (tmp_path / "second").symlink_to("far/m.onnx")
        (tmp_path / "first").symlink_to("second")
        save_model(model(1, 4), tmp_path / "first")
        assert os.readlink(tmp_path / "first") == "second"
        assert os.listdir(tmp_path / "far") == ["m.onnx"]
        assert version_of(tmp_path / "first") == 1
        assert not (tmp_path / "far" / "m.onnx").is_symlink()

    def test_data_beside_a_link(self, tmp_path):
        """Beside the link's target where that is the same folder; readers find no data through a link into another."""
        (tmp_path / "latest.onnx").symlink_to("m.onnx")
        save_model(model(1, 100), tmp_path / "latest.onnx", external_data=True)
        (data,) = data_of(tmp_path / "latest.onnx")
        assert data.startswith("m.onnx.")
        assert version_of(tmp_path / "latest.onnx") == version_of(tmp_path / "m.onnx") == 1
        (tmp_path / "far").mkdir()
        (tmp_path / "far.onnx").symlink_to("far/m.onnx")
        with pytest.raises(ExportError, match=r"link into another folder.*save to .*far/m.onnx"):
            save_model(model(1, 100), tmp_path / "far.onnx", external_data=True)
        assert os.listdir(tmp_path / "far") == []

    def test_names_that_readers_refuse(self, tmp_path):
        save_model(model(1, 100), tmp_path / "a:b.onnx")
        with pytest.raises(ExportError, match="choose another name"):
            save_model(model(2, 100), tmp_path / "a:b.onnx", external_data=True)
        assert version_of(tmp_path / "a:b.onnx") == 1

    def test_the_mode(self, tmp_path, drafts):
        def modes():
            return {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

        before = os.umask(0o027)
        try:
            save_model(model(1, 100), tmp_path / "m.onnx", external_data=True)
            assert modes() == {0o640}
            for mode in (0o600, 0o444):  # also of its data: it is as private as the model
                (tmp_path / "m.onnx").chmod(mode)
                save_model(model(2, 100), tmp_path / "m.onnx", external_data=True)
                assert modes() == {mode}
        finally:
            os.umask(before)

    def test_what_is_to_be_kept(self, tmp_path, monkeypatch):
        read, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
        read.write_text("m")
        (tmp_path / "hard").hardlink_to(read)
        (tmp_path / "soft").symlink_to("m.onnx")
        monkeypatch.chdir(tmp_path)
        for path in (read, tmp_path / "hard", tmp_path / "soft", tmp_path / ".." / tmp_path.name / "m.onnx", "m.onnx"):
            with pytest.raises(ExportError, match=r"replace or remove .*m.onnx.*choose another output"):
                writable(path, keep=[read])
        with pytest.raises(ExportError, match="choose another"):  # neither is there yet
            writable("./out.onnx", keep=[output])
        with pytest.raises(ExportError, match="choose another"):  # data of an older out.onnx, which another model has come to name
            writable(output, keep=[tmp_path / f"out.onnx.{DIGITS}.data"])
        assert writable(output, keep=[read, tmp_path / f"x.onnx.{DIGITS}.data"]) == output


class TestOtherSaves:
    def test_drafts_of_killed_saves_go(self, tmp_path, drafts):
        """Those of this name; not those that somebody works on, nor what only looks like one."""
        kept = {f".a.{DIGITS}.draft.txt": b"", f".b.{DIGITS}.draft": b"", f"aa.{DIGITS}.data": b"", f"a.{DIGITS[1:]}.data": b""}
        gone = {f".a.{DIGITS}.draft": b"", f"a.{DIGITS}.data": b""}
        for name, text in {**kept, **gone}.items():
            (tmp_path / name).write_bytes(text)
        with saving() as files:
            files.open(tmp_path / "a").write(b"new")
        assert text_of(tmp_path) == {**kept, "a": b"new"}

    def test_a_draft_in_use_stays(self, tmp_path, monkeypatch):
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        with saving() as slow:
            slow.open(tmp_path / "a").write(b"slow")
            with saving() as quick:
                quick.open(tmp_path / "a").write(b"quick")
            assert (tmp_path / "a").read_bytes() == b"quick"
        assert text_of(tmp_path) == {"a": b"slow"}

    def test_two_that_save_at_once(self, tmp_path, drafts):
        path, problems = tmp_path / "m.onnx", []

        def work(version):
            try:
                for _ in range(15):
                    save_model(model(version, 100), path, external_data=True)
            except Exception as error:
                problems.append(error)

        workers = [threading.Thread(target=work, args=(version,)) for version in (1, 2, 3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert problems == []
        assert version_of(path) in (1, 2, 3)
        assert set(os.listdir(tmp_path)) == {"m.onnx", *data_of(path)}

    def test_a_lock_that_is_never_free(self, tmp_path, monkeypatch):
        """The file is written, and nothing of others is removed."""
        import fcntl

        monkeypatch.setattr("exporter.files.save._PATIENCE", 0.02)
        (tmp_path / f"a.{DIGITS}.data").touch()
        held = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            with saving() as files:
                files.open(tmp_path / "a").write(b"new")
        finally:
            os.close(held)
        assert text_of(tmp_path) == {"a": b"new", f"a.{DIGITS}.data": b""}

    def test_without_locks(self, tmp_path, monkeypatch):
        """As on Windows."""
        monkeypatch.setattr("exporter.files.save.fcntl", None)
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        (tmp_path / f".a.{DIGITS}.draft").touch()
        save_pair(tmp_path)
        assert sorted(text_of(tmp_path))[-1] == "b"
        assert len(text_of(tmp_path)) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
class TestKilled:
    """What is at the paths is of one version and whole after each kill, and the next save leaves nothing else: see killed.py."""

    def run(self, tmp_path, kind, drafts, rounds):
        result = python("-m", "tests.exporter.files.killed", str(tmp_path), kind, drafts, str(rounds), timeout=120)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    @pytest.mark.parametrize("kind", ["inside", "outside", pytest.param("several", marks=pytest.mark.slow)])
    def test_at_every_call(self, tmp_path, kind, drafts):
        seen = self.run(tmp_path, kind, drafts, 0)
        assert seen["kills"] >= 10
        assert seen["mixed"] == (2 if kind == "several" else 0)  # between two renames: each file is whole, the pair is not
        if kind == "inside":
            assert seen.get("data", 0) == 0

    def test_ten_times(self, tmp_path):
        assert self.run(tmp_path, "outside", "unnamed", 10)["kills"] == 10

    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "rounds"), [("inside", 30), ("outside", 40), ("several", 30)])
    def test_a_hundred_times(self, tmp_path, kind, rounds):
        assert self.run(tmp_path, kind, "unnamed", rounds)["kills"] == rounds


def test_a_large_write_that_fails(tmp_path):
    """Room for no more than a part of the file: nothing is left, in a process that may write so much and no more."""
    (tmp_path / "m.onnx").write_text("old")
    code = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from tests.exporter.files.killed import model; from exporter.files.program import save_model\n"
        "try: save_model(model(1, 1 << 19), sys.argv[1], external_data=sys.argv[2] == 'outside')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for where in ("inside", "outside"):
        result = python("-c", code, str(tmp_path / "m.onnx"), where)
        assert "ExportError cannot write" in result.stdout, result.stderr
        assert text_of(tmp_path) == {"m.onnx": b"old"}


def test_torch_is_not_needed():
    result = python("-c", "import sys, exporter.files.save, exporter.files.program; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_npz(tmp_path):
    """A file that is written by seeking in it."""
    with saving() as files:
        np.savez(files.open(tmp_path / "x.npz"), a=np.arange(3))
    assert np.load(tmp_path / "x.npz")["a"].tolist() == [0, 1, 2]
