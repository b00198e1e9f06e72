"""Values of tensors in memory of their own: what becomes of a file after it was read changes nothing."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from exporter.files.tensors import new_bytes, own_array

KINDS = [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def external(folder, array, offset=0, name="data"):
    """The array as a tensor whose values begin there in a file."""
    (folder / name).write_bytes(b"\xff" * offset + array.tobytes())
    kind = ir.DataType.from_numpy(array.dtype)
    return ir.ExternalTensor(name, offset, array.nbytes, kind, shape=ir.Shape(array.shape), name="w", base_dir=folder)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 700, 301)], ids=str)
def test_values_of_a_file(tmp_path, kind, shape):
    array = np.arange(np.prod(shape, dtype=int)).astype(np.uint8).reshape(shape).astype(kind)
    found = own_array(external(tmp_path, array, offset=7))
    (tmp_path / "data").write_bytes(b"")  # of mapped memory, a look at it would end the process
    assert found.dtype == array.dtype and found.shape == shape and found.flags.c_contiguous
    assert found.tobytes() == array.tobytes()


def test_values_in_memory_are_copied():
    array = np.arange(6.0, dtype=np.float32).reshape(2, 3).T
    found = own_array(ir.tensor(array, name="w"))
    array[:] = 0
    assert found.flags.c_contiguous and found.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_values_of_four_bits(tmp_path):
    (tmp_path / "data").write_bytes(bytes([0x21, 0x43]))
    tensor = ir.ExternalTensor("data", 0, 2, ir.DataType.UINT4, shape=ir.Shape([4]), name="w", base_dir=tmp_path)
    assert own_array(tensor).astype(int).tolist() == [1, 2, 3, 4]


def test_a_file_that_was_cut_off_meanwhile(tmp_path):
    tensor = external(tmp_path, np.ones(1000, np.float32))
    os.truncate(tmp_path / "data", 3999)
    with pytest.raises(OSError, match="shorter than expected"):
        own_array(tensor)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_that_became_a_link_meanwhile(tmp_path, link):
    folder = tmp_path / "model"
    folder.mkdir()
    tensor = external(folder, np.ones(4, np.float32))
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    (folder / "data").unlink()
    link(tmp_path / "secret", folder / "data")
    with pytest.raises(ValueError, match="link"):
        own_array(tensor)


@pytest.mark.parametrize("count", [1, 1000, 5_000_001])
def test_new_memory_is_aligned(count):
    found = new_bytes(count)
    assert found.shape == (count,) and found.ctypes.data % 64 == 0
    found.fill(1)
