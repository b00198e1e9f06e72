"""docs/first-model.ipynb: its cells run, top to bottom, and show what it has stored. ``python -m tests.test_notebook`` stores it anew.

Cells run by exec, as the tutorial's blocks do: no Jupyter is needed. Numbers are left out of what is compared: times and roundings differ.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import os
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT

PATH = ROOT / "docs" / "first-model.ipynb"


def _cells():
    return json.loads(PATH.read_text())["cells"]


def _source(cell):
    return "".join(cell["source"])


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What a cell shows: what it prints, and the value of its last expression, as nbformat has them."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = [value._repr_html_()]
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


def _executed(folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, run in a folder that is imported from, as a kernel does."""
    before, module = Path.cwd(), types.ModuleType("notebook")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        torch.manual_seed(0)
        code = [_source(cell) for cell in _cells() if cell["cell_type"] == "code"]
        return [_outputs(source, vars(module), number) for number, source in enumerate(code, 1)]
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        sys.modules.pop("swish", None)


def _words(output: dict[str, Any]) -> dict[str, list[str]]:
    """The words of each form of an output, without numbers and units; sorted, for rows stand by their error."""
    forms = output.get("data", {"text": output.get("text")})
    plain = {kind: html.unescape(re.sub(r"<[^>]+>", " ", "".join(text))) for kind, text in forms.items()}
    units = {"e", "s", "ms", "µs", "cpu"}
    return {kind: sorted(set(re.findall(r"[^\W\d][\w.]*", text)) - units) for kind, text in plain.items()}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _executed(tmp_path_factory.mktemp("notebook"))


def test_the_cells_show_what_the_notebook_has(shown):
    stored = [cell["outputs"] for cell in _cells() if cell["cell_type"] == "code"]
    assert [[_words(output) for output in outputs] for outputs in shown] == [[_words(output) for output in outputs] for outputs in stored]


def test_each_kind_of_thing_shows_itself_as_a_table(shown):
    tables = [output for outputs in shown for output in outputs if "text/html" in output.get("data", {})]
    assert [output["data"]["text/plain"][0].partition("(")[0] for output in tables] == ["Program", "Report", "OnnxModule", "TrainingStep"]
    assert all("<table" in output["data"]["text/html"][0] for output in tables)


def test_it_is_a_notebook_of_version_4_5():
    notebook = json.loads(PATH.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]) for cell in notebook["cells"])
    text = PATH.read_text()
    assert str(ROOT) not in text
    assert tempfile.gettempdir() not in text


def main() -> None:
    """Store the outputs anew."""
    notebook = json.loads(PATH.read_text())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _executed(Path(folder))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, found, strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, number
    PATH.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
