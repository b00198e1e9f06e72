"""docs/functions.md, made of the rows: ``python -m tests.end_to_end.functions.table`` runs them all and writes it."""

from __future__ import annotations

import itertools
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from tests.end_to_end.functions.check import ROWS, Cell, Row, check_row, shown as short
from tests.end_to_end.functions.worker import ENGINES, Worker
from tests.processes import ROOT

__all__ = ["DOCUMENT", "TORCH", "WORKING", "cells_of", "expected_of", "portable_summary", "share", "summary", "table_of"]

DOCUMENT = ROOT / "docs" / "functions.md"

WORKING = {"works", "warned"}  # one opaque node, equal, no action by the user
TORCH = {"torch"}  # set apart: torch's own exporter cannot trace it either

_HEAD = """\
# Functions

Here you find out whether a Function that is written like yours exports, runs and trains with pythonop, and what to do where it does not.

## Find your case

Each row is one way to write or to call a `torch.autograd.Function`, or an [operator](#operators) of torch.library or of a C++ extension. Look in
the section of what is special about yours:

| section | what its rows are about |
|---|---|
| [ctx API](#ctx-api) | what forward and backward do with `ctx` |
| [Arguments](#arguments) | what you pass to `apply` |
| [Outputs](#outputs) | what forward returns |
| [Backward](#backward) | what backward returns and does |
| [Calls](#calls) | how and where the Function is called |
| [Warnings](#warnings) | what pythonop warns of, and Functions that keep state |
| [Operators](#operators) | `torch.library` and C++ extensions |
| [Messages](#messages) | what pythonop or torch says for each row that does not simply work |

## How to read a row

**dynamo** and **TorchScript** are torch's exporters (`dynamo=True`, the default, and `dynamo=False`). **onnxruntime** and **reference** say
which of these ran the file, forward and backward: onnxruntime, and ONNX's reference implementation. The last two columns are of files exported
with [`portable=True`](portable.md): a row works there if the file has no node that calls Python, and runs forward and backward with an empty
`allow`.

| outcome | meaning |
|---|---|
| works | each call is one node, a PythonOp that calls your Function; forward and backward equal eager's; you have nothing to do |
| warned | the same, with a warning that names Function, module and way out |
| inlined | equal, but the Function's own operations are in the file instead of a node, and a notice says so |
| registered | equal after you call `exporter.register` in both processes; before that, an error that says so |
| refused | a clear error, and no file, or no run |
| opaque | of a portable file: the call stays a PythonOp, and a warning says why |
| torch | plain `torch.onnx.export` cannot export the model either; the message is torch's own |

Each row is a small model (`tests/end_to_end/functions/`). It is exported, saved, and opened in a fresh process, which builds the gradient graph.
Outputs and the gradients of all parameters and inputs are compared with eager PyTorch, twice in a row. No row is wrong.
`python -m tests.end_to_end.functions.table` runs all rows and writes this page.

**One thing to know of your backward.** In a file, the gradient that comes to it is dense and contiguous. In eager it may be a view (with the
strides of a transpose, or 0 of an expand). A backward whose result depends on `g.stride()` or `g.is_contiguous()` gives another result in a
file. `g.contiguous()` makes both the same.

## How many rows work
"""


def cells_of(cell: Cell) -> tuple[str, list[str]]:
    """A cell of an exporter's column, and those of the engines (empty where nothing ran)."""
    engines = ["equal" if engine in cell.engines else "" for engine in reversed(ENGINES)] if cell.engines else []
    return cell.outcome, engines


def expected_of(row: Row, dynamo: bool, portable: bool) -> str:
    """The outcome that rows.toml expects."""
    if portable and row.portable_since and TorchVersion(torch.__version__) >= row.portable_since:
        return "works"
    if portable:
        return row.dynamo_portable if dynamo else row.torchscript_portable
    return row.dynamo if dynamo else row.torchscript


