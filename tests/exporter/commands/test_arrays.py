"""--inputs: a file of arrays that is none, or claims what it cannot have, is one message at once."""

from __future__ import annotations

import io
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exporter.commands.arrays import read_arrays
from tests.exporter.commands.test_cli import fails


def _array(*shape: int, version: int = 1) -> bytes:
    """An .npy file that claims this shape, and has 400,000 bytes."""
    head = io.BytesIO()
    write = np.lib.format.write_array_header_1_0 if version == 1 else np.lib.format.write_array_header_2_0
    write(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue() + bytes(400_000)


def _member(content: bytes, packing: int = zipfile.ZIP_STORED, **entry: int) -> Callable[[Path], None]:
    """An .npz file with one array; the list of files says of it what ``entry`` says."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", packing) as file:
            file.writestr("x.npy", content)
            for name, value in entry.items():
                setattr(file.infolist()[0], name, value)

    return write


def _cut(path: Path) -> None:
    np.savez(path, x=np.zeros((2, 3), np.float32))
    path.write_bytes(path.read_bytes()[:-30])


BAD = {
    "claims more than it has": (_member(_array(2**31)), ("claims 8589934592 bytes of numbers and has 400000", "numpy.savez")),
    "claims more, of another version": (_member(_array(2**31, version=2)), ("claims 8589934592 bytes of numbers and has 400000",)),
    "claims more than any number": (_member(_array(2**62, 2**62)), ("bytes of numbers and has 400000",)),
    "cannot be so large": (
        _member(_array(2**31), zipfile.ZIP_DEFLATED, file_size=2**33), ("x is to have 8589934592 bytes, and cannot", "numpy.savez")
    ),
    "packed as numpy never does": (_member(_array(9), zipfile.ZIP_BZIP2), ("x is packed in a way that numpy never does", "numpy.savez")),
    "over one another": (_member(_array(9), compress_size=2**33), ("lie over one another", "numpy.savez")),
    "an array alone": (lambda path: path.write_bytes(_array(9)), ("it is no .npz file", "numpy.savez")),
    "empty": (lambda path: path.write_bytes(b""), ("it is no .npz file", "numpy.savez")),
    "cut off": (_cut, ("it is no .npz file", "numpy.savez")),
    "text inside": (_member(b"hello, world"), ("cannot read the inputs in", "magic string")),
    "objects": (lambda path: np.savez(path, x=np.array([object()])), ("cannot read the inputs in", "allow_pickle")),
    "a pipe": (os.mkfifo, ("it is no plain file. Copy what it gives into one",)),
    "a folder": (Path.mkdir, ("cannot read the inputs in", "Is a directory")),
    "nothing": (lambda path: None, ("cannot read the inputs in", "No such file")),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_has_no_arrays(run, samples, tmp_path, kind):
    make, says = BAD[kind]
    make(tmp_path / "x.npz")
    start = time.monotonic()
    fails(run("run", samples["plain"], "--inputs", tmp_path / "x.npz"), *says)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("command", ["profile", "doctor", "verify"])
def test_of_every_command(run, samples, tmp_path, command):
    """All that take --inputs read it by the same function."""
    _member(_array(2**31))(tmp_path / "x.npz")
    more = {"doctor": ["--run"], "verify": ["--quantized", samples["plain"]], "profile": []}[command]
    fails(run(command, samples["plain"], *more, "--inputs", tmp_path / "x.npz"), "claims 8589934592 bytes")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_good_files(tmp_path, save):
    """Also zeros, which are packed tightly, and arrays without a number or an axis."""
    arrays = {"zeros": np.zeros((1000, 1000)), "none": np.zeros((0, 3), np.int64), "one": np.array(True), "half": np.ones(3, np.float16)}
    save(tmp_path / "x.npz", **arrays)
    found = read_arrays(tmp_path / "x.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
