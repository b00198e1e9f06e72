"""docs/opaque-models.md: `python -m tests.end_to_end.opaque_models.table` runs each model whose package is installed, and prints its row."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

import exporter
from exporter.files.named import names_in
from exporter.profiling.profile import profile
from tests.end_to_end.opaque_models import signals, solvers
from tests.end_to_end.opaque_models.rows import MODELS

assert signals and solvers


def main(out: str) -> None:
    """Write a row per model: what stayed opaque, and its share of the time of a forward."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with Path(out).open("w", encoding="utf-8") as file:
        for row in MODELS.values():
            torch.manual_seed(0)
            model, args = row.make()
            program = exporter.export(model, args, opaque=row.opaque)
            names = [value.name for value in program.model.graph.inputs]
            found = profile(
                program.model_proto, {name: value.numpy() for name, value in zip(names, args, strict=True)}, allow=names_in(program.model)
            )
            opaque = ", ".join(dict.fromkeys(f"`{node.function.rpartition('opaque_models.')[2]}`" for node in program.opaque))
            share = found.python / sum(each.seconds for each in found.rows)
            print(f"| {row.package} | {row.title} | {opaque} | {len(program.opaque)} | {share:.0%} |", file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
