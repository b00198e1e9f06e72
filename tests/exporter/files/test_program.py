"""Models as files: where their tensors go. How files reach the disk is test_save.py's."""

from __future__ import annotations

import os
import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from exporter.files import program
from exporter.files.program import save_model, save_models
from exporter.files.read import open_model
from symbolics.errors import ExportError
from tests.exporter.files.killed import data_of, model, version_of


def initializers(path):
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def with_attributes(path):
    """A file whose constants, in the graph and in a function, have their values in another file."""
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "my": 1]> g () => (float[100] y) { k = Constant<value = float[100] {1.0}>() y = my.F(k) }'
        '<opset_import: ["": 18], domain: "my"> F (x) => (y) { c = Constant<value = float[100] {1.0}>() y = Add(x, c) }'
    )
    for node in (made.graph.node[0], made.functions[0].node[0]):
        tensor = node.attribute[0].t
        tensor.CopyFrom(onnx.TensorProto(name="k", data_type=1, dims=[100], data_location=onnx.TensorProto.EXTERNAL))
        for key, value in (("location", "weights"), ("offset", "0"), ("length", "400")):
            tensor.external_data.add(key=key, value=value)
    np.full(100, 7, np.float32).tofile(path.with_name("weights"))
    path.write_bytes(made.SerializeToString())
    return open_model(path)


class TestData:
    def test_its_name_is_made_by_it(self, tmp_path):
        """The same model gives the same bytes, in both files; another model another name, and the old data is gone."""
        path = tmp_path / "m.onnx"
        contents = []
        for version in (1, 2, 1):
            save_model(model(version, 100), path, external_data=True)
            (data,) = data_of(path)
            assert re.fullmatch(r"m\.onnx\.[0-9a-f]{16}\.data", data)
            assert sorted(os.listdir(tmp_path)) == ["m.onnx", data]
            assert version_of(path) == version
            contents.append((path.read_bytes(), data, (tmp_path / data).read_bytes()))
        assert contents[0] == contents[2] != contents[1]
        save_model(model(2, 100), path)
        assert os.listdir(tmp_path) == ["m.onnx"]

    def test_what_goes_out(self, tmp_path):
        """Initializers of more than 256 bytes, as onnx_ir does it; nothing where there are none."""
        save_model(model(1, 64), tmp_path / "m.onnx", external_data=True)
        assert os.listdir(tmp_path) == ["m.onnx"]
        save_model(model(1, 65), tmp_path / "m.onnx", external_data=True)
        proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
        assert {t.name for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL} == {"a", "b"}
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
        assert [result.tolist() for result in session.run(None, {})] == [[1.0] * 65, [1.0] * 65, [1.0] * 3]

    def test_by_size(self, tmp_path, monkeypatch):
        monkeypatch.setattr(program, "_EXTERNAL_ABOVE", 1000)
        save_model(model(1, 100), tmp_path / "small.onnx")
        save_model(model(1, 1000), tmp_path / "large.onnx")
        assert not data_of(tmp_path / "small.onnx")
        assert data_of(tmp_path / "large.onnx")
        monkeypatch.setattr(program, "_LARGEST", 2000)
        with pytest.raises(ExportError, match="external_data=True"):
            save_model(model(1, 1000), tmp_path / "large.onnx", external_data=False)

    def test_types(self, tmp_path):
        arrays = {
            name: np.arange(600).astype(ir.DataType[name].numpy()) for name in ("FLOAT16", "BFLOAT16", "INT64", "BOOL", "INT4", "UINT2")
        }
        values = [ir.Value(name=k, const_value=ir.Tensor(v, ir.DataType[k], name=k)) for k, v in arrays.items()]
        values.append(ir.Value(name="text", const_value=ir.StringTensor([b"x" * 300], shape=ir.Shape([1]), name="text")))
        made = ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 18}, name="g"), ir_version=13)
        for external in (True, False):
            save_model(made, tmp_path / "m.onnx", external_data=external)
            save_model(ir.load(tmp_path / "m.onnx"), tmp_path / "m.onnx", external_data=not external)
            loaded = ir.load(tmp_path / "m.onnx").graph.initializers
            for name, array in arrays.items():
                np.testing.assert_array_equal(loaded[name].const_value.numpy(), array)
                assert loaded[name].const_value.dtype == ir.DataType[name]
            assert loaded["text"].const_value.string_data() == [b"x" * 300]


