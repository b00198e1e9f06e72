"""Every command with good input and with what people and files get wrong: the exit code, a message of at most six lines with a way out, and no trace in
the folder.

A command without a row in `COMMANDS` fails here by its name. The row says how it is called well; each of `KINDS` that applies to it is tried, but for
those that the row names as no fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from tests.exporter.commands import cli_targets
from tests.fuzz.corpus import CORPUS
from tests.processes import ROOT
from tests.support import missing

TARGETS = cli_targets.__name__
TARGET = f"{TARGETS}:trainable"
ALLOW = f"{TARGETS}:*"


@dataclasses.dataclass
class Command:
    """How a command is called well.

    Attributes:
        line: What comes behind its name; ``IN`` is a good file, ``OUT`` a place for a new one.
        answers: A key of its JSON.
        option: An option of it, and a value that it does not take.
        says: What it says of that.
        target: Whether its first argument is a TARGET.
        output: The name of what it writes.
        needs: A package that it cannot do without.
        model: The target of `cli_targets` whose file ``IN`` is.
        no_fault: Those of `KINDS` that it does not look at: data of another folder, where it reads no data.
    """

    line: str
    answers: str
    option: tuple[str, str] = ("--no-such-option", "1")
    says: tuple[str, ...] = ("No such option '--no-such-option'", "--help")
    target: bool = False
    output: str = "out.onnx"
    needs: str = ""
    model: str = "pair"
    no_fault: tuple[str, ...] = ()

    @property
    def reads(self) -> bool:
        return "IN" in self.line

    @property
    def writes(self) -> bool:
        return "OUT" in self.line

    @property
    def runs(self) -> bool:
        return "--allow" in self.line


COMMANDS = {
    "export": Command(f"{TARGET} -o OUT", "calls", ("--schema", "ort-9"), ("'ort-9' is not one of", "'ort-1.15'"), target=True),
    "step": Command(f"{TARGET} -o OUT", "carried", ("--optimizer", "magic"), ("'magic' is not one of", "'adamw'"), target=True),
    "verify": Command(f"{TARGET} --html OUT", "max_error", ("--timeout", "soon"), ("'soon' is not a valid float",), target=True),
    "gradient": Command("IN -o OUT", "unreached", ("--wrt", "nobody"), ("'nobody'", "near it")),
    "tangent": Command("IN -o OUT", "unreached", ("--of", "nobody"), ("'nobody'", "near it: ['add_26']")),
    "quantize": Command("IN -o OUT", "products", model="rounded"),
    "trained": Command("art in.state -o OUT", "parameters"),
    "run": Command(f"IN -o OUT --allow {ALLOW}", "outputs", ("--times", "0"), ("0 is not in the range x>=1",)),
    "profile": Command(
        f"IN --html OUT --times 1 --allow {ALLOW}", "operators", ("--top", "0"), ("0 is not in the range x>=1",), output="out.html",
        no_fault=("output: a full disk",),
    ),
    "diff": Command("IN IN", "equal"),
    "draw": Command(
        "IN -o OUT", "bytes", ("--depth", "-1"), ("-1 is not in the range x>=0",), output="out.svg", needs="pygraphviz",
        no_fault=("file: moves the cursor", "file: data of another folder", "file: its data are gone"),
    ),
    "inspect": Command("IN", "operators", no_fault=("file: data of another folder", "file: its data are gone")),  # its answer is no: exit code 1
    "doctor": Command("IN", "allow", no_fault=("file: data of another folder", "file: its data are gone")),
}  # fmt: skip


@dataclasses.dataclass
class Kind:
    """One thing that is wrong.

    Attributes:
        applies: To which commands.
        change: (command, its name, folder) -> what is called, after it has made the folder wrong.
        says: What the message says; the last is the way out. None: what the command's row says.
    """

    applies: Callable[[Command], bool]
    change: Callable[[Command, str, Path], str]
    says: tuple[str, ...] | None
    around: Callable[[Path], contextlib.AbstractContextManager[object]] = lambda folder: contextlib.nullcontext()


def reads(command: Command) -> bool:
    return command.reads


def writes(command: Command) -> bool:
    return command.writes


def targets(command: Command) -> bool:
    return command.target


def anything(command: Command) -> bool:
    return True


def file_of(content: bytes | Callable[[bytes], bytes]) -> Callable[[Command, str, Path], str]:
    """The file that is read has this content."""

    def change(command: Command, name: str, folder: Path) -> str:
        path = folder / "bad.onnx"
        path.write_bytes(content if isinstance(content, bytes) else content((folder / "in.onnx").read_bytes()))
        return command.line.replace("IN", "bad.onnx")

    return change


def second(content: bytes) -> Callable[[Command, str, Path], str]:
    """So has the second of two."""
    return lambda command, name, folder: f"in.onnx {file_of(content)(command, name, folder).split()[0]}"


def unknown_operator(data: bytes) -> bytes:
    """A model with an operator that nobody has, of a long name."""
    model = onnx.load_from_string(data)
    model.graph.node[0].domain, model.graph.node[0].op_type = "nobody.has.it", "Nothing" * 99
    model.opset_import.add(domain="nobody.has.it", version=1)
    return model.SerializeToString()


def line(old: str, new: str) -> Callable[[Command, str, Path], str]:
    return lambda command, name, folder: command.line.replace(old, new)


def with_target(name: str) -> Callable[[Command, str, Path], str]:
    return line(TARGET, name if ":" in name else f"{TARGETS}:{name}")


def bad_option(command: Command, name: str, folder: Path) -> str:
    return f"{command.line} {shlex.join(command.option)}"


def locked(command: Command, name: str, folder: Path) -> str:
    (folder / "locked").mkdir(mode=0o555)
    return command.line.replace("OUT", "locked/OUT")


def occupied(command: Command, name: str, folder: Path) -> str:
    (folder / command.output).mkdir()
    return command.line


def data_gone(command: Command, name: str, folder: Path) -> str:
    """The tensors of ``IN`` are in a file that is not there."""
    model = onnx.load(folder / "in.onnx")
    onnx.save(model, folder / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    (folder / "in.data").unlink()
    return command.line


def unreadable(command: Command, name: str, folder: Path) -> str:
    (folder / "in.onnx").chmod(0o200)
    return command.line


def hostile(name: str) -> Callable[[Command, str, Path], str]:
    return file_of(CORPUS[name].case(0).model)


def inputs(**arrays: object) -> Callable[[Command, str, Path], str]:
    def change(command: Command, name: str, folder: Path) -> str:
        np.savez(folder / "x.npz", **arrays)
        return f"{command.line} --inputs x.npz"

    return change


@contextlib.contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """As a user who is not root: root may read and write everything."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, 65534, 65534)
    for path in folder.iterdir():
        os.chown(path, 65534, 65534)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@contextlib.contextmanager
