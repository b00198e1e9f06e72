"""What is read while others save, and what is read of data in other files: the file that was looked at, whatever becomes of its name."""

from __future__ import annotations

import os
import threading

import numpy as np
import onnx_ir as ir
import pytest

import exporter
from exporter.files import data_file, steady as steadiness
from exporter.files.data_file import open_data
from exporter.files.examine import size_of
from exporter.files.program import save_model
from exporter.files.save import between_saves
from exporter.files.steady import steady
from symbolics.errors import ExportError, FormatError
from tests.end_to_end.beside import OPENED
from tests.exporter.files.killed import model, version_of


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.onnx"
    save_model(model(1, 300), path, external_data=True)
    return path


def _replaced_once(monkeypatch, name, path, module=None):
    """Another version is saved just before something reads the data for the first time."""
    left = [2]
    before = getattr(module, name)

    def then(*args, **kwargs):
        if left:
            save_model(model(left.pop(), 300), path, external_data=True)
        return before(*args, **kwargs)

    monkeypatch.setattr(module, name, then)


@pytest.mark.parametrize("door", OPENED)
def test_a_file_that_is_replaced_while_it_is_opened(door, path, monkeypatch):
    import exporter.files.read
    import exporter.runtime.pipeline
    import exporter.runtime.reference

    place = {
        "load": (exporter.module.load, "check_complete"),
        "inference_session": (exporter.runtime.pipeline, "has_python_ops"),
        "reference_evaluator": (exporter.files.proto, "data_size"),
    }[door]
    _replaced_once(monkeypatch, place[1], path, place[0])
    assert OPENED[door](path) == 2


def test_options_of_a_session_serve_the_second_try(path, monkeypatch):
    import onnxruntime

    _replaced_once(monkeypatch, "has_python_ops", path, exporter.runtime.pipeline)
    options = onnxruntime.SessionOptions()
    session = exporter.inference_session(path, ["mypkg:*"], sess_options=options)
    assert float(session.run(None, {})[0][0]) == 2


def test_a_file_that_nobody_replaced_is_read_once(path):
    calls = []

    def read():
        calls.append(1)
        raise FormatError("damaged")

    with pytest.raises(FormatError, match="damaged"):
        steady(path, read)
    assert len(calls) == 1
    with pytest.raises(FormatError, match="damaged"):
        steady(b"bytes", read)
    assert len(calls) == 2


def test_data_that_go_between_two_questions(path):
    """What the system says of a file that a save has just removed is as good a reason as an error of ours."""
    calls = []

    def read():
        calls.append(1)
        if len(calls) == 1:
            save_model(model(2, 300), path, external_data=True)
            raise FileNotFoundError("gone")
        return version_of(path)

    assert steady(path, read) == 2
    assert size_of(path) == path.stat().st_size
    assert size_of(path.parent) is size_of(path.with_name("nothing")) is None


def test_a_file_that_is_replaced_under_every_try(path, monkeypatch):
    monkeypatch.setattr(steadiness, "_TRIES", 3)
    monkeypatch.setattr(steadiness, "between_saves", lambda folder: steadiness.contextlib.nullcontext())
    calls = []

    def read():
        calls.append(1)
        save_model(model(len(calls), 300), path, external_data=True)
        raise FormatError("gone")

    with pytest.raises(FormatError, match="gone"):
        steady(path, read)
    assert len(calls) == 3


def test_a_save_waits_for_who_reads(path):
    done = []
    with between_saves(path.parent):
        saver = threading.Thread(target=lambda: done.append(save_model(model(2, 300), path, external_data=True)))
        saver.start()
        saver.join(0.2)
        assert not done and version_of(path) == 1
    saver.join(20)
    assert done and version_of(path) == 2


# --------------------------------------------------------------------------------------------------- data in other files


@pytest.mark.parametrize("place", ["data", "folder/data", "pipe", "loop"])
def test_what_was_put_in_the_place_of_a_file_that_was_looked_at(place, tmp_path, monkeypatch):
    """As if somebody was quicker than the look at the path: it says that all is well, and the file is opened after it."""
    monkeypatch.setattr(data_file, "check_location", lambda *args: None)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "data").write_bytes(b"secret" * 100)
    here = tmp_path / "model"
    here.mkdir()
    os.symlink(secret / "data", here / "data")
    os.symlink(secret, here / "folder")
    os.symlink("loop", here / "loop")
    os.mkfifo(here / "pipe")
    with pytest.raises(FormatError, match="'w'"):
        open_data("w", place, here, 0, 8)


@pytest.mark.parametrize("door", OPENED)
def test_a_second_name_of_a_file_is_a_file(door, path):
    """Installers make them: uv, conda, pnpm."""
    (data,) = path.parent.glob("*.data")
    os.link(data, path.parent / "elsewhere")
    assert OPENED[door](path) == 1


def test_a_linked_folder_is_the_users_own(path, tmp_path):
    os.symlink(path.parent, tmp_path / "link", target_is_directory=True)
    assert OPENED["load"](tmp_path / "link" / path.name) == 1


@pytest.mark.parametrize("kind", ["FLOAT", "INT4", "BFLOAT16"])
def test_tensors_of_other_files_are_what_they_were(kind, tmp_path):
    dtype = ir.DataType[kind]
    array = np.arange(-3, 9).reshape(3, 4).astype(dtype.numpy())
    value = ir.Value(name="w", const_value=ir.tensor(array, dtype=dtype, name="w"))
    node = ir.Node("", "Identity", [value], name="n")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", ir.TensorType(dtype), ir.Shape([3, 4])
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 21}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "m.onnx", external_data="weights", size_threshold_bytes=0)
    from exporter.files.read import open_model

    read = open_model(tmp_path / "m.onnx")
    tensor = read.graph.initializers["w"].const_value
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.tobytes() == ir.tensor(array, dtype=dtype).tobytes()
    save_model(read, tmp_path / "again.onnx", external_data=False, check=False)
    np.testing.assert_array_equal(open_model(tmp_path / "again.onnx").graph.initializers["w"].const_value.numpy(), array)
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(ExportError, match="cut off"):
        save_model(open_model(tmp_path / "m.onnx", data=False), tmp_path / "third.onnx", check=False)
