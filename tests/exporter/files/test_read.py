"""The one reader: every kind of source, and what it refuses, for everybody who reads."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import parser

import exporter
from exporter.cli import main
from exporter.files.inspect import inspect_file
from exporter.files.program import Program
from exporter.files.proto import MissingFileError, open_proto, reading
from exporter.files.read import check_complete, open_model
from symbolics.errors import FormatError, PythonopError
from tests.processes import python

READERS = {
    "model": open_model,
    "proto": open_proto,
    "gradient": exporter.build_gradient_graph,
    "tangent": exporter.build_tangent_graph,
    "tangents of a check": exporter.check_gradients,
    "load": exporter.load,
    "reference": exporter.reference_evaluator,
}
everybody = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def model() -> onnx.ModelProto:
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }'
    )


def external(location: str) -> onnx.ModelProto:
    """The same with its weight in another file."""
    proto = model()
    (weight,) = proto.graph.initializer
    weight.ClearField("float_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    weight.external_data.add(key="length", value="8")
    return proto


@pytest.fixture
def folder(tmp_path):
    """A folder for a model; what lies beside it is nobody's business."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for path in (tmp_path / "secret", inside / "data"):
        path.write_bytes(np.array([1, 2], np.float32).tobytes())
    os.symlink(tmp_path / "secret", inside / "link")
    return inside


def test_every_source_gives_the_same_model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    expected = ir.to_proto(ir.from_proto(model())).graph
    for source in (path, str(path), path.read_bytes(), model(), ir.from_proto(model()), Program(ir.from_proto(model()))):
        assert ir.to_proto(open_model(source)).graph == expected
        proto, folder = open_proto(source)
        assert ir.to_proto(ir.from_proto(proto)).graph == expected
        assert folder is None


@pytest.mark.parametrize("read", [open_model, open_proto])
def test_what_comes_is_a_copy(read):
    proto = model()
    for source in (proto, ir.from_proto(proto), Program(ir.from_proto(proto))):
        before = ir.to_proto(open_model(source)).SerializeToString()
        found = read(source)
        graph = found.graph if isinstance(found, ir.Model) else found[0].graph
        graph.name = "changed"
        assert ir.to_proto(open_model(source)).SerializeToString() == before


@everybody
@pytest.mark.parametrize("where", ["../secret", "link", "/etc/hostname", ".", ""])
def test_external_data_outside_the_folder(read, where, folder):
    path = folder / "model.onnx"
    path.write_bytes(external(where).SerializeToString())
    with pytest.raises(FormatError, match=r"the tensor w has external data at"):
        read(path)
    if where:  # in memory the folder is the tensor's own
        held = ir.from_proto(external(where))
        ir.external_data.set_base_dir(held.graph, folder)
        with pytest.raises(FormatError, match=r"the tensor w has external data at"):
            read(held)


def test_the_command_says_so_without_a_traceback(folder):
    path = folder / "model.onnx"
    path.write_bytes(external("../secret").SerializeToString())
    result = CliRunner().invoke(main, ["gradient", str(path), "-o", str(folder / "training.onnx")])
    assert result.exit_code == 2
    assert "external data at ../secret: a model may only read plain files below its own folder" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "training.onnx").exists()


def test_facts_need_no_data(folder):
    path = folder / "model.onnx"
    path.write_bytes(external("../secret").SerializeToString())
    assert inspect_file(path).opsets == {"": 18}


@everybody
def test_external_data_beside_the_model(read, folder, monkeypatch):
    path = folder / "model.onnx"
    path.write_bytes(external("data").SerializeToString())
    monkeypatch.chdir("/")
    read(path)
    proto, found = open_proto(path, load_data=True)
    assert found == folder
    assert onnx.numpy_helper.to_array(proto.graph.initializer[0]).tolist() == [1, 2]


@everybody
def test_no_model(read, tmp_path):
    path = tmp_path / "model.onnx"
    whole = model().SerializeToString()
    for content in (b"", b"hello world\n", b"\xff" * 100, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"model\.onnx is no ONNX model, or it is cut off"):
            read(path)
        with pytest.raises(FormatError, match=r"what was read from bytes is no ONNX model"):
            read(content)
    with pytest.raises(FormatError, match=rf"cannot read {tmp_path}"):
        read(tmp_path)
    with pytest.raises(FormatError, match=r"cannot read .*absent\.onnx: No such file") as caught:
        read(tmp_path / "absent.onnx")
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, MissingFileError)
    with pytest.raises(TypeError, match="not int") as wrong:
        read(3)
    assert isinstance(wrong.value, PythonopError)


