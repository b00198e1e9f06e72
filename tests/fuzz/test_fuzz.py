"""What `python -m tests.fuzz` finds of this tree, and that it finds what is planted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.fuzz import run
from tests.processes import ROOT, python

pytestmark = pytest.mark.slow


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "tests.fuzz", "--jobs", "1", *arguments, timeout=590)


@pytest.mark.parametrize("what", ["--corpus", "--honest", "--cases=500"])
def test_nothing_is_found(what):
    done = fuzz(what, "--seed", "7")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "0 kinds of findings" in done.stdout


# Stands in for a surface: each case is a fault of the product, one that kills the process among them.
PLANTED = """
import ctypes, importlib, os, signal, sys, tempfile, time
from pathlib import Path
from symbolics.errors import FormatError
from tests.fuzz import functions, run, surfaces
from tests.fuzz.mutate import Case
from tests.fuzz.seeds import CANARY

def crash(case): ctypes.string_at(0)
def vanishes(case): os.kill(os.getpid(), signal.SIGKILL)  # without a frame
def vanishes_once(case):
    if not once.exists():
        once.touch()
        vanishes(case)
def spin(case):
    while True: pass
def sleep(case): time.sleep(10**6)
def takes(case): bytearray(100 << 20)[::4096]
def reads(case): case.results.append((case.path.parents[1] / "secret").read_bytes())
def writes(case): (case.path.parents[1] / "more").write_text("x")
def leaves(case): case.path.with_name("more").write_text("x")
def changes(case): case.path.write_text("x")
def runs(case): functions.Bomb(1)
def imports(case): importlib.import_module("tests.fuzz.forbidden")
def starts(case): os.system("true")
def raises(case): raise KeyError("nothing of ours")
def stops(case): sys.exit(3)
class Raw(FormatError):  # an error of ours cleans its text
    def __str__(self): return self.raw
    def __init__(self, raw): self.raw = raw

def control(case): raise Raw("a\\x1b[2J")
def long(case): raise Raw("line\\n" * 9)
def honest(case): raise FormatError("the file is damaged")
def good(case): pass

once = Path(tempfile.mkdtemp(), "once")
plants = [crash, vanishes, vanishes_once, spin, sleep, takes, reads, writes, leaves, changes, runs, imports, starts, raises, stops, control, long, honest, good]
surfaces.SURFACES[1] = ("planted", lambda case: plants[int(case.path.read_bytes())](case))
run.HANGS = 10
run.SECONDS = 4
run.MEMORY = 64  # a full machine may hand out a GiB too slowly
found = {}
def tell(finding): found.setdefault(plants[finding.case].__name__, []).append(finding.kind)
summary = run.run_cases(range(len(plants)), lambda n: Case(n, "", [], str(n).encode()), lambda n: [1], 2, tell)
print({name: sorted(set(kinds)) for name, kinds in found.items()}, dict(summary.ends[1]), summary.cases)
"""


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("==9==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1\n    #0 0x2 in write_tensor native_tensors.h:80\n", "finding"),
        (
            "==9==ERROR: AddressSanitizer: allocator is out of memory trying to allocate 0x40000000 bytes\n    #1 0x2 in read native.c\n",
            "finding",
        ),
        (
            "==9==ERROR: AddressSanitizer: allocator is out of memory\n    #1 0x2 (/x/onnxruntime_pybind11_state.cpython.so+0x1)\n",
            "runtime",
        ),
        ("native_inputs.h:74:9: runtime error: null pointer passed as argument 2\n", "finding"),
        (None, "finding"),
    ],
)
@pytest.mark.parametrize("place", ["report.9", "said"])
def test_what_a_sanitizer_says(text, end, place, tmp_path, monkeypatch):
    monkeypatch.setenv("ASAN_OPTIONS", f"log_path={tmp_path}/report:halt_on_error=1")
    if text is not None:
        (tmp_path / place).write_text(text)
    found = run.of_sanitizer(9, tmp_path)
    assert found["end"] == end
    assert [problem["text"] for problem in found["problems"]] == (
        [] if end == "runtime" else ["a report that is not to be found" if text is None else text.splitlines()[0]]
    )


def test_what_is_planted_is_found():
    done = python("-c", PLANTED, timeout=120)
    assert done.returncode == 0, done.stderr
    found, ends, count = re.fullmatch(r"(\{.*?\}) (\{.*\}) (\d+)\n", done.stdout).groups()
    found = eval(found)
    assert found == {
        "crash": ["death"],
        "vanishes": ["death"],
        "spin": ["too slow"],
        "sleep": ["too slow"],
        "takes": ["memory"],
        "reads": ["outside", "read outside"],
        "writes": ["files", "outside"],
        "leaves": ["files"],
        "changes": ["files"],
        "runs": ["ran"],
        "imports": ["imported"],
        "starts": ["outside"],
        "raises": ["exception"],
        "stops": ["exception"],
        "control": ["message"],
        "long": ["message"],
    }
    assert eval(ends)["ours"] == 3
    assert int(count) == 19


def test_a_case_is_the_same_each_time():
    """Of one seed and number; the exporters' files vary with the process, the others do not."""
    code = (
        "import hashlib\nfrom tests.fuzz.mutate import make_case\nfrom tests.fuzz.seeds import _foreign, _nodes\n"
        "seeds = dict([*_foreign(), *_nodes()])\n"
        "print(hashlib.sha256(repr([make_case(seeds, 3, n) for n in range(200)]).encode()).hexdigest())\n"
        "print(hashlib.sha256(repr([make_case(seeds, 4, n) for n in range(200)]).encode()).hexdigest())"
    )
    first, second = python("-c", code, PYTHONHASHSEED="1").stdout.split(), python("-c", code, PYTHONHASHSEED="2").stdout.split()
    assert first == second
    assert first[0] != first[1]


def test_a_finding_is_told_and_kept(tmp_path):
    """With what reproduces it, its file, and exit code 1."""
    code = (
        "import sys\nfrom tests.fuzz import surfaces, __main__\n"
        "surfaces.SURFACES[1] = ('planted', lambda case: {}['no'])\n"
        f"sys.argv[1:] = ['--corpus', '--surface', '1', '--only', 'file: text', '--out', {str(tmp_path)!r}]\n"
        "sys.exit(__main__.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "FOUND exception at surface 1" in done.stdout
    assert "python -m tests.fuzz --seed 1 --only 'file: text' --surface 1" in done.stdout
    assert (tmp_path / "1-file-text" / "model.onnx").read_bytes() == b"hello"
