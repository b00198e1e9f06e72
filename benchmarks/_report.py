"""What every benchmark tells: figures, each with its limit where it has one. A table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Figure", "machine", "tell"]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        what: What was measured, of what.
        value: The number; None where there is none, and `note` says why.
        unit: "ratio", "us", "s", "MiB", ...
        limit: The most that it may be; None where it is told for orientation.
        runs: How many runs it is the median of.
        note: What a reader should know.
    """

    what: str
    value: float | None
    unit: str
    limit: float | None = None
    runs: int = 1
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.limit is not None and not (self.value is not None and self.value <= self.limit)


def machine() -> dict[str, Any]:
    """Where and with what was measured."""
    names = ("torch", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "transformers", "onnx-ad")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in facts)}
    return {
        "cpu": said.get("model name", platform.processor()) + _generation(said),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def _generation(said: dict[str, str]) -> str:
    """What the name of a virtual AMD processor leaves out, as it decides how fast onnxruntime's kernels are."""
    if said.get("model name") != "AMD EPYC":
        return ""
    vector = "avx512f" in said.get("flags", "").split()
    zen = {
        ("25", False): "Zen 3, without AVX-512",
        ("25", True): "Zen 4, AVX-512 in halves",
        ("26", True): "Zen 5, with AVX-512",
    }.get((said.get("cpu family", ""), vector))
    return f" ({zen})" if zen else ""


def tell(program: str, figures: Sequence[Figure]) -> int:
    """A table on stderr, one line of JSON on stdout. Returns 1 where a limit was missed, otherwise 0."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=program, title_justify="left")
    for column in ("", "value", "limit", "runs", ""):
        table.add_column(column, justify="right" if column in ("value", "limit", "runs") else "left")
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:g}"
        style = "red" if figure.missed else None
        value = "" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        table.add_row(figure.what, value, limit, str(figure.runs), figure.note, style=style)
    Console(stderr=True).print(table)
    rows = [{**asdict(figure), "missed": figure.missed} for figure in figures]
    print(json.dumps({"program": program, "machine": machine(), "figures": rows}), file=sys.stdout, flush=True)
    return int(any(figure.missed for figure in figures))
