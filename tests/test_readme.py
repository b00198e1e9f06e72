"""The README and the pages of docs/, run as they stand there: top to bottom, each page in a folder of its own.

Python blocks share their names, but for one that is said to be in another process: that is one. A block that begins with ``# package/module.py`` is that file.
In blocks of ``sh``, lines of `pythonop` are run; what installs or tests is looked up where it is made.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporter.cli import main
from exporter.files import trust
from exporter.pictures import layout
from tests.processes import ROOT, python

#: Pages that tests of their own run.
ELSEWHERE = {
    "docs/command-line.md": "tests/test_command_line_doc.py",
    "docs/derivatives.md": "tests/test_derivatives_doc.py",
    "docs/integrations.md": "tests/end_to_end/integrations/page.py",
    "docs/translations.md": "tests/test_translations.py",
    "docs/format.md": "tests/symbolics/node/test_linked.py",
}

#: What a page takes as given.
GIVEN = {
    "README.md": """
import onnx
for name in ("before.onnx", "after.onnx"):
    onnx.save(onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 4] y) { y = Neg(x) }'), name)
""",
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
    def forward(self, x):
        return Halve.apply(x)
''')
importlib.invalidate_caches()
from mypkg.ops import Model
model, x = Model(), torch.randn(8, 4)
""",
    "docs/training.md": """
import numpy as np, torch, exporter
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.linear(x)
model, x, y = Model(), torch.randn(8, 4), torch.randint(3, (8,))
batches = [(np.random.randn(8, 4).astype(np.float32), np.random.randint(3, size=8)) for _ in range(3)]
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

#: package.module:factory of the lines that name no other.
FACTORY = """
import torch, exporter

def factory():
    return exporter.Case(torch.nn.Linear(4, 3), (torch.randn(8, 4),), targets=(torch.randint(3, (8,)),), loss=torch.nn.functional.cross_entropy)
"""

BLOCK = re.compile(r"(?P<before>[^\n]*)\n+(?:<!--[^\n]*-->\n)?```(?P<language>python|sh)\n(?P<code>.*?)```", re.S)


def pages():
    found = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    return [page for page in found if page not in ELSEWHERE and BLOCK.search((ROOT / page).read_text())]


def shell(line: str, folder: Path) -> None:
    """A line of a console."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["pythonop"]:
        result = CliRunner().invoke(main, words[1:])
        if words[1] == "draw" and layout.missing() is not None:
            assert (result.exit_code, result.stderr.strip()) == (2, f"error: {layout.missing()}"), line
        else:
            assert result.exit_code == (1 if words[1] == "diff" else 0), (line, result.output)
    elif words[:1] == ["make"]:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"\[([\w,]+)\]", line.partition("#")[0])
        assert set(",".join(extras).split(",")) <= set(project["optional-dependencies"]), line
        assert all(
            f'"Programming Language :: Python :: {version}"' in (ROOT / "pyproject.toml").read_text()
            for version in re.findall(r"3\.1\d", line)
        )
    elif "_PYTHONOP_COMPLETE=" in line:
        variable, _, value = words[0].partition("=")
        done = python("-c", "from exporter.cli import main; main(prog_name='pythonop')", cwd=folder, **{variable: value})
        assert "pythonop" in done.stdout and "_PYTHONOP_COMPLETE=bash_complete" in done.stdout, done.stderr
    else:
        assert words[:1] == ["echo"] or words[:2] == ["npm", "install"], f"nobody runs {line!r}"


@pytest.fixture
def _modules():
    """What a page imports of its own folder is another module on the next page."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mypkg", "package"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize("page", pages())
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trust, "_objects", dict(trust._objects))
    monkeypatch.setattr(trust, "_names", dict(trust._names))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(FACTORY)
    names: dict[str, object] = {"__name__": "__page__"}
    exec(GIVEN.get(page, ""), names)
    count = 0
    for block in BLOCK.finditer((ROOT / page).read_text()):
        code, count = block["code"], count + 1
        file = re.match(r"# ((?:\w+/)*\w+\.py)\n", code)
        if block["language"] == "sh":
            for line in code.splitlines():
                shell(line, tmp_path)
        elif file is not None:
            (tmp_path / file[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file[1]).write_text(code)
        elif "another process" in block["before"]:
            done = python("-c", code, cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))))
            assert done.returncode == 0, (code, done.stderr)
        else:
            exec(compile(code, f"{page}, block {count}", "exec"), names)
    assert count


def test_no_page_is_forgotten():
    assert "README.md" in pages()
    for page, test in ELSEWHERE.items():
        assert BLOCK.search((ROOT / page).read_text())
        assert Path(page).name in (ROOT / test).read_text()
