"""The code of a page in Markdown, and a reader who runs it from top to bottom: the one engine for blocks of pages.

What the page says to people decides how a block runs:

- ``sh`` is typed into one terminal: what a block sets (folder, variables) the next block finds. A line that fails fails the page.
- ``python`` is typed into one interpreter, as the cells of a notebook are. Where the paragraph before says "another process", the
  block has an interpreter of its own, and the first one goes on after it.
- A block whose first line is a comment with a path (``# mypkg/ops.py``, ``// train.mjs``) is that file; a later block runs it.
- ``text`` after such a block, in the same section, is what it prints (stdout, 100 columns); ``...`` stands for anything.

What only the page's source says stands in an HTML comment on a line of its own before the block:

- ``not run: REASON``: it is counted, and the reason is printed.
- ``needs: npm``: it is not run where there is no such program.
- ``in a clone``: it is run there; all else runs outside, in ``work`` beside the clone, which is called ``pythonop``.
- ``exit 1: pythonop diff``: the lines that begin so, and no others, have this exit code.
- ``not compared: REASON``, before ``text``: it differs from run to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import ROOT

__all__ = ["Block", "Failed", "Outcome", "Reader", "blocks", "code", "read", "same"]

LIMIT = 600  # seconds of a block

#: Languages of blocks that are there to be read.
SHOWN = ("", "text", "error", "json")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its code, and what is said right before it."""

    page: str
    line: int
    section: str  # the heading of level two above it
    language: str
    code: str
    before: str  # the paragraph
    notes: tuple[str, ...]  # HTML comments

    def note(self, name: str) -> str | None:
        """The text of a comment ``name: text``, or ``name`` alone, before the block."""
        return next((rest.strip() for start, _, rest in (note.partition(":") for note in self.notes) if start == name), None)

    @property
    def file(self) -> str | None:
        """The path that the first line names."""
        found = re.match(r"(?:#|//) ((?:[\w-]+/)*[\w-]+\.\w+)\n", self.code)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Every fenced block of a page, by its path in the repository."""
    found, before, notes, inside = list[Block](), list[str](), list[str](), list[str]()
    section, language, start, ended = "", None, 0, True
    for number, line in enumerate(((ROOT / page).read_text() if text is None else text).splitlines(), 1):
        if language is not None:
            if line.startswith("```"):
                code = "".join(f"{each}\n" for each in inside)
                found.append(Block(page, start, section, language, code, " ".join(before), tuple(notes)))
                language, inside, notes = None, [], []
            else:
                inside.append(line)
        elif fence := re.match(r"```\s*(\w*)", line):
            language, start = fence[1], number
        elif comment := re.fullmatch(r"<!--\s*(.*?)\s*-->", line.strip()):
            notes.append(comment[1])
        elif line.strip():
            if heading := re.match(r"## +(.*)", line):
                section = heading[1].strip()
            before, notes, ended = [line] if ended else [*before, line], [], False
        else:
            ended = True
    return found


def code(page: str, language: str = "python", section: str | None = None) -> list[str]:
    """The code of the blocks of one language, of one section or of all."""
    return [block.code for block in blocks(page) if block.language == language and section in (None, block.section)]


# ------------------------------------------------------------------------------------------------------------ the reader

#: Runs each block that comes by stdin in __main__, and answers on a pipe how it ended. Sources are known, as those of cells are.
INTERPRETER = """
def serve(answers):
    import json, linecache, sys, traceback, types
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for line in sys.stdin:
        name, code = json.loads(line)
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        try:
            exec(compile(code, name, "exec"), main.__dict__)
            answer = "done"
        except BaseException:
            traceback.print_exc()
            answer = "failed"
        sys.stdout.flush()
        sys.stderr.flush()
        print(answer, file=answers, flush=True)
