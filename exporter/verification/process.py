"""The file's side of `verify`: a step by a fresh Python process that knows the file alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exporter.files.fresh import fresh_python
from exporter.verification.eager import SEED, EagerStep
from exporter.verification.steps import shapes_of
from symbolics.errors import Faq, FormatError, RunError, TrustError
from symbolics.node.names import qualified_name
from symbolics.node.patterns import Patterns

__all__ = ["FileRun", "FileStep", "asked_of", "run_in_a_fresh_process", "step_of"]


@dataclass
class FileStep:
    """One step of a file.

    Attributes:
        outputs: The tensors that it gives, flat.
        gradients: (kind, name) -> gradient, None where it has none; all None where the outputs are others than eager's in number or shape.
        buffers: name -> its value behind the forward, of the buffers that the file's or eager's forward changed.
        differentiable: Which outputs have a gradient.
    """

    outputs: list[torch.Tensor]
    gradients: dict[tuple[str, str], torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    differentiable: list[bool]


@dataclass
class FileRun:
    """What the fresh process found.

    Attributes:
        steps: One for each of eager's, each from the file's own state; what went wrong in place of one that failed, which the first never is.
        lost: What the file says that it does not carry -> why.
        backward_nodes: How many nodes the gradient graph has.
        seconds: Of loading, and of a step.
        memory: Of a step, in bytes; None where it could not be measured.
        changed: The Functions that are others there than at the export -> which halves.
    """

    steps: list[FileStep | str]
    lost: dict[str, str]
    backward_nodes: int
    seconds: dict[str, float]
    memory: int | None
    changed: dict[str, list[str]]


def run_in_a_fresh_process(
    path: Path,
    folder: Path,
    eager: Sequence[EagerStep],
    allow: Iterable[Any],
    setup: str | None,
    count: int,
    timeout: float,
    providers: Sequence[Any] | None = None,
    *,
    gradients: bool = True,
) -> FileRun:
    """Run steps of the saved file by a Python that has seen neither the model nor its module; ``folder`` is for what both say.

    Args:
        path, folder: The file; and where to write.
        eager: What eager did: the example, then other inputs.
        allow, setup, timeout: As `verify` takes them.
        count: How many steps are timed.
        providers: As `exporter.load` takes them.
        gradients: Whether to take any; False for a file that has lost what they depend on.

    Raises:
        RunError: It does not end in time, or leaves no result.
        TrustError, FormatError, RunError: As it raised them.
    """
    patterns = [entry if isinstance(entry, str) else qualified_name(entry) for entry in Patterns(allow, "allow").items]
    job = {
        "path": str(path), "allow": patterns, "setup": setup, "count": count, "seed": SEED, "threads": torch.get_num_threads(),
        "steps": [asked_of(step) for step in eager],
        "providers": providers if providers is None else list(providers),
        "buffers": sorted(eager[0].buffers.keys() - eager[0].notes),
        "gradients": gradients,
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
        elif result["place"]:
            remedy = f"\n  {result['place']}\n  way out: let it run in a process that has neither the model nor its settings"
            if setup is None:
                remedy += "; what its module needs there is set by setup='package.module:function'"
        kind, faq = kinds.get(result["kind"], RunError), None if result["faq"] is None else Faq(result["faq"])
        raise kind(f"in the fresh process: {result['kind']}: {result['error']}{remedy}", faq=faq)
    return FileRun(**{**result, "steps": [step_of(found) for found in result["steps"]]})


def asked_of(step: EagerStep) -> dict[str, Any]:
    """A step of eager, as `exporter.verification.worker.FileSteps` makes the file's."""
    return {"inputs": step.inputs, "cotangents": step.cotangents, "shapes": shapes_of(step.outputs)}


def step_of(found: dict[str, Any]) -> FileStep | str:
    """What a step of `exporter.verification.worker.FileSteps` found, or what went wrong."""
    if "error" in found:
        return str(found["error"])
    parts = {name.partition(":"): gradient for name, gradient in found["gradients"].items()}
    gradients = {(kind, name): gradient for (kind, _, name), gradient in parts.items()}
    return FileStep(found["outputs"], gradients, found["buffers"], found["differentiable"])
