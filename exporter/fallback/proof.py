"""Whether a file that a way out gave computes what eager does: outputs, gradients, buffers, at the example and at other inputs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from exporter.files.named import names_in
from exporter.files.program import Program
from exporter.forward.case import Case
from exporter.module.load import load
from exporter.verification.compare import ROUGH, largest
from exporter.verification.eager import SEED, EagerStep, draws, in_float64, with_the_files_masks
from exporter.verification.elsewhere import other_runs, rows_of
from exporter.verification.masks import Masks
from exporter.verification.process import FileRun, FileStep, asked_of, step_of
from exporter.verification.steps import copy_of, tensors_of
from exporter.verification.worker import FileSteps
from symbolics.errors import PythonopError
from symbolics.node.names import qualified_name

__all__ = ["Proof"]


class Proof:
    """Compares files of one model with its eager mode, which runs once for all of them.

    Args:
        case: The model and its example arguments.
    """

    def __init__(self, case: Case) -> None:
        self._case = case

    @functools.cached_property
    def _eager(self) -> EagerStep:
        case = self._case
        try:
            torch.manual_seed(SEED)
            return EagerStep.run(case)
        except Exception:  # PyTorch has no derivative of an operator in it
            torch.manual_seed(SEED)
            outputs = tensors_of(copy_of(case.model)(*case.args, **(case.kwargs or {})))
            torch.manual_seed(SEED)
            return EagerStep.run(case, given=[None] * len(outputs))

    @functools.cached_property
    def _draws(self) -> bool:
        return draws(self._case, self._eager)

    def begin(self) -> None:
        """Run the model in eager mode.

        Raises:
            Exception: What the model raises on its own example.
        """
        _ = self._eager

    def against(self, program: Program, *, strict: bool = True) -> str:
        """How a file differs from eager, in a sentence; "" where it does not.

        Args:
            program: The file, in memory.
            strict: Whether it counts as a difference that the model draws random numbers, so that nothing can be compared.
        """
        eager, masks = self._eager, None
        if self._draws:
            try:
                eager, masks = with_the_files_masks(self._case, eager, program.model)
            except PythonopError:  # what it draws inside of opaque nodes comes of the same generator, in the same order
                return self._differs(program, self._eager, None, drawing=True) if strict else ""
        return self._differs(program, eager, masks)

    def _differs(self, program: Program, eager: EagerStep, masks: Masks | None, *, drawing: bool = False) -> str:
        case = self._case
        precise = None if drawing else in_float64(case, eager, masks)
        others = [] if drawing else other_runs(case, program.model, masks, eager)
        asked = [eager, *(other.eager for other in others if other.eager is not None)]
        job: dict[str, Any] = {
            "steps": [asked_of(step) for step in asked],
            "gradients": True,
            "seed": SEED,
            "buffers": sorted(eager.buffers.keys() - eager.notes),
        }
        file = FileSteps(load(program, allow=_allowed(program, case.model)), job)
        first = file.found(job["steps"][0])
        steps = [step_of(found) for found in (first, *(file.elsewhere(given) for given in job["steps"][1:]))]
        assert isinstance(steps[0], FileStep)
        wanted = [has for has, g in zip(steps[0].differentiable, eager.cotangents, strict=False) if g is not None]
        if wanted and not any(wanted) and any(largest(g) for g in eager.gradients.values() if g is not None):
            return "the outputs have a gradient in eager, and none in the file"
        rows = rows_of(program.model, FileRun(steps, file.lost, 0, {}, None, {}), (eager, precise), others)
        # Of random draws there is no run in float64: another draw is far, a rounding is not.
        bad = [row for row in rows if not row.ok and not (drawing and not row.problem and row.error <= ROUGH)]
        if bad and drawing:
            return "the model draws random numbers, or keeps state between calls, so that nothing can be compared: export it in eval(), or without dropout"
        if not bad:
            return ""
        worst = max(bad, key=lambda row: row.badness)
        return f"{worst.kind} {worst.name}: {worst.problem or f'it differs from eager by {worst.error:.1e}, allowed are {worst.tolerance:.1e}'}"


def _allowed(program: Program, model: torch.nn.Module) -> list[Any]:
    """What the file names: this process has just written it. Classes that no import finds are given themselves."""
    names = set(names_in(program.model))
    classes: dict[str, Any] = {}
    waiting: list[type] = [*map(type, model.modules()), *torch.autograd.Function.__subclasses__()]
    seen = set[type]()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            waiting += cls.__subclasses__() if issubclass(cls, torch.autograd.Function) else ()
            if (name := qualified_name(cls)) in names:
                classes[name] = cls
    return [*(name for name in names if name not in classes), *classes.values()]
