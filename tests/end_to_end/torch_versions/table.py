"""``python -m tests.end_to_end.torch_versions.table``: run the functions and the models on this torch, keep what came out, and write docs/versions.md.

With ``--missing`` only what the record of this torch lacks.

Run it once in the environment of each torch (``make versions TORCH=2.15.0``): each leaves a record beside this file, and the
page is made of all of them.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from symbolics.capture.interception import is_method_of_c
from tests.end_to_end.functions.check import ROWS, check_row
from tests.end_to_end.functions.worker import Worker
from tests.end_to_end.models.table import EXPORTERS, NAMES, verified
from tests.processes import ROOT

__all__ = ["DOCUMENT", "RECORDS", "expected", "page", "records", "release"]

DOCUMENT = ROOT / "docs" / "versions.md"
RECORDS = Path(__file__).with_name("records")

_HEAD = """\
# Versions

Which torch the package was run on, and what of it works there. Each line is one run of the whole
[functions table](functions.md) and of all [models](models.md), on both exporters: exported, saved, opened in a fresh process,
outputs and every gradient compared with eager PyTorch of the same release. `make versions TORCH=2.15.0` runs them on a torch
and writes this page anew. A line of fewer rows is a run from before the others
were added; the last column is the onnxruntime of that run. `make test` holds the page against the table, and runs the functions and most models on what
`constraints.txt` pins: torch {torch}, onnxruntime {onnxruntime}. `make test-torch TORCH=2.15.0` runs the
tests of export, functions, models, loaded modules and verification on that torch, and `make pages TORCH=2.15.0` the blocks of the README and of these
pages on it, with the newest of all else that pip finds.

| torch | Python | exporter | `Function.apply` is | functions as in the table | models equal | onnxruntime |
|---|---|---|---|---|---|---|
"""

_TAIL = """\

A torch that is newer than these warns once, when a hook opens. One that calls Functions in another way than these is an
`ExportError` before anything is exported: each hook first calls a Function of its own, late and early bound
(`MyFn.apply(x)`, `f = MyFn.apply; f(x)`), and wants to see both calls. What is known of the ways stands in
`symbolics/capture/interception.py`; private names of torch have a test each in `tests/symbolics/test_torch_private.py`.

CUDA has not been run: the code for CUDAExecutionProvider is tested on the CPU alone.
"""


def release() -> str:
    """This torch and Python, as a record is named."""
    return f"torch-{torch.__version__.split('+')[0]}-python-{'.'.join(platform.python_version_tuple()[:2])}"


def expected() -> dict[str, list[str]]:
    """row -> its outcomes on both exporters by the list, which test_rows holds on the torch that runs it."""
    return {row.id: [row.dynamo, row.torchscript] for row in ROWS}


def records() -> list[dict[str, Any]]:
    """What was kept of every run, oldest torch first."""

    def order(record: dict[str, Any]) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", f"{record['torch']} {record['python']}")]

    return sorted((json.loads(path.read_text()) for path in RECORDS.glob("*.json")), key=order)


def page() -> str:
    """The document."""
    lines, differing = [], []
    for record in records():
        functions = record["functions"]
        for column, (exporter, _) in enumerate(EXPORTERS.items()):
            other = {row: found[column] for row, found in functions.items() if found[column] != expected().get(row, [None, None])[column]}
            models = [found[column] for found in record["models"].values()]
            cells = [
                record["torch"],
                record["python"],
                exporter,
                record["apply"],
                f"{len(functions) - len(other)} of {len(functions)}",
                f"{models.count('equal')} of {len(models)}",
                record["onnxruntime"],
            ]
            lines.append(f"| {' | '.join(cells)} |\n")
            what = f"torch {record['torch']}, Python {record['python']}, {exporter}"
            differing += [f"- {what}: `{row}` is {found}, in the table {expected()[row][column]}\n" for row, found in other.items()]
            differing += [
                f"- {what}: {NAMES[name]}: {found[column]}\n" for name, found in record["models"].items() if found[column] != "equal"
            ]
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    return (
        _HEAD.format(**{name: pins[name] for name in ("torch", "onnxruntime")})
        + "".join(lines)
        + "\n## What differs between them\n\n"
        + ("".join(differing) or "Nothing: every row and every model.\n")
        + _TAIL
    )


def _model(name: str, dynamo: bool) -> str:
    try:
        return "equal" if verified(name, dynamo).ok else "differs"
    except Exception as error:
        return re.sub(r"[|`\n]", " ", f"{type(error).__name__}: {error}")[:200]


def main() -> None:
    """Run everything on this torch, keep the record, write the page."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path = RECORDS / f"{release()}.json"
    known = json.loads(path.read_text()) if "--missing" in sys.argv[1:] and path.exists() else {"functions": {}, "models": {}}
    functions: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder))
        for row in ROWS:
            functions[row.id] = known["functions"].get(row.id) or [
                check_row(row.id, dynamo, worker, Path(folder)).outcome for dynamo in (True, False)
            ]
            if functions[row.id] != expected()[row.id]:
                print(f"{row.id}: {functions[row.id]}, in the table {expected()[row.id]}", flush=True)
        worker.close()
    models = {}
    for name in NAMES:
        models[name] = known["models"].get(name) or [_model(name, dynamo) for dynamo in EXPORTERS.values()]
        print(f"{name}: {models[name]}", flush=True)
    record = {
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "onnxruntime": onnxruntime.__version__,
        "apply": "a method of C" if is_method_of_c() else "a classmethod of Python",
        "functions": functions,
        "models": models,
    }
    RECORDS.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()