def portable_summary(name: str, outcomes: Sequence[str]) -> str:
    """The document's line on portable files of one exporter."""
    return f"- **portable=True, {name}**: {Counter(outcomes)['works']} of {len(outcomes)} rows run without Python."


def share(outcomes: Sequence[str]) -> float:
    """The share of the rows that work, those that torch itself cannot trace left out."""
    traced = [outcome for outcome in outcomes if outcome not in TORCH]
    return sum(outcome in WORKING for outcome in traced) / len(traced)


def summary(name: str, outcomes: Sequence[str]) -> str:
    """The document's line on one exporter."""
    shown = ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).most_common())
    return f"- **{name}**: {len(outcomes)} rows: {shown}; {share(outcomes):.0%} of those that torch can trace work, some with a warning."


def table_of(text: str) -> dict[tuple[str, str], list[str]]:
    """(group, what) -> the cells of the document."""
    found: dict[tuple[str, str], list[str]] = {}
    group = ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:]
        cells = [cell.strip().replace("\\*", "*") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if group and len(cells) == 7 and cells[1] not in ("dynamo", "---"):
            found[group, cells[0]] = cells[1:]
    return found


def _document(cells: dict[tuple[str, bool, bool], Cell]) -> str:
    lines = [_HEAD]
    for dynamo in (True, False):
        lines.append(summary(f"dynamo={dynamo}", [cells[row.id, dynamo, False].outcome for row in ROWS]))
    for dynamo in (True, False):
        lines.append(portable_summary(f"dynamo={dynamo}", [cells[row.id, dynamo, True].outcome for row in ROWS]))
    meant = [row for row in ROWS if row.rule]
    lines += [
        "",
        f"All rows but {len(meant)} work with every exporter that can trace them. These {len(meant)} do something else on purpose, for these reasons:",
        "",
    ]
    for rule in dict.fromkeys(row.rule for row in meant):
        lines.append(f"- {rule}: {'; '.join(row.what for row in meant if row.rule == rule)}")
    messages: list[str] = []
    for group in dict.fromkeys(row.group for row in ROWS):
        lines += [
            "",
            f"## {group}",
            "",
            "| case | dynamo | TorchScript | onnxruntime | reference | portable: dynamo | TorchScript |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in (row for row in ROWS if row.group == group):
            both = [cells[row.id, dynamo, False] for dynamo in (True, False)]
            alone = [cells[row.id, dynamo, True] for dynamo in (True, False)]
            ran = next((cells_of(cell)[1] for cell in both if cell.engines), ["", ""])
            lines.append(
                "| "
                + " | ".join([row.what.replace("*", "\\*"), *[cell.outcome for cell in both], *ran, *[cell.outcome for cell in alone]])
                + " |"
            )
            opaque = next((cell for cell in alone if cell.outcome == "opaque"), None)
            for name, cell in zip(("dynamo", "TorchScript"), both, strict=True):
                if cell.outcome != "works":
                    messages.append(f"- **{row.what.replace('*', chr(92) + '*')}** ({name}, {cell.outcome}): {_code(short(cell.message))}")
            if opaque is not None:
                messages.append(f"- **{row.what.replace('*', chr(92) + '*')}** (portable, opaque): {_code(short(opaque.message))}")
    lines += ["", "## Messages", "", *messages, ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    return "`` " + text.replace("``", "''") + " ``"


def main() -> None:
    """Run every row and write the document."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder))
        cells: dict[tuple[str, bool, bool], Cell] = {}
        for row in ROWS:
            for dynamo, portable in itertools.product((True, False), (False, True)):
                cell = cells[row.id, dynamo, portable] = check_row(row.id, dynamo, worker, Path(folder), portable)
                expected = expected_of(row, dynamo, portable)
                if cell.outcome != expected:
                    print(
                        f"{row.id} ({'dynamo' if dynamo else 'torchscript'}{', portable' if portable else ''}): {cell.outcome}, expected {expected}: {short(cell.message)}",
                        flush=True,
                    )
        worker.close()
    DOCUMENT.write_text(_document(cells))


if __name__ == "__main__":
    main()
