"""pythonop inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import onnx
import onnx_ir as ir
import pytest

import exporter
from exporter.files.inspect import inspect_file, inspect_model
from symbolics.errors import FormatError
from symbolics.node.containers import Slot
from symbolics.node.names import VERSION_KEY
from symbolics.text import clean
from tests.exporter.commands.test_cli import SCALE, TARGETS, fails
from tests.processes import python
from tests.symbolics.node.node_models import call_of, model_of, node_of


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    from tests.exporter.commands import cli_targets

    path = tmp_path_factory.mktemp("inspect") / "m.onnx"
    model, args = cli_targets.pair()
    exporter.export(model.train(), args, dynamic_shapes=({0: "batch"},)).save(path)
    return path


def test_inspect(run, exported):
    report = json.loads(run("inspect", exported, "--json").stdout)
    rows = report.pop("rows")
    assert report.pop("opsets")[""] >= 18
    assert report.pop("ir_version") >= 8
    assert report.pop("portable") == report.pop("links") == []
    assert {name: sorted(halves) for name, halves in report.pop("functions").items()} == {SCALE: ["backward", "forward"]}
    assert report == {
        "format_version": 1,
        "stop_gradients": 1,
        "stop_gradients_recorded": 1,
        "gradients": 0,
        "tangents": False,
        "training": False,
        "parameters": 4,
        "trainable": 3,
        "frozen": 1,
        "buffers": 2,
        "not_persistent": 1,
        "tied": [["tied", "linear.weight"]],
        "step": None,
        "allow": [SCALE],
        "data": [],
        "values": {},
        "unchecked": "",
        "inputs": [["x", "float[batch, 3]"]],
        "outputs": [["add_26", "float[batch, 3]"]],
        "operators": {"Add": 3, "com.microsoft::PythonOp": 2, "Gemm": 1, "pythonop::StopGradient": 1, "Mul": 1, "Identity": 1},
    }
    first, second = rows
    assert first["function"] == SCALE
    assert first["arguments"][1:] == ["0.1", "'mean'"]
    assert second["arguments"][1:] == ["2", "'mean'"]
    assert first["inputs"] == ["float[batch, 3]*"] == first["outputs"]
    assert first["flags"] == ["training", "passed=2"]
    assert first["source"].startswith(f"{TARGETS}:")
    assert (first["id"], second["id"], first["error"], first["graph"], first["module"]) == ("0", "1", None, "", "")


def test_the_summary_of_a_big_file_fits_on_a_screen(run, tmp_path, monkeypatch):
    """A line per Function, however often it is called; a row per call only where somebody asks."""
    monkeypatch.setenv("COLUMNS", "200")
    model = model_of(call_of(Slot(0)))
    graph = model.graph
    for index in range(300):
        other = model_of(call_of(Slot(0))).graph
        node = next(node for node in other if node.op_type == "PythonOp")
        other.remove(node, safe=False)
        node.replace_input_with(0, graph.inputs[0])
        node.name = f"more_{index}"
        node.metadata_props["pythonop.source"] = f"pkg.mod:{index % 3}"
        for output in node.outputs:
            output.name = f"{output.name}_{index}" if output.name else output.name
        graph.append(node)
    ir.save(model, tmp_path / "m.onnx")
    result = run("inspect", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) < 40
    (line,) = [line for line in result.stdout.splitlines() if "301" in line and "a PythonOp" in line]
    assert "and 3 more places" in line
    assert "x0: float" in result.stdout
    assert [cell.strip() for line in result.stdout.splitlines() if "com.microsoft::PythonOp" in line for cell in line.split("│")[2:3]] == [
        "301"
    ]
    every = run("inspect", tmp_path / "m.onnx", "--calls").stdout
    assert len(every.splitlines()) > 300


def test_inspect_table(run, exported, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert "--calls" in run("inspect", exported).stdout
    assert "'mean'" not in run("inspect", exported).stdout
    result = run("inspect", exported, "--calls")
    assert result.exit_code == 0, result.output
    for text in (
        SCALE,
        "float[batch, 3]*",
        "'mean'",
        f"{TARGETS}:3",
        "4, 3 trainable, 1 frozen",
        "2, 1 not in state_dict()",
        "tied = linear.weight",
        "pythonop 1",
        "training",
    ):
        assert text in result.stdout, text


def test_inspect_needs_no_torch_and_imports_nothing(exported):
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'tests', 'transformers'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from exporter.cli import main\n"
        f"main(['inspect', {str(exported)!r}])\n"
    )
    done = python("-c", code, COLUMNS="250")
    assert done.returncode == 0, done.stderr
    assert SCALE in done.stdout


def test_inspect_finds_subgraphs_functions_and_gradients(tmp_path):
    model = model_of(call_of(Slot(0), {"a": (1, None)}, [Slot(1)], Slot(2, "size")), gradient=True, marks=1)
    inner = model_of(call_of(Slot(0), None)).graph
    model.functions[("d", "F", "")] = ir.Function("d", "F", graph=inner, attributes=[])
    branch = model_of(call_of(Slot(0))).graph
    branch.inputs[0].replace_all_uses_with(model.graph.inputs[0])
    branch.inputs.clear()
    branch.name = "then"
    condition = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.append(ir.Node("", "If", [condition], [ir.AttrGraph("then_branch", branch)], num_outputs=1))
    report = inspect_model(model)
    assert [row.graph for row in report.rows] == ["", "subgraph then", "function d::F"]
    assert report.rows[0].arguments == ["x0", "{'a': (1, None)}", "[x1]", "int(x2)"]
    assert report.rows[0].inputs == ["float[?, ?]*", "float[?, ?]*", "int64[]"]
    assert report.rows[0].flags == ["context"]
    assert (report.gradients, report.stop_gradients, report.stop_gradients_recorded, report.format_version) == (1, 1, None, None)


def test_types_of_torch_are_shown(run, tmp_path):
    import torch

    ir.save(model_of(call_of(Slot(0), torch.float16, torch.Size([2]))), tmp_path / "m.onnx")
    assert inspect_file(tmp_path / "m.onnx").rows[0].arguments == ["x0", "torch.float16", "torch.Size([2])"]


def test_classes_that_nobody_resolves_are_shown():
    from tests.symbolics.node import values as v

    rows = inspect_model(model_of(call_of(v.Config(Slot(0), (1,)), v.Pair(Slot(1), v.Color.RED), v.helper))).rows
    assert rows[0].arguments == [
        "tests.symbolics.node.values:Config(size=x0, name=(1,))",
        "tests.symbolics.node.values:Pair(x1, tests.symbolics.node.values:Color.RED)",
        "callable tests.symbolics.node.values:helper",
    ]
    assert rows[0].error is None


EVIL = "[red]evil[/red]\x1b[31m\u202e\nline \ud800"


def test_texts_of_a_file_are_escaped(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    model = model_of(call_of(Slot(0), EVIL, kwargs={"k\x1b[2J": 1}, outputs=Slot(0)))
    evil = EVIL.encode("utf-8", "replace").decode()
    node_of(model).metadata_props["pythonop.module"] = evil
    node_of(model).attributes.add(ir.Attr("name", ir.AttributeType.STRING, evil))
    ir.save(model, tmp_path / "m.onnx")
    result = run("inspect", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.output
    assert "[red]evil[/red]\\x1b[31m\\u202e\\nline" in result.stdout
    assert not {"\x1b", "\u202e"} & set(result.stdout)
    assert json.loads(run("inspect", tmp_path / "m.onnx", "--json").stdout)["rows"][0]["module"] == evil


def test_a_damaged_node_is_shown_as_such(run, tmp_path):
    model = model_of(call_of(Slot(0)))
    node_of(model).attributes.add(ir.Attr("call", ir.AttributeType.STRING, '{"version":1'))
    ir.save(model, tmp_path / "m.onnx")
    result = run("inspect", tmp_path / "m.onnx")
    assert result.exit_code == 1
    assert "1 of 1 PythonOps cannot be read" in result.stderr
    answer = run("inspect", tmp_path / "m.onnx", "--json")
    assert answer.exit_code == 1
    assert "not JSON" in json.loads(answer.stdout)["rows"][0]["error"]


def _write(model, path):
    ir.save(model, path)
    return path.read_bytes()


def test_files_that_are_no_files(run, tmp_path, exported):
    path = tmp_path / "bad.onnx"
    fails(run("inspect", path), "cannot read", "No such file")
    fails(run("inspect", tmp_path), "cannot read")
    data = exported.read_bytes()
    for content in (
        b"",
        b"hello world\n",
        b"\x00" * 100,
        os.urandom(300),
        data[: len(data) // 2],
        data[:-1],
        data[:1],
        b"{}",
        b"\x1f\x8b" + data,
    ):
        path.write_bytes(content)
        fails(run("inspect", path), "no ONNX model, or it is cut off")


def test_every_cut_is_refused_or_leaves_the_graph_whole(exported, tmp_path):
    """Behind the graph protobuf cannot tell a cut between two entries from a file that has fewer."""
    data, path = exported.read_bytes(), tmp_path / "cut.onnx"
    graph = onnx.load_from_string(data).graph.SerializeToString()
    first = data.index(graph) + len(graph)
    for end in (*range(0, first, max(1, first // 97)), first - 1):
        path.write_bytes(data[:end])
        with pytest.raises(FormatError, match="no ONNX model, or it is cut off"):
            inspect_file(path)
    whole, rows = 0, [row.function for row in inspect_file(exported).rows]
    for end in range(first, len(data)):
        path.write_bytes(data[:end])
        try:
            facts = inspect_file(path)
        except FormatError as error:
            assert "no ONNX model, or it is cut off" in str(error)
        else:
            whole += 1
            assert [row.function for row in facts.rows] == rows
    assert 0 < whole < 20


def test_newer_and_damaged_metadata(run, tmp_path):
    path = tmp_path / "m.onnx"
    model = model_of(call_of(Slot(0)))
    for key, value, text in [
        (VERSION_KEY, "99", "has pythonop format 99"),
        (VERSION_KEY, "x", "not a version number"),
        ("pythonop.state", "[]", "it is [], not a JSON object"),
        ("pythonop.gradients", "{}", "with the keys inputs, outputs, unreached: the file is damaged"),
    ]:
        model.metadata_props.clear()
        model.metadata_props[key] = value
        ir.save(model, path)
        fails(run("inspect", path), text)


def test_lost_marks_are_said(run, tmp_path):
    model = model_of(call_of(Slot(0)), marks=1)
    model.metadata_props["pythonop.stop_gradients"] = "3"
    ir.save(model, tmp_path / "m.onnx")
    assert "the metadata says 3" in run("inspect", tmp_path / "m.onnx").stdout


def test_clean():
    assert clean("a\nb\x1b\x00é\u202e") == "a\\nb\\x1b\\x00é\\u202e"
    assert clean("\ud800") == "\\ud800"
    assert len(clean("x" * 1000, 50)) == 50
    assert clean("x" * 50, 50) == "x" * 50


# ------------------------------------------------------------------------------------------------------ nodes of a dialect


@pytest.mark.parametrize(
    "changes",
    [
        {"input_int_tuples": [0] * 9, "input_int_tuple_begins": [0, 9] * 9, "input_int_tuple_positions": [1] * 18},
        {"input_tensor_ranks": [1 << 40]},
        {"input_tensor_types": [99]},
        {"func_name": 3},
        {"input_bool_scalars": "text"},
        {"input_convention": 5},
    ],
    ids=str,
)
def test_inspect_shows_what_is_wrong_with_a_node_without_call(changes):
    model = model_of(call_of(Slot(0), 3))
    node = node_of(model)
    del node.attributes["call"]
    for name, value in changes.items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)
    (row,) = inspect_model(model).rows
    assert next(iter(changes)).removesuffix("s").removesuffix("_tuple") in row.error


def test_names_of_a_damaged_file_do_not_reach_the_terminal(tmp_path):
    """onnx_ir's log says them as they are."""
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { z = Relu(x) }')
    model.graph.output[0].name = "\x1b[31mred"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for command in (["inspect"], ["gradient", "-o", str(tmp_path / "out.onnx")], ["run"]):
        done = subprocess.run([sys.executable, "-m", "exporter.cli", command[0], str(path), *command[1:]], capture_output=True, text=True)
        assert "\x1b" not in done.stdout + done.stderr, command
