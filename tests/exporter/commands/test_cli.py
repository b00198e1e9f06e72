"""pythonop export, and how every command ends."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

import exporter
from exporter.cli import COMMANDS, main
from exporter.files.inspect import inspect_file
from tests.processes import ROOT, python

TARGETS = "tests.exporter.commands.cli_targets"
SCALE = f"{TARGETS}:Scale"


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
        "data": [],
        "schema": None,
        "gradients": None,
        "calls": 2,
        "functions": {SCALE: 2},
        "inlined": {},
        "portable": [],
        "fallback": "",
        "stop_gradients": 1,
        "unchecked": [],
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
    result = run("export", f"{TARGETS}:wide", "-o", path, "--inline", f"{TARGETS}:Sc*", "--opset", 19, "--external-data")
    assert result.exit_code == 0
    assert inspect_file(path).rows == []
    assert inspect_file(path).opsets[""] == 19
    (data,) = path.parent.glob(f"{path.name}.*.data")
    size = path.stat().st_size + data.stat().st_size
    assert f"({size:,} bytes, tensors in {data.name})" in result.stdout.replace("\n", "")
    result = run("gradient", path, "-o", path.parent / "training.onnx", "--external-data", "--json")
    facts = json.loads(result.stdout)
    (data,) = facts["data"]
    assert facts["bytes"] == Path(facts["file"]).stat().st_size + Path(data).stat().st_size


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
    fails(run("export", f"{TARGETS}:local", "-o", path), f"{TARGETS}:Asks, called in module <root>", "exporter.register(obj, name)")
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
        (
            "no_such_package.mod:f",
            ["cannot import no_such_package.mod: there is no no_such_package in ", "among the packages that are installed"],
        ),
        (
            "tests.exporter.commands.cli_target:pair",
            ["there is no cli_target in the package tests.exporter.commands: did you mean cli_targets?"],
        ),
        (f"{TARGETS}:nothing", [f"{TARGETS} has no nothing"]),
        (f"{TARGETS}:pears", [f"{TARGETS} has no pears: did you mean pair?"]),
        ("mypkg/ops.py:factory", ["write mypkg.ops:factory"]),
        ("./mypkg/ops.py", ["write mypkg.ops:NAME, where NAME is a function of that file"]),
        ("model.onnx", ["it looks like a file, and a TARGET is the function that makes the model"]),
        (f"{TARGETS}:NO_FUNCTION", ["it is no function, but of type int"]),
        (TARGETS, ["not of the form package.module:name", f"which name of it? {TARGETS}:NAME"]),
        ("a b:c", ["not of the form package.module:name"]),
        (f"{TARGETS}:raises", ["it raised RuntimeError: no model today"]),
        (f"{TARGETS}:leaves", ["it raised SystemExit"]),
        (f"{TARGETS}:wrong", ["it returned something of type int"]),
        (f"{TARGETS}:wrong_pair", ["it returned something of type Case of str, not (torch.nn.Module, args)"]),
        (f"{TARGETS}:triple", ["it returned something of type tuple"]),
        (f"{TARGETS}:crash", ["boom in forward", "at cli_targets.py:"]),
    ],
)
def test_bad_targets(run, path, target, texts):
    fails(run("export", target, "-o", path), *texts)
    assert list(path.parent.iterdir()) == []


def test_what_a_target_imports_may_be_missing(run, path, tmp_path, monkeypatch):
    """Then the TARGET is well, and the package that it needs is the news."""
    (tmp_path / "needy.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    fails(
        run("export", "needy:factory", "-o", path),
        "cannot import needy: ModuleNotFoundError: No module named 'no_such_package_at_all'",
        "--traceback",
    )


@pytest.mark.parametrize("command", [("export", "-o", "a.onnx"), ("verify",)], ids=lambda words: words[0])
def test_inputs_that_do_not_fit_are_one_message(tmp_path, command):
    """torch logs what it raises, with its tracebacks: once a level, 30 lines before ours."""
    given = (command[0], f"{TARGETS}:Linear", "--input", "x=float32[2,5]", *command[1:])
    done = python("-m", "exporter.cli", *given, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2 and done.stdout == ""
    assert "torch/" not in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr
    assert "RuntimeError: " in done.stderr


def test_a_file_that_may_not_run_its_functions_names_the_option(run, path):
    assert run("export", f"{TARGETS}:pair", "-o", path).exit_code == 0
    fails(run("run", path), "which is not allowed: pass allow=", f"here: --allow '{SCALE}'")
    fails(run("profile", path), f"here: --allow '{SCALE}'")
    fails(run("run", path, "--allow", "tests:*"), "which is not allowed by 'tests:*'")
    assert run("run", path, "--allow", SCALE).exit_code == 0


@pytest.mark.parametrize(
    "command", [("gradient", "-o", "g.onnx"), ("inspect",), ("run",), ("tangent", "-o", "t.onnx")], ids=lambda words: words[0]
)
def test_a_target_where_a_file_is_wanted(run, command):
    result = run(command[0], f"{TARGETS}:pair", *command[1:])
    fails(result, f"{command[0]} takes a file, and this looks like a TARGET: pythonop export {TARGETS}:pair -o model.onnx writes its file")


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
    assert set(COMMANDS) >= {"export", "gradient", "inspect", "run", "tangent"}
    said = " ".join(run("--help").stdout.split())
    for name, sentence in COMMANDS.items():
        assert main.get_command(None, name).get_short_help_str(200) == sentence
        assert f" {name} {sentence}" in said
    assert run("--version").stdout.strip().endswith(exporter.__version__)


@pytest.mark.slow
def test_the_current_folder_can_be_imported_from(tmp_path):
    (tmp_path / "mine.py").write_text("from tests.exporter.commands.cli_targets import pair\n")
    code = "from exporter.cli import main; main()"
    done = python("-P", "-c", code, "export", "mine:pair", "-o", "out.onnx", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"] == 2
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.onnx"]


# -------------------------------------------------------------------------------------------------------- the exit codes


def test_ctrl_c_is_no_answer(run, path, monkeypatch):
    """1 means that something differs."""

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("exporter.commands.shared._named", interrupted)
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
    # A shell starts what is in the background with SIGINT ignored, and all below it inherit that.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeding
    )
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