def no_room(folder: Path) -> Iterator[None]:
    """A disk on which no file gets larger than 100 bytes: what is written says EFBIG where a full one says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def runs(command: Command) -> bool:
    return command.runs


def is_diff(command: Command) -> bool:
    return command is COMMANDS["diff"]


def is_profile(command: Command) -> bool:
    return command is COMMANDS["profile"]


def is_draw(command: Command) -> bool:
    return command is COMMANDS["draw"]


def is_trained(command: Command) -> bool:
    return command is COMMANDS["trained"]


def damaged_state(command: Command, name: str, folder: Path) -> str:
    (folder / "in.state").write_bytes((folder / "in.state").read_bytes()[:-1])
    return command.line


def damaged_step(command: Command, name: str, folder: Path) -> str:
    (folder / "art" / "training.onnx").write_bytes((folder / "in.onnx").read_bytes())
    return command.line


NO_MODEL = ("bad.onnx", "no ONNX model, or it is cut off")

KINDS = {
    "file: missing": Kind(reads, line("IN", "missing.onnx"), ("cannot read missing.onnx", "No such file")),
    "file: a folder": Kind(reads, line("IN", "."), ("cannot read .", "Is a directory")),
    "file: empty": Kind(reads, file_of(b""), NO_MODEL),
    "file: text": Kind(reads, file_of(b"hello world\n" * 9), NO_MODEL),
    "file: truncated": Kind(reads, file_of(lambda data: data[: len(data) // 2]), NO_MODEL),
    "file: a newer format": Kind(reads, hostile("pythonop.version '１'"), ("pythonop.version", "not a version number")),
    "file: moves the cursor": Kind(
        lambda c: reads(c) and not runs(c),
        hostile(r"pythonop.state '\x00\x1b[2J\u202e'"),
        ("pythonop.state", "the file is damaged"),
    ),
    "file: calls without end": Kind(reads, hostile("calls without end"), ("function", "call")),
    "file: names that are no text": Kind(reads, hostile(r"node b'\xff\xfe\xc0\x80'"), ("UTF-8", "the file is damaged")),
    "file: an endless number": Kind(reads, hostile("file: an endless varint"), NO_MODEL),
    "file: data of another folder": Kind(reads, hostile("external initializer at ../secret"), ("../secret", "below its own folder")),
    "file: its data are gone": Kind(reads, data_gone, ("in.data, which is not there", "keep it beside the model")),
    "file: nobody may read it": Kind(reads, unreadable, ("Path 'in.onnx' is not readable", "--help"), nobody),
    "output: no folder": Kind(writes, line("OUT", "no/OUT"), ("cannot write no/out.", "there is no folder no")),
    "output: a folder": Kind(writes, occupied, ("cannot write out.", "it is a folder")),
    "output: a device": Kind(writes, line("OUT", "/dev/full"), ("cannot write /dev/full", "not a file")),
    "output: nobody may write there": Kind(writes, locked, ("cannot write locked/out.", "no permission to write into locked"), nobody),
    "output: a full disk": Kind(writes, line("", ""), ("cannot write ", "File too large; nothing was written"), no_room),
    "output: the input": Kind(lambda c: c.reads and c.writes, line("OUT", "./in.onnx"), ("needed", "choose another output")),
    "output: not given": Kind(lambda c: c.writes and "-o" in c.line and not runs(c), line(" -o OUT", ""), ("-o",)),
    "option: of no such value": Kind(anything, bad_option, None),
    "option: -q and -v": Kind(anything, lambda c, name, folder: f"{c.line} -q -v", ("-q and -v contradict each other", "one of them")),
    "arguments: too many": Kind(anything, lambda c, name, folder: f"{c.line} more", ("unexpected extra argument", "--help")),
    "target: cannot be imported": Kind(
        targets,
        with_target("no_such_package.mod:f"),
        ("cannot import no_such_package.mod", "there is no no_such_package in", "nor among the packages"),
    ),
    "target: no such name": Kind(targets, with_target("nothing"), (f"{TARGETS} has no nothing",)),
    "target: not of the form": Kind(targets, line(TARGET, "model.py"), ("'model.py' is not of the form package.module:name",)),
    "target: raises": Kind(targets, with_target("raises"), ("it raised RuntimeError: no model today", "--traceback")),
    "target: leaves": Kind(targets, with_target("leaves"), ("it raised SystemExit", "--traceback")),
    "target: another type": Kind(targets, with_target("wrong"), ("of type int", "(torch.nn.Module, args) or an exporter.Case")),
    "target: no function": Kind(targets, with_target("NO_FUNCTION"), ("no function, but of type int",)),
    "target: no example arguments": Kind(
        targets, line(TARGET, "torch.nn:Identity"), ("without example arguments", "--input x=float32[2,3]")
    ),
    "target: its model raises": Kind(targets, with_target("crash"), ("boom in forward", "at cli_targets.py:")),
    "input: unreadable": Kind(targets, lambda c, n, f: f"{c.line} --input x=[2,3]", ("--input 'x=[2,3]'", "x=float32[2,3]")),
    "input: no such argument": Kind(
        targets, lambda c, n, f: f"{c.line} --input y=float32[4,3]", ("--input", "forward of Linear takes (input:")
    ),
    "input: of another shape": Kind(targets, lambda c, n, f: f"{c.line} --input float32[4,5]", ("the model", "way out:")),
    "dynamic: unreadable": Kind(targets, lambda c, n, f: f"{c.line} --dynamic batch", ("--dynamic 'batch'", "x:0=batch")),
    "dynamic: no such input": Kind(
        targets, lambda c, n, f: f"{c.line} --dynamic y:0=batch", ("there is no input y", "its inputs are input")
    ),
    "dynamic: no such axis": Kind(targets, lambda c, n, f: f"{c.line} --dynamic input:7=batch", ("has the shape [4, 3]", "no axis 7")),
    "inline: nothing": Kind(
        targets, lambda c, n, f: f"{c.line} --inline nosuch:*", ("inline='nosuch:*' means none", "it met none at all", "leave it out")
    ),
    "portable: nothing": Kind(
        targets,
        lambda c, n, f: f"{c.line} --portable-only nosuch:*",
        ("portable='nosuch:*' means none", "it met none at all", "leave it out"),
    ),
    "register: cannot be imported": Kind(
        lambda c: targets(c) or runs(c),
        lambda c, n, f: f"{c.line} --register nowhere:f",
        ("--register nowhere:f: cannot import", "there is no nowhere in"),
    ),
    "run: of another shape": Kind(runs, inputs(x=np.zeros((2, 5), np.float32)), ("x", "Got: 5 Expected: 3")),
    "run: of another type": Kind(runs, inputs(x=np.zeros((2, 3), np.float64)), ("x", "tensor(double)", "tensor(float)")),
    "run: no such input": Kind(runs, inputs(y=np.zeros((2, 3), np.float32)), ("the file has no input 'y'", "its inputs are x")),
    "run: inputs of Python": Kind(runs, inputs(x=np.array([object()])), ("cannot read the inputs in x.npz", "allow_pickle")),
    "run: not allowed": Kind(runs, line(f" --allow {ALLOW}", ""), (f"names {TARGETS}:Scale", f"pass allow=['{TARGETS}:Scale']")),
    "run: no such dimension": Kind(
        runs, lambda c, n, f: f"{c.line} --dim foo=3", ("has a dimension 'foo'", "its symbolic dimensions are batch")
    ),
    "run: an operator that nobody has": Kind(runs, file_of(unknown_operator), ("is not a registered function/op", "install a newer one")),
    "run: a dimension of no size": Kind(runs, lambda c, n, f: f"{c.line} --dim batch=many", ("'batch=many'", "NAME=SIZE")),
    "diff: no second file": Kind(is_diff, line("IN IN", "IN"), ("Missing argument 'B'", "--help")),
    "diff: three files": Kind(is_diff, line("IN IN", "IN IN IN"), ("unexpected extra argument", "--help")),
    "diff: the second is missing": Kind(is_diff, line("IN IN", "IN missing.onnx"), ("cannot read missing.onnx", "No such file")),
    "diff: the second is no model": Kind(is_diff, second(b"hello"), NO_MODEL),
    "profile: a full disk": Kind(is_profile, line("", ""), ("onnxruntime's profiler wrote cannot be read", "is the disk of"), no_room),
    "profile: times of no run": Kind(is_profile, line("--times 1", "--times 0"), ("0 is not in the range x>=1",)),
    "trained: no folder": Kind(is_trained, line("art", "nowhere"), ("'nowhere' does not exist", "--help")),
    "trained: no artifacts": Kind(is_trained, line("art", "."), ("cannot read training.onnx", "No such file")),
    "trained: no state": Kind(is_trained, line("in.state", "none"), ("'none' does not exist", "--help")),
    "trained: a state that is a model": Kind(
        is_trained, line("in.state", "in.onnx"), ("does not begin with the names of its values", "save() of a trainer")
    ),
    "trained: a state that is cut off": Kind(is_trained, damaged_state, ("cut off at", "save it anew")),
    "trained: averages that nobody kept": Kind(is_trained, line(" -o", " --ema -o"), ("keeps no average of weight", "ema=0.999")),
    "trained: no training step": Kind(is_trained, damaged_step, ("training.onnx is no training step", "--artifacts")),
    "trained: the output is the state": Kind(is_trained, line("OUT", "in.state"), ("in.state", "choose another output")),
    "draw: another kind of picture": Kind(is_draw, line("OUT", "out.png"), ("-o out.png", "pictures are .svg or .html")),
    "draw: no kind of picture": Kind(is_draw, line("OUT", "out"), ("-o out", "pictures are .svg or .html")),
}

ROWS = [
    (name, kind)
    for name, command in COMMANDS.items()
    for kind, row in KINDS.items()
    if row.applies(command) and kind not in command.no_fault
]


@functools.cache
def model(target: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        exporter.export(*getattr(cli_targets, target)(), dynamic_shapes=({0: "batch"},)).save(Path(folder, "model.onnx"))
        return Path(folder, "model.onnx").read_bytes()


@functools.cache
def _trained() -> dict[str, bytes]:
    """A folder of artifacts, and the state of its training."""
    batch = torch.randn(4, 3), torch.randn(4, 2)
    with tempfile.TemporaryDirectory() as folder:
        network = torch.nn.Linear(3, 2)
        step = exporter.export_training_step(network, batch[:1], loss=torch.nn.functional.mse_loss, targets=batch[1:])
        exporter.write_artifacts(step, exporter.export_evaluation(network, batch[:1]), Path(folder, "art"))
        exporter.Trainer.load(Path(folder, "art")).save(Path(folder, "in.state"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def training(folder: Path) -> None:
    """Put them into a folder."""
    (folder / "art").mkdir()
    for name, content in _trained().items():
        (folder / name).write_bytes(content)


@pytest.fixture
def folder(request, monkeypatch):
    """Where anybody may go, which pytest's own folders are not."""
    command = COMMANDS.get(getattr(request.node, "callspec", None) and request.node.callspec.params.get("name"))
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        Path(name, "in.onnx").write_bytes(model(command.model if command else "pair"))
        if command is COMMANDS["trained"]:
            training(Path(name))
        monkeypatch.chdir(name)
        yield Path(name)
        os.chdir("/")


