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

Here you find out whether pythonop works with your release of torch and Python, and what differs from the release that it is developed with.

pythonop is developed and tested with torch {torch} and onnxruntime {onnxruntime}. Find the row of your torch. A torch that is not in the table
may work: pythonop warns once that it was not tried, and [below](#a-torch-that-is-not-in-the-table) stands what happens then.

Each row is one run of all [Functions](functions.md) and all [models](models.md) with one exporter. They were exported, saved, opened in a fresh
process, and compared with eager PyTorch of the same release, outputs and every gradient. The columns are:

- **`Function.apply` is**: how this torch calls a Function, in Python or in C. pythonop handles both.
- **Functions as expected**: how many rows of the [table of Functions](functions.md) have the outcome that stands there. Rows that differ are
  listed below the table. A row that counts fewer is a run from before the others were added.
- **models equal**: how many models equal eager.
- **onnxruntime**: the release of that run.

| torch | Python | exporter | `Function.apply` is | Functions as expected | models equal | onnxruntime |
|---|---|---|---|---|---|---|
"""

_TAIL = """\

## A torch that is not in the table

A newer torch warns once, when an export begins. If it calls Functions in a way that pythonop does not know, that is an `ExportError` before
anything is exported: pythonop first calls a Function of its own (`MyFn.apply(x)`, `f = MyFn.apply; f(x)`), and checks that it sees both calls.

`make versions TORCH=2.15.0` runs everything on a release of torch and writes this page. `make test-torch TORCH=2.15.0` runs the tests of export,
functions, models, loaded modules and verification on it. `make pages TORCH=2.15.0` runs the code of these pages, with the newest release of
every other package. [Maintaining pythonop](maintaining.md) says what to do about a new torch.

## Which opset for which onnxruntime

An export has opset 20 unless `opset_version=` (`--opset`) says another. An older onnxruntime refuses newer ones:

| opset | onnxruntime | `dynamo=True` | `dynamo=False` |
|---|---|---|---|
| 15, 17 | run on 1.18.1, 1.19.2, 1.20.1 | where torch can convert the model from 18 | yes |
| 18, 20, 21 | run on 1.18.1, 1.19.2, 1.20.1 | yes | yes |
| 22, 23 | refused by 1.18.1 and 1.20.1; open in 1.32.0 | yes | yes |
| 24, 25 | open in 1.32.0 | yes | an error |

So for a server whose onnxruntime is old, take 18 to 21. Where torch's exporter cannot write the opset that you ask for, the error says which it can.

## A machine that only opens files

- **Another torch** may open them: a file holds no release of torch. Its Functions run on the torch that is there, 2.13 or newer.
- **onnxruntime 1.20 or newer** opens files with PythonOps; 1.20.1, 1.23.2, 1.27.0, 1.31.1 and 1.32.0 are in the tests. A file without PythonOps needs
  no pythonop, and onnxruntime [1.18 or newer](portable.md#put-it-on-a-server); one with weights of 4 bits 1.19 or newer.
- **Another pythonop** opens files by [a promise of compatibility](format.md#compatibility): files of the year before it, and those of the six weeks
  after it that use nothing new.
- **Packages**: torch 2.13, onnx 1.23, onnx_ir 1.1, onnxscript 0.7, numpy 2.0, ml_dtypes 0.5.4, rich 13, click 8.1 and lazy_loader 0.4, or newer. A minor release of pythonop may ask for newer ones.

[First hour](first-hour.md#install-what-a-machine-needs) has the packages that such a machine needs.

CUDA was not run: what pythonop does for CUDAExecutionProvider is tested on the CPU only.
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
    lines, differing, names = [], [], {row.id: row.what for row in ROWS}
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
            differing += [f'- {what}: "{names[row]}" is {found}, expected: {expected()[row][column]}\n' for row, found in other.items()]
            differing += [
                f"- {what}: {NAMES[name]}: {found[column]}\n" for name, found in record["models"].items() if found[column] != "equal"
            ]
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    return (
        _HEAD.format(**{name: pins[name] for name in ("torch", "onnxruntime")})
        + "".join(lines)
        + "\n## What differs\n\n"
        + ("".join(differing) or "Nothing: every row and every model is as expected.\n")
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
