"""The file's side of `verify`: a step by a fresh Python process that knows the file alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exporter.files.fresh import fresh_python
from exporter.verification.eager import SEED, EagerStep
from symbolics.errors import Faq, FormatError, RunError, TrustError
from symbolics.node.names import qualified_name
from symbolics.node.patterns import Patterns

__all__ = ["FileStep", "run_in_a_fresh_process"]


@dataclass
class FileStep:
    """One step of a file.

    Attributes:
        outputs: The tensors that it gives, flat.
        gradients: (kind, name) -> gradient, None where it has none.
        buffers: name -> its value behind the forward, of the buffers that the file's or eager's forward changed.
        lost: What the file says that it does not carry -> why.
        differentiable: Which outputs have a gradient.
        backward_nodes: How many nodes the gradient graph has.
        seconds: Of loading, and of a step.
        memory: Of a step, in bytes; None where it could not be measured.
        changed: The Functions that are others there than at the export -> which halves.
    """

    outputs: list[torch.Tensor]
    gradients: dict[tuple[str, str], torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    lost: dict[str, str]
    differentiable: list[bool]
    backward_nodes: int
    seconds: dict[str, float]
    memory: int | None
    changed: dict[str, list[str]]


def run_in_a_fresh_process(
    path: Path, folder: Path, eager: EagerStep, allow: Iterable[Any], setup: str | None, steps: int, timeout: float
) -> FileStep:
    """Run one step of the saved file by a Python that has seen neither the model nor its module; ``folder`` is for what both say.

    Raises:
        RunError: It does not end in time, or leaves no result.
        TrustError, FormatError, RunError: As it raised them.
    """
    patterns = [entry if isinstance(entry, str) else qualified_name(entry) for entry in Patterns(allow, "allow").items]
    job = {
        "path": str(path), "allow": patterns, "setup": setup, "inputs": eager.inputs, "cotangents": eager.cotangents, "steps": steps, "seed": SEED,
        "buffers": sorted(eager.buffers.keys() - eager.notes), "threads": torch.get_num_threads(),
    }  # fmt: skip
    torch.save(job, folder / "job.pt")
    command = fresh_python("exporter.verification.worker", str(folder / "job.pt"), str(folder / "result.pt"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the fresh process did not end within {timeout:g} s: give verify a longer timeout=, or a smaller model") from error
    if not (folder / "result.pt").exists():
        end = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise RunError(f"the fresh process ended with status {done.returncode} and left no result:\n{end}")
    result = torch.load(folder / "result.pt", weights_only=True)
    if "error" in result:
        kinds = {kind.__name__: kind for kind in (TrustError, FormatError, RunError)}
        remedy = ""
        if result["kind"] == "TrustError" and setup is None:
            remedy = "; pass setup='package.module:function' whose function calls exporter.register() for it"
        kind, faq = kinds.get(result["kind"], RunError), None if result["faq"] is None else Faq(result["faq"])
        raise kind(f"in the fresh process: {result['kind']}: {result['error']}{remedy}", faq=faq)
    parts = {name.partition(":"): gradient for name, gradient in result.pop("gradients").items()}
    gradients = {(kind, name): gradient for (kind, _, name), gradient in parts.items()}
    return FileStep(gradients=gradients, **result)
