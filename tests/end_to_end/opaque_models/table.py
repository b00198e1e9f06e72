"""docs/opaque-models.md: `python -m tests.end_to_end.opaque_models.table` runs each model, and writes its row."""

from __future__ import annotations

import logging
import warnings

import torch

import exporter
from exporter.files.named import names_in
from exporter.profiling.profile import profile
from tests.end_to_end.opaque_models import fields, signals, solvers
from tests.end_to_end.opaque_models.rows import MODELS
from tests.processes import ROOT

assert fields and signals and solvers


PAGE = ROOT / "docs" / "opaque-models.md"


def main() -> None:
    """Write the page anew: a row per model, what stayed opaque, and its share of the time of a forward."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    head, rule, _ = PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|---|\n")
    rows = []
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
        rows.append(f"| {row.package} | {row.title} | {opaque} | {len(program.opaque)} | {share:.0%} |\n")
        print(rows[-1], end="", flush=True)
    PAGE.write_text(head + rule + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