import os, sys
serve(os.fdopen(int(sys.argv.pop()), "w"))
"""

#: Around a block of sh: what the terminal knows, where it stands, and each line that fails.
TERMINAL = """. {state}/known
cd {folder}
trap 'pwd > {state}/folder; {{ export -p; declare -f; }} > {state}/known' EXIT
trap 'printf "%s\\t%s\\0" $? "$BASH_COMMAND" >> {state}/failed' ERR
"""


class Failed(AssertionError):
    """A block did not do what the page says."""


class Reader:
    """Somebody with a terminal, an editor and an interpreter.

    Args:
        folder: Where blocks run.
        environment: All variables of the terminal.
        clone: Makes the clone, once a block runs there.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], clone: Callable[[], Path]) -> None:
        self.folder, self.environment, self._clone = folder, dict(environment), clone
        self._state = folder.with_name(folder.name + ".terminal")
        self._state.mkdir()
        (self._state / "known").write_text("")
        self._python: Interpreter | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.close()

    def do(self, block: Block) -> str:
        """Do what the page says, and give what it prints; `Failed` says what went wrong."""
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
            return ""
        if block.language == "sh":
            return self._shell(block)
        if block.language != "python":
            raise Failed(f"{block}: nobody runs this language: begin the block with the path of a file, or say <!-- not run: why -->")
        if "another process" in block.before:
            python = Interpreter(self.folder, self._variables(), self._state)
            try:
                return python.do(block)
            finally:
                python.close()
        if self._python is None:
            self._python = Interpreter(self.folder, self._variables(), self._state)
        return self._python.do(block)

    def _variables(self) -> dict[str, str]:
        """Those that the terminal exports by now."""
        script = f". {self._state}/known; env -0"
        done = subprocess.run(["bash", "--norc", "-c", script], env=self.environment, capture_output=True, text=True, check=True)
        return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if "=" in pair)

    def _shell(self, block: Block) -> str:
        inside = block.note("in a clone") is not None
        folder = self._clone() if inside else self.folder
        failed = self._state / "failed"
        failed.write_text("")
        script = TERMINAL.format(state=shlex.quote(str(self._state)), folder=shlex.quote(str(folder))) + block.code
        files = [self._state / "out", self._state / "err"]
        with files[0].open("w") as out, files[1].open("w") as err:
            command = ["bash", "--noprofile", "--norc", "-c", script]
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise Failed(f"{block}: not done in {LIMIT} s") from None
            finally:
                _end(process)
        wanted = [note for note in block.notes if note.startswith("exit ")]
        wrong, ended = [], "0"
        for line in failed.read_text().split("\0")[:-1]:
            status, _, command = line.partition("\t")
            met = [note for note in wanted if f"exit {status}: {command}".startswith(note)]
            wanted = [note for note in wanted if note not in met]
            wrong += [] if met else [f"exit code {status} of: {command}"]
            ended = status
        if process.returncode and str(process.returncode) != ended:
            wrong.append(f"exit code {process.returncode} of the terminal: it cannot read the block, or was ended")
        if wrong or wanted:
            raise Failed("\n".join([f"{block}:", *wrong, *(f"never came: {note}" for note in wanted), *(_tail(file) for file in files)]))
        if not inside:
            self.folder = Path((self._state / "folder").read_text().rstrip("\n"))
        return files[0].read_text()


class Interpreter:
    """A Python that the terminal finds by its name."""

    def __init__(self, folder: Path, environment: Mapping[str, str], state: Path) -> None:
        python = shutil.which("python", path=environment["PATH"])
        assert python is not None
        reading, writing = os.pipe()
        self._files = [state / "python.out", state / "python.err"]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self._process = subprocess.Popen(
                [python, "-c", INTERPRETER, str(writing)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self._count = 0

    def do(self, block: Block) -> str:
        """Run a block; what it prints."""
        before = self._files[0].stat().st_size
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([f"{block.page}:{block.line}", block.code]) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], LIMIT)
        answer = self._answers.readline().strip() if ready else f"not done in {LIMIT} s"
        if answer != "done":
            raise Failed("\n".join([f"{block}: {answer or 'the interpreter ended'}", *(_tail(file) for file in self._files)]))
        with self._files[0].open() as out:
            out.seek(before)
            return out.read()

    def close(self) -> None:
        """End it, and what it began."""
        _end(self._process)
        self._answers.close()


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group of its own, and all of that group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-4000:]


# -------------------------------------------------------------------------------------------------------------- a page


@dataclass
class Outcome:
    """What became of a page's blocks."""

    page: str
    run: int = 0
    compared: int = 0
    left: list[str] = field(default_factory=list)  # what was not run, or not compared, and why
    seconds: float = 0.0

    def __str__(self) -> str:
        line = f"{self.page}: {self.run} blocks run, {self.compared} of them compared with what the page shows, {self.seconds:.0f} s"
        return "\n    ".join([line, *self.left])


def same(shown: str, printed: str) -> bool:
    """Whether this was printed: ends of lines do not count, ``...`` stands for anything."""

    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())

    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", lines(shown)))
    return re.fullmatch(pattern, lines(printed), re.S) is not None


def read(reader: Reader, page: list[Block], outcome: Outcome) -> None:
    """Do all that a page says, top to bottom; ``outcome`` is written as it goes."""
    begin = time.perf_counter()
    last: tuple[Block, str] | None = None
    try:
        for block in page:
            if block.language == "text" and last is not None and last[0].section == block.section:
                reason = block.note("not compared")
                if reason is not None:
                    outcome.left.append(f"not compared, line {block.line}: {reason}")
                elif not same(block.code, last[1]):
                    raise Failed(f"{block}: the page shows\n{block.code}\nand {last[0]} printed\n{last[1]}")
                else:
                    outcome.compared += 1
                last = None
                continue
            if block.language in SHOWN and block.file is None:
                continue
            reason = block.note("not run")
            program = block.note("needs")
            if reason is None and program and shutil.which(program) is None:
                reason = f"needs {program}"
            last = None
            if reason is not None:
                outcome.left.append(f"not run, line {block.line}: {reason}")
                continue
            last = block, reader.do(block)
            outcome.run += 1
    finally:
        outcome.seconds = time.perf_counter() - begin