class TestDataOfOtherFiles:
    @pytest.mark.parametrize("external", [True, False, None])
    def test_over_the_file_that_was_read(self, tmp_path, external):
        path = tmp_path / "m.onnx"
        save_model(model(1, 100), path, external_data=True)
        loaded = ir.load(path)
        loaded.graph.initializers["b"].const_value = ir.tensor(np.full(100, 5, np.float32), name="b")
        save_model(loaded, path, external_data=external)
        got = initializers(path)
        assert {name: set(array.tolist()) for name, array in got.items()} == {"a": {1.0}, "b": {5.0}, "c": {1.0}}
        assert set(os.listdir(tmp_path)) == {"m.onnx", *data_of(path)}

    @pytest.mark.parametrize("external", [True, False, None])
    def test_into_another_folder(self, tmp_path, external):
        """The new file needs nothing of the old one's."""
        (tmp_path / "far").mkdir()
        save_model(model(1, 100), tmp_path / "m.onnx", external_data=True)
        save_model(ir.load(tmp_path / "m.onnx"), tmp_path / "far" / "n.onnx", external_data=external)
        for path in tmp_path.glob("m.*"):
            path.unlink()
        assert version_of(tmp_path / "far" / "n.onnx") == 1

    @pytest.mark.parametrize("external", [True, False])
    def test_of_attributes(self, tmp_path, external):
        (tmp_path / "far").mkdir()
        save_model(with_attributes(tmp_path / "m.onnx"), tmp_path / "far" / "n.onnx", external_data=external)
        assert len(os.listdir(tmp_path / "far")) == 1 + external
        loaded = onnx.load(tmp_path / "far" / "n.onnx", load_external_data=False)
        for node in (loaded.graph.node[0], loaded.functions[0].node[0]):
            tensor = node.attribute[0].t
            if external:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(tmp_path / "far"))
            assert set(onnx.numpy_helper.to_array(tensor).tolist()) == {7.0}

    @pytest.mark.parametrize("damage", ["missing", "cut", "outside"])
    @pytest.mark.parametrize("external", [True, False])
    def test_that_cannot_be_read(self, tmp_path, damage, external):
        save_model(model(1, 100), tmp_path / "m.onnx", external_data=True)
        (data,) = data_of(tmp_path / "m.onnx")
        loaded = ir.load(tmp_path / "m.onnx")
        if damage == "missing":
            (tmp_path / data).unlink()
        elif damage == "cut":
            os.truncate(tmp_path / data, 500)
        else:
            (tmp_path / "folder").mkdir()
            ir.external_data.set_base_dir(loaded.graph, tmp_path / "folder")
            (tmp_path / "folder" / data).symlink_to(tmp_path / data)
        (tmp_path / "n.onnx").write_text("old")
        with pytest.raises(ExportError, match=f"cannot write .*n.onnx: .*{data}"):
            save_model(loaded, tmp_path / "n.onnx", external_data=external)
        assert (tmp_path / "n.onnx").read_text() == "old"
        assert len([name for name in os.listdir(tmp_path) if "n.onnx." in name and "m.onnx" not in name]) == 0


@pytest.mark.parametrize("external", [True, False])
def test_the_model_in_memory_stays(tmp_path, external, monkeypatch):
    """Also where it cannot be written."""
    made = with_attributes(tmp_path / "m.onnx")
    made.graph.initializers["w"] = ir.Value(name="w", const_value=ir.tensor(np.ones(100, np.float32), name="w"))
    before = [(value, value.const_value) for value in made.graph.initializers.values()]
    attributes = [
        node.attributes["value"] for part in (made.graph, *made.functions.values()) for node in part if "value" in node.attributes
    ]
    text = str(ir.to_proto(made))
    save_model(made, tmp_path / "n.onnx", external_data=external)
    with monkeypatch.context() as patch:
        patch.setattr(ir, "to_proto", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_model(made, tmp_path / "n.onnx", external_data=external)
    assert all(value.const_value is tensor for value, tensor in before)
    after = [node.attributes["value"] for part in (made.graph, *made.functions.values()) for node in part if "value" in node.attributes]
    assert all(a is b for a, b in zip(after, attributes, strict=True))
    assert str(ir.to_proto(made)) == text


def test_several_or_none(tmp_path):
    (tmp_path / "b.onnx").mkdir()
    with pytest.raises(ExportError, match="it is a folder"):
        save_models([(model(1, 100), tmp_path / "a.onnx"), (model(1, 100), tmp_path / "b.onnx")], external_data=True)
    assert os.listdir(tmp_path) == ["b.onnx"]
    save_models([(model(1, 100), tmp_path / "a.onnx"), (model(2, 100), tmp_path / "c.onnx")], external_data=True)
    assert [version_of(tmp_path / name) for name in ("a.onnx", "c.onnx")] == [1, 2]
    assert len(os.listdir(tmp_path)) == 5
