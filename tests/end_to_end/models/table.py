"""docs/models.md, made by verifying every model: ``python -m tests.end_to_end.models.table`` runs them all and writes it."""

from __future__ import annotations

import logging
import math
import re
import sys
import warnings
from dataclasses import dataclass

import exporter
from exporter.verification.rows import ELSEWHERE
from tests.processes import ROOT
from tests.zoo.exported import MODELS, entry_of

__all__ = ["DOCUMENT", "EXPORTERS", "NAMES", "Cells", "table_of", "verified"]

DOCUMENT = ROOT / "docs" / "models.md"
EXPORTERS = {"torch.export": True, "TorchScript": False}

_HEAD = """\
# Models

Here you see which kinds of models were exported and compared with eager PyTorch, and how close the files are. Look for an architecture that is
like yours.

Each model was exported with both of torch's exporters and verified by `exporter.verify`: a fresh process opened the saved file, ran it with its
gradient graph on stock onnxruntime, and compared outputs and the gradients of every parameter and float input with eager. The models are small
and have random weights. Some call autograd Functions in ordinary use, the others are common architectures. [Packages](wild.md) has many more.

To do the same with your own model, run [`pythonop verify`](verify-in-ci.md).

## How to read a row

| column | meaning |
|---|---|
| PythonOps | nodes that call Python, one for each call of a Function |
| nodes | nodes of the file |
| gradient nodes | nodes of the backward half of its gradient graph |
| output error, gradient error | the largest error of any tensor, relative to the tensor's largest value. For a gradient, that value is at least a hundredth of the model's largest gradient. Errors are against float64 where the model runs in it |
| status | "equal" where all errors are within what float32 allows. I-BERT, which rounds, is allowed ten times the error of eager's own float32 |

`python -m tests.end_to_end.models.table` runs all models and writes this page.

## The models

| model | exporter | PythonOps | nodes | gradient nodes | output error | gradient error | status |
|---|---|---|---|---|---|---|---|
"""

#: What the names say too little about.
_TITLES = {
    "bloom": "BLOOM (transformers), training",
    "ibert": "I-BERT, quant mode (transformers)",
    "entmax15": "attention with entmax15 (entmax)",
    "snn": "two Leaky layers, four steps (snntorch)",
    "timm_activations": "memory-efficient activations (timm)",
    "checkpointed": "reentrant checkpoints (torch)",
    "mlp": "MLP with LayerNorm",
    "gpt2": "GPT-2 (transformers)",
    "bert": "BERT (transformers)",
    "t5": "T5 (transformers)",
    "llama": "Llama (transformers)",
    "vit": "ViT (transformers)",
    "resnet": "ResNet, BatchNorm in training mode",
    "lstm": "LSTM language model",
    "gru": "GRU language model",
    "unet nearest": "U-Net, Resize nearest",
    "unet bilinear": "U-Net, Resize bilinear",
    "quantization aware": "quantisation-aware, straight-through detach",
}
NAMES: dict[str, str] = {name: _TITLES.get(name, name) for name in MODELS}


@dataclass(frozen=True)
class Cells:
    """A line of the table.

    Attributes:
        python_ops, nodes, backward_nodes: Of the file, and of the backward half of its gradient graph; empty where there is none.
        output_error, gradient_error: Largest of all tensors, as text.
        status: "equal", "differs", or the error that refused it.
    """

    python_ops: str = ""
    nodes: str = ""
    backward_nodes: str = ""
    output_error: str = ""
    gradient_error: str = ""
    status: str = ""


def verified(name: str, dynamo: bool) -> exporter.Report:
    """The report on one model."""
    entry = entry_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exporter.verify(entry.model, entry.args, dynamo=dynamo, steps=1)


def cells_of(report: exporter.Report) -> Cells:
    """What the table says about a report."""

    def largest(gradients: bool) -> str:
        errors = [row.error for row in report.rows if row.kind not in ELSEWHERE and (row.kind != "output") == gradients]
        return f"{math.nan if any(map(math.isnan, errors)) else max(errors):.1e}" if errors else ""

    ops = str(sum(report.functions.values()))
    nodes, backward = str(report.facts["nodes"]), str(report.facts["nodes of the gradient graph"])
    return Cells(ops, nodes, backward, largest(False), largest(True), "equal" if report.ok else "differs")


def table_of(text: str) -> dict[tuple[str, str], Cells]:
    """(title, exporter) -> the cells of the document."""
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|"))
    return {(cells[0], cells[1]): Cells(*cells[2:]) for cells in lines if cells[1] in EXPORTERS}


def main() -> int:
    """Verify every model and write the document; 1 where one is not equal."""
    logging.disable(logging.WARNING)
    lines = []
    for name, title in NAMES.items():
        for kind, dynamo in EXPORTERS.items():
            try:
                cells = cells_of(verified(name, dynamo))
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                cells = Cells(status=re.sub(r"[|`]", "'", f"{type(error).__name__}: {first}")[:200])
            print(f"{title}, {kind}: {cells.status}", flush=True)
            lines.append("| " + " | ".join([title, kind, *vars(cells).values()]) + " |\n")
    DOCUMENT.write_text(_HEAD + "".join(lines))
    return int(any(cells.status != "equal" for cells in table_of(DOCUMENT.read_text()).values()))


if __name__ == "__main__":
    sys.exit(main())
