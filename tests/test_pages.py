"""The README and the pages of docs/, read top to bottom by somebody who has nothing but the page: `make pages`.

Each page runs in a folder outside the clone, in an environment in which pythonop was installed from the clone, not the sources of this
folder. A page whose first block installs it there begins with an environment that has torch alone, which is large: it is that of the
Python that runs the tests. All else comes by pip, under constraints.txt, or, with PYTHONOP_PAGES=newest, the newest that pip finds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import pages
from tests.processes import ROOT

pytestmark = [pytest.mark.pages, pytest.mark.slow, pytest.mark.timeout(1500)]

#: Pages that tests of their own run.
ELSEWHERE = {
    "docs/derivatives.md": "tests/test_derivatives_doc.py",
    "docs/integrations.md": "tests/end_to_end/integrations/page.py",
    "docs/translations.md": "tests/test_translations.py",
    "docs/format.md": "tests/symbolics/node/test_format_doc.py",
}

#: Excerpts, and what they take as given; no page that somebody reads first is among them.
GIVEN = {
    "docs/index.md": """
import importlib, pathlib, torch, exporter
pathlib.Path("mypkg").mkdir()
pathlib.Path("mypkg", "ops.py").write_text('''
import torch
class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2
    @staticmethod
    def backward(ctx, grad):
        return grad / 2
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
    def forward(self, x):
        return Halve.apply(self.linear(x))
''')
importlib.invalidate_caches()
from mypkg.ops import Model
model, x = Model(), torch.randn(8, 4)
""",
    "docs/foreign-models.md": """
import numpy as np, onnx, torch
made = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, body)  y = MatMul(h, head) }')
for name, shape, rename in (("body", (4, 5), "body"), ("head", (5, 3), "head.weight")):
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.random.randn(*shape).astype(np.float32), rename))
made.graph.node[1].input[1] = "head.weight"
onnx.save(made, "model.onnx")
batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
""",
}

#: What no new terminal has: threads, settings of ours, the environment of the tests.
OURS = re.compile(
    r"PYTHON|VIRTUAL_ENV|PYTEST|COLUMNS|LINES|MAKE|MFLAGS|TOKENIZERS_|(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|VECLIB)_|\w+_NUM_THREADS"
)


def with_code() -> list[str]:
    """Every page that has blocks to run."""
    found = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    return [page for page in found if page not in ELSEWHERE and any(block.language not in pages.SHOWN for block in pages.blocks(page))]


def to_run(page: str) -> list[pages.Block]:
    return [block for block in pages.blocks(page) if block.language not in pages.SHOWN and block.note("not run") is None]


def installs(page: str) -> bool:
    """Whether a block of it runs in a clone, and so in an environment of its own."""
    return any(block.note("in a clone") is not None for block in to_run(page))


# ------------------------------------------------------------------------------------------- a machine with nothing on it


def closure(name: str) -> dict[str, metadata.Distribution]:
    """A distribution and all that it wants, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    seen, wanted = set(), [(name, "")]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) not in seen:
            seen.add((name, extra))
            found[name] = metadata.distribution(name)
            asked = [Requirement(text) for text in found[name].requires or ()]
            asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]
            wanted += [(canonicalize_name(each.name), option) for each in asked for option in ("", *each.extras)]
    return found


def link_torch(folder: Path) -> None:
    """A folder that has torch, and what torch wants, from the environment of the tests."""
    folder.mkdir()
    for distribution in closure("torch").values():
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


class Machine:
    """What a page begins with: a folder, a clone, environments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        link_torch(folder / "torch")

    def variables(self, environment: Path) -> dict[str, str]:
        """Those of a new terminal in which the environment was activated."""
        kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        places = [place for place in kept["PATH"].split(os.pathsep) if Path(place) != Path(sys.executable).parent]
        kept.update(VIRTUAL_ENV=str(environment), PATH=os.pathsep.join([str(environment / "bin"), *places]), COLUMNS="100")
        kept.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        kept.setdefault("npm_config_cache", str(Path.home() / ".npm"))
        if os.environ.get("PYTHONOP_PAGES") == "newest":
            kept.update(PIP_UPGRADE="1", PIP_UPGRADE_STRATEGY="eager")
        else:
            kept.update(PIP_CONSTRAINT=str(self.folder / "constraints.txt"))
            pins = (ROOT / "constraints.txt").read_text()
            (self.folder / "constraints.txt").write_text(re.sub(r"(?m)^torch==.*\n", "", pins))
        return {**kept, "HOME": str(self.folder / "home")}

    def environment(self, folder: Path) -> Path:
        """A new one, with torch."""
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(purelib, "torch-of-the-tests.pth").write_text(f"{self.folder / 'torch'}\n")
        return folder

    def clone(self, folder: Path) -> Path:
        """What a clone would have, if what git does not ignore were committed."""
        if not folder.exists():
            listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
            for name in filter(None, listed.stdout.split("\0")):
                if (ROOT / name).is_file():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / name)
        return folder

    def install(self, environment: Path, clone: Path) -> None:
        """pythonop, as the README says."""
        command = [environment / "bin" / "python", "-m", "pip", "install", "-q", ".[run]"]
        done = subprocess.run(command, cwd=clone, env=self.variables(environment), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def installed(machine: Machine) -> Path:
    """The environment of pages that say nothing of installing."""
    environment = machine.environment(machine.folder / "environment")
    machine.install(environment, machine.clone(machine.folder / "pythonop"))
    return environment


@pytest.fixture
def reader(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Iterator[Callable[[str], pages.Reader]]:
    opened = []

    def make(page: str) -> pages.Reader:
        if installs(page):
            environment = machine.environment(tmp_path / "environment")
            if to_run(page)[0].note("in a clone") is None:
                machine.install(environment, machine.clone(tmp_path / "pythonop"))
        else:
            environment = request.getfixturevalue("installed")
        (tmp_path / "work").mkdir()
        opened.append(pages.Reader(tmp_path / "work", machine.variables(environment), lambda: machine.clone(tmp_path / "pythonop")))
        return opened[0].__enter__()

    yield make
    for each in opened:
        each.__exit__()
    for large in ("environment", "work/node_modules"):
        shutil.rmtree(tmp_path / large, ignore_errors=True)


def versions(reader: pages.Reader) -> str:
    """What the page ran on."""
    done = subprocess.run(
        ["bash", "-c", "python -m pip list --format=freeze"], env=reader.environment, capture_output=True, text=True, check=True
    )
    found = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    return ", ".join(f"{name} {found.get(name)}" for name in ("torch", "onnxruntime", "onnx", "onnxscript", "numpy"))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if installs(page) else pytest.mark.xdist_group("installed")) for page in with_code()]
)
def test_a_page_runs_from_top_to_bottom(page, reader, record_property):
    outcome = pages.Outcome(page)
    somebody = reader(page)
    given = [pages.Block(page, 0, "", "python", GIVEN[page], "", ())] if page in GIVEN else []
    for block in given:
        somebody.do(block)
    try:
        pages.read(somebody, pages.blocks(page), outcome)
    finally:
        record_property("page", [str(outcome), outcome.run, len(outcome.left), versions(somebody)])
    assert outcome.run


def test_no_page_is_forgotten():
    assert "README.md" in with_code()
    for page, test in ELSEWHERE.items():
        assert pages.code(page)
        assert Path(page).name in (ROOT / test).read_text()