@everybody
def test_a_pipe_is_no_file(read, tmp_path):
    """Who opened it would wait for a writer."""
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(FormatError, match=r"cannot read .*model\.onnx: it is no plain file"):
        read(tmp_path / "model.onnx")


@pytest.mark.parametrize("command", ["gradient", "tangent", "quantize", "draw"])
def test_a_graph_that_reads_in_a_circle(command, tmp_path):
    proto = model()
    proto.graph.node[0].input[0] = "y"
    onnx.save(proto, tmp_path / "model.onnx")
    result = CliRunner().invoke(main, [command, str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.html")])
    assert result.exit_code == 2
    assert "reads 'y', which nothing before it makes" in " ".join(result.output.split()), result.output


@everybody
def test_a_newer_format(read):
    proto = model()
    proto.metadata_props.add(key="pythonop.version", value="99")
    with pytest.raises(FormatError, match="newer pythonop"):
        read(proto)
    with pytest.raises(FormatError, match="newer pythonop"):
        read(ir.from_proto(proto))


def test_a_model_that_is_complete():
    check_complete(open_model(model()))
    proto = model()
    proto.graph.node[0].input[0] = "nowhere"
    with pytest.raises(FormatError, match=r"'nowhere', which nothing before it makes"):
        check_complete(open_model(proto))
    del proto.graph.output[:]
    with pytest.raises(FormatError, match="no outputs"):
        check_complete(open_model(proto))


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(FormatError, match="cannot read") as caught:
        open_proto(tmp_path)
    assert isinstance(caught.value, OSError)


NEGATIVE = """
import onnx.parser, exporter
model = onnx.parser.parse_model('''<ir_version: 9, opset_import: ["" : 18]> g (float[N, 4] x) => (float[M, 4] y)
    <int64[1] start = {0}, int64[1] end = {5}, int64[1] axis = {0}> { z = Slice(x, start, end, axis)  y = Exp(z) }''')
for value in (*model.graph.input, *model.graph.output):
    value.type.tensor_type.shape.dim[0].dim_value = -1
training = exporter.build_gradient_graph(model)
print([str(value.shape) for value in training.graph.inputs][0])
"""


def test_a_negative_size_is_one_that_is_not_known():
    """In a process of its own: ONNX's shape inference ended it."""
    done = python("-c", NEGATIVE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[None,4]"


def test_maps_are_named_and_onnxruntime_runs_them():
    """What converters of classifiers write: a sequence of maps from labels to probabilities."""
    value, zipped = onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [1, 2]), onnx.ValueInfoProto(name="zipped")
    kind = zipped.type.sequence_type.elem_type.map_type
    kind.key_type = onnx.TensorProto.INT64
    kind.value_type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    node = onnx.helper.make_node("ZipMap", ["p"], ["zipped"], domain="ai.onnx.ml", classlabels_int64s=[3, 5])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 1)]
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [zipped]), opset_imports=opsets, ir_version=8)
    for read in (open_model, exporter.build_gradient_graph, exporter.load):
        with pytest.raises(FormatError, match=r"'zipped' is a map.*exporter\.inference_session.*'zipmap': False"):
            read(proto)
    (found,) = exporter.inference_session(proto).run(None, {"p": np.float32([[0.25, 0.75]])})
    assert found == [{3: 0.25, 5: 0.75}]


def test_a_fault_of_ours_is_no_damage_of_the_file():
    """A name that another package's release lacks, in code of ours; the same in code of others is what a file made of it."""
    ours = {"__name__": "exporter.somewhere"}
    exec("def look(thing): return thing.missing", ours)
    with pytest.raises(AttributeError, match="missing"), reading("model.onnx"):
        ours["look"](model())
    with pytest.raises(FormatError, match="it is cut off"), reading("model.onnx"):
        _ = model().missing


@pytest.mark.parametrize("read", [open_proto, exporter.inference_session])
@pytest.mark.parametrize("where", ["../secret", "*/_ORT_MEM_ADDR_/*"])
def test_external_data_of_a_sparse_attribute(read, where, folder):
    """onnxruntime 1.20 to 1.24 read it, wherever it lies."""
    proto = model()
    sparse = onnx.SparseTensorProto(values=external(where).graph.initializer[0], dims=[2])
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.arange(2), "i"))
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["s"], sparse_value=sparse))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(FormatError, match=r"the tensor w has external data at"):
        read(path)


@everybody
def test_a_location_that_stands_twice(read, folder):
    proto = external("data")
    proto.graph.initializer[0].external_data.add(key="location", value="data")
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(FormatError, match="stands there twice"):
        read(path)