def invoke(name: str, arguments: str):
    return CliRunner().invoke(main, [name, *shlex.split(arguments)])


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def there(command: Command) -> Command:
    """The command, where what it needs is installed."""
    if command.needs and importlib.util.find_spec(command.needs) is None:
        missing(command.needs, f"{command.needs} is not installed")
    return command


def test_every_command_has_rows():
    for name in main.list_commands(None):
        assert name in COMMANDS, f"pythonop {name} has no row in COMMANDS of {__name__}: say how it is called well"
    assert set(COMMANDS) <= set(main.list_commands(None))
    for name, command in COMMANDS.items():
        applicable = {kind for kind, row in KINDS.items() if row.applies(command)}
        assert set(command.no_fault) <= applicable, f"{name}: no_fault names what no row of KINDS says of it"


def test_enough_can_be_wrong():
    kinds = {name: sum(row == name for row, _ in ROWS) for name in COMMANDS}
    assert min(kinds[name] for name, command in COMMANDS.items() if command.reads or command.target) >= 13, kinds
    assert len(KINDS) >= 15


@pytest.mark.parametrize("name", COMMANDS)
def test_good_input(name, folder):
    command = there(COMMANDS[name])
    arguments = command.line.replace("IN", "in.onnx").replace("OUT", command.output)
    result = invoke(name, f"{arguments} --json")
    assert result.exit_code == 0, result.output
    assert command.answers in json.loads(result.stdout)
    assert result.stdout.endswith("}\n") and len(result.stdout.splitlines()) == 1, "a program reads one line"
    assert result.stderr == ""
    assert (command.output in os.listdir(folder)) is command.writes
    if name != "verify":  # which takes seconds, and prints by the same function
        assert invoke(name, f"{arguments} -q").output == ""


@pytest.mark.parametrize(("name", "kind"), ROWS, ids=lambda each: each)
def test_bad_input(name, kind, folder):
    row, command = KINDS[kind], there(COMMANDS[name])
    arguments = row.change(command, name, folder).replace("IN", "in.onnx").replace("OUT", command.output)
    before = contents(folder)
    with row.around(folder):
        result = invoke(name, arguments)
    assert result.exit_code == 2, f"pythonop {name} takes it (no_fault in its row of COMMANDS, where that is right):\n{result.output}"
    assert contents(folder) == before
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert 1 <= len(lines) <= 6
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 800
    for text in command.says if row.says is None else row.says:
        assert text in result.stderr


def test_an_answer_that_nobody_can_read(folder):
    """Standard output is a full disk: only a process has one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "exporter.cli", "inspect", "in.onnx"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=120,
        )
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) <= 6
