"""pythonop export and pythonop inspect."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.files.inspect import inspect_file, inspect_model
from symbolics.errors import FormatError
from symbolics.node.containers import Slot
from symbolics.node.names import VERSION_KEY
from symbolics.text import clean
from tests.processes import ROOT, python
from tests.symbolics.node.node_models import call_of, model_of, node_of

TARGETS = "tests.exporter.commands.cli_targets"
SCALE = f"{TARGETS}:Scale"


@pytest.fixture
def run(tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(main, [str(a) for a in arguments])

    return invoke


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def fails(result, *texts):
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.replace("\n", "").isprintable()
    for text in texts:
        assert text in result.stderr


# ------------------------------------------------------------------------------------------------------------- export


def test_export(run, path, dynamo):
    result = run("export", f"{TARGETS}:pair", "-o", path, "--dynamo" if dynamo else "--no-dynamo", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts == {
        "file": str(path),
        "bytes": path.stat().st_size,
        "schema": None,
        "gradients": None,
        "calls": 2,
        "functions": {SCALE: 2},
        "inlined": {},
        "portable": [],
        "stop_gradients": 1,
        "parameters": 4,
        "trainable": 3,
    }
    onnx.checker.check_model(str(path))


def test_export_equals_the_api(run, path, tmp_path, dynamo):
    import torch

    from tests.exporter.commands import cli_targets

    torch.manual_seed(0)
    assert run("export", f"{TARGETS}:pair", "-o", path, "--dynamo" if dynamo else "--no-dynamo").exit_code == 0
    torch.manual_seed(0)
    exporter.export(*cli_targets.pair(), dynamo=dynamo).save(tmp_path / "api.onnx")
    assert path.read_bytes() == (tmp_path / "api.onnx").read_bytes()


def test_export_of_a_case(run, path):
    result = run("export", f"{TARGETS}:case", "-o", path)
    assert result.exit_code == 0, result.output
    assert f"2 x {SCALE}" in result.stdout
    (value,) = onnx.load(path).graph.input
    assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


def test_inline_opset_and_external_data(run, path):
    assert run("export", f"{TARGETS}:wide", "-o", path, "--inline", f"{TARGETS}:Sc*", "--opset", 19, "--external-data").exit_code == 0
    assert inspect_file(path).rows == []
    assert inspect_file(path).opsets[""] == 19
    assert list(path.parent.glob(f"{path.name}.*.data"))


def test_inline_that_means_nothing(run, path):
    result = run("export", f"{TARGETS}:pair", "-o", path, "--inline", f"{TARGETS}:Sacle")
    fails(result, "inline='", f"did you mean {SCALE}?")
    assert not path.exists()


def test_schema(run, path):
    result = run("export", f"{TARGETS}:pair", "-o", path, "--opset", 18, "--schema", "ort-1.16")
    assert result.exit_code == 0, result.output
    assert "warning: schema='ort-1.16'" in result.stderr
    assert "0.1 is rounded to float32" in result.stderr
    assert {row.function for row in inspect_file(path).rows} == {SCALE}
    assert all(row.error is None for row in inspect_file(path).rows)


def test_register(run, path):
    fails(run("export", f"{TARGETS}:local", "-o", path), f"{SCALE}, called in module <root>", "exporter.register(obj, name)")
    assert not path.exists()
    from exporter.files.trust import unregister

    try:
        assert run("export", f"{TARGETS}:local", "-o", path, "--register", f"{TARGETS}:register").exit_code == 0
        assert inspect_file(path).rows[0].arguments[-1] == "object the table"
    finally:
        unregister("the table")


@pytest.mark.parametrize(
    ("target", "texts"),
    [
        ("no_such_package.mod:f", ["cannot import no_such_package.mod", "ModuleNotFoundError"]),
        (f"{TARGETS}:nothing", [f"{TARGETS} has no nothing"]),
        (f"{TARGETS}:NO_FUNCTION", ["it is no function, but of type int"]),
        (TARGETS, ["not of the form package.module:name"]),
        ("a b:c", ["not of the form package.module:name"]),
        (f"{TARGETS}:raises", ["it raised RuntimeError: no model today"]),
        (f"{TARGETS}:leaves", ["it raised SystemExit"]),
        (f"{TARGETS}:wrong", ["it returned something of type int"]),
        (f"{TARGETS}:wrong_pair", ["it returned something of type Case of str, not (torch.nn.Module, args)"]),
        (f"{TARGETS}:triple", ["it returned something of type tuple"]),
        (f"{TARGETS}:crash", ["boom in forward", "--traceback"]),
    ],
)
def test_bad_targets(run, path, target, texts):
    fails(run("export", target, "-o", path), *texts)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("exporter_of_torch", ["--dynamo", "--no-dynamo"])
def test_an_export_says_what_is_ours_to_say_and_nothing_else(path, exporter_of_torch):
    done = python("-m", "exporter.cli", "export", f"{TARGETS}:scaled_step", "-o", str(path), exporter_of_torch)
    assert done.returncode == 0
    assert done.stdout.startswith(f"wrote {path}")
    assert done.stderr == ""


def test_traceback_shows_where_a_target_raises(run, path):
    result = run("--traceback", "export", f"{TARGETS}:raises", "-o", path)
    assert result.exit_code == 2
    assert "in raises" in result.stderr
    assert "it raised RuntimeError: no model today" in result.stderr.splitlines()[-1]


def test_bad_register(run, path):
    fails(run("export", f"{TARGETS}:pair", "-o", path, "--register", "nowhere:f"), "--register nowhere:f: cannot import nowhere")
    fails(run("export", f"{TARGETS}:pair", "-o", path, "--register", f"{TARGETS}:raises"), "it raised RuntimeError")


def test_bad_paths(run, tmp_path):
    fails(run("export", f"{TARGETS}:raises", "-o", tmp_path / "no" / "m.onnx"), "there is no folder")
    fails(run("export", f"{TARGETS}:raises", "-o", tmp_path), "it is a folder")
    (tmp_path / "file").touch()
    fails(run("export", f"{TARGETS}:raises", "-o", tmp_path / "file" / "m.onnx"), "there is no folder")
    fails(run("export", f"{TARGETS}:raises"), "--output")
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        fails(run("export", f"{TARGETS}:raises", "-o", tmp_path / "locked" / "m.onnx"), "no permission")
    fails(run("export", f"{TARGETS}:pair", "-o", "/proc/m.onnx"), "cannot write /proc/m.onnx")


def test_unknown_schema(run, path):
    fails(run("export", f"{TARGETS}:pair", "-o", path, "--schema", "ort-9"), "ort-9", "ort-1.15")
    assert not path.exists()


def test_an_old_file_survives_a_failure(run, path):
    path.write_bytes(b"old")
    fails(run("export", f"{TARGETS}:crash", "-o", path))
    assert path.read_bytes() == b"old"


def test_only_what_works_is_offered(run):
    assert set(main.commands) >= {"export", "gradient", "inspect", "run", "tangent"}
    assert run("--help").exit_code == 0
    assert run("--version").stdout.strip().endswith(exporter.__version__)


@pytest.mark.slow
def test_the_current_folder_can_be_imported_from(tmp_path):
    (tmp_path / "mine.py").write_text("from tests.exporter.commands.cli_targets import pair\n")
    code = "from exporter.cli import main; main()"
    done = python("-P", "-c", code, "export", "mine:pair", "-o", "out.onnx", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"] == 2
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.onnx"]


# ------------------------------------------------------------------------------------------------------------ inspect


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
        "unchecked": "",
    }
    first, second = rows
    assert first["function"] == SCALE
    assert first["arguments"][1:] == ["0.1", "'mean'"]
    assert second["arguments"][1:] == ["2", "'mean'"]
    assert first["inputs"] == ["float[batch, 3]*"] == first["outputs"]
    assert first["flags"] == ["training", "passed=2"]
    assert first["source"].startswith(f"{TARGETS}:")
    assert (first["id"], second["id"], first["error"], first["graph"], first["module"]) == ("0", "1", None, "", "")


def test_inspect_table(run, exported, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    result = run("inspect", exported)
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


def test_every_cut_is_refused_or_whole(exported, tmp_path):
    data, path = exported.read_bytes(), tmp_path / "cut.onnx"
    for end in range(0, len(data), max(1, len(data) // 97)):
        path.write_bytes(data[:end])
        with pytest.raises(FormatError, match="no ONNX model, or it is cut off"):
            inspect_file(path)


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


# -------------------------------------------------------------------------------------------------------- the exit codes


def test_ctrl_c_is_no_answer(run, path, monkeypatch):
    """1 means that something differs."""

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("exporter.commands.shared._called", interrupted)
    monkeypatch.setattr("exporter.commands.inspect.inspect_file", interrupted)
    monkeypatch.setattr("exporter.commands.gradient.open_model", interrupted)
    monkeypatch.setattr("exporter.commands.run.open_model", interrupted)
    for arguments in (
        ["verify", "a:b"],
        ["export", "a:b", "-o", path],
        ["step", "a:b", "-o", path],
        ["inspect", path],
        ["gradient", path, "-o", path.with_name("training.onnx")],
        ["tangent", path, "-o", path.with_name("tangent.onnx")],
        ["run", path],
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n"), arguments


def test_a_fault_of_ours_is_no_answer(run, path, monkeypatch):
    def fault(*arguments, **options):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("exporter.commands.inspect.inspect_file", fault)
    result = run("inspect", path)
    assert result.exit_code == 2
    assert "ZeroDivisionError: of ours" in result.stderr


def test_ctrl_c_ends_the_fresh_process(tmp_path):
    """`kill -INT` on the command alone, while the other process runs: as a script or an IDE does it."""
    (tmp_path / "slow_target.py").write_text(
        "import os, pathlib, sys, time, torch\n"
        "def make(): return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n"
        "def wait():\n"
        "    pathlib.Path('child').write_text(str(os.getpid()))\n"
        "    time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "exporter.cli", "verify", "slow_target:make", "--setup", "slow_target:wait"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    note = tmp_path / "child"
    try:
        for _ in range(600):
            if process.poll() is not None or (note.exists() and note.read_text()):
                break
            time.sleep(0.2)
        child = int(note.read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    state = Path(f"/proc/{child}/stat")  # where nobody collects orphans, a Z stays
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
