"""docs/command-line.md: its model, its commands, and what they print."""

from __future__ import annotations

import re

from exporter.pictures import layout
from tests.processes import ROOT, python

TEXT = (ROOT / "docs/command-line.md").read_text()


def test_the_commands_of_the_page(tmp_path):
    (model,) = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)
    shell = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", TEXT))
    printed = re.findall(r"(?ms)^```text\n(.*?)^```", TEXT)

    def run(*arguments):
        line = " ".join(arguments)
        assert f"pythonop {line}" in shell, "the page has this command"
        return python("-m", "exporter.cli", *(each.strip("'") for each in arguments), cwd=tmp_path, COLUMNS="100", PYTHONPATH=str(ROOT))

    (tmp_path / "mymodel.py").write_text(model)
    assert run("export", "mymodel:make", "-o", "before.onnx").returncode == 0
    assert run("gradient", "before.onnx", "-o", "training.onnx").returncode == 0
    (tmp_path / "mymodel.py").write_text(model.replace("0.5)", "0.25)"))
    done = python("-m", "exporter.cli", "export", "mymodel:make", "-o", "after.onnx", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    (tmp_path / "mymodel.py").write_text(model)
    done = run("diff", "before.onnx", "after.onnx")
    assert (done.returncode, done.stdout) == (1, printed[0]), done.stderr
    done = run("profile", "training.onnx", "--allow", "'mymodel:*'", "--top", "3", "--times", "200", "--html", "flame.html")
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"PythonOp(?:Grad)? Halve", printed[1])
    assert shown
    assert all(name in done.stdout for name in set(shown))
    assert (tmp_path / "flame.html").exists()
    for name, *options in (("training.svg", "--depth", "2"), ("training.html",)):
        done = run("draw", "training.onnx", "-o", name, *options)
        if layout.missing() is not None:
            assert (done.returncode, done.stderr) == (2, f"error: {layout.missing()}\n")
        else:
            assert (done.returncode, (tmp_path / name).exists()) == (0, True), done.stderr
