"""The comparison at other inputs than the example: eager's side of it, and a row for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from exporter.forward.case import Case
from exporter.forward.eager_failure import line_of
from exporter.verification.compare import compare, difference, largest, tolerance_of
from exporter.verification.eager import EagerStep, in_float64
from exporter.verification.masks import Masks
from exporter.verification.other_inputs import other_sizes, other_values
from exporter.verification.process import FileRun, FileStep
from exporter.verification.provenance import opaque_parameters, places_of_rows
from exporter.verification.rows import NOT_COMPARED, Row
from symbolics.graph.values import name_of
from symbolics.node.metadata import changes_of, read_state, results_of
from symbolics.text import clean, ends, said

__all__ = ["Elsewhere", "other_runs", "rows_of"]


@dataclass
class Elsewhere:
    """Eager at another input.

    Attributes:
        kind: "second input" or "second size".
        about: What is other there, empty where the kind says it.
        case: The model with this input.
        eager, precise: Its step, also in float64; None where there is no such step.
        why: Why there is no step of eager.
    """

    kind: str
    about: str = ""
    case: Case | None = None
    eager: EagerStep | None = None
    precise: EagerStep | None = None
    why: str = ""


def other_runs(case: Case, model: ir.Model, masks: Masks | None, example: EagerStep) -> list[Elsewhere]:
    """Eager at other values and, where the file leaves axes open, at other sizes: each the first that eager itself can run.

    NaN at what was made up, where there is none at the example, tells nothing: an edge from an atom to itself has no direction.
    """
    tried = [("second input", (("", made) for made in other_values(case))), ("second size", other_sizes(case, model))]
    return [found for kind, cases in tried if (found := _first_that_runs(kind, cases, masks, not _has_nan(example))) is not None]


def _has_nan(step: EagerStep) -> bool:
    return any(bool(x.isnan().any()) for x in (*step.outputs, *step.gradients.values(), *step.buffers.values()) if x is not None)


def _first_that_runs(kind: str, cases: Iterable[tuple[str, Case]], masks: Masks | None, without_nan: bool) -> Elsewhere | None:
    failed = None
    for about, case in cases:
        try:
            eager = EagerStep.run(case, masks=masks)
        except Exception as error:  # a forward may refuse what it wants, and what was made up is no example of anybody's
            if failed is None:
                text = ends(said(error), 200).replace("\n", " ")
                place = line_of(error)
                why = f"{NOT_COMPARED}: eager fails on it: {type(error).__name__}: {text}{f' ({place})' if place else ''}"
                failed = Elsewhere(kind, about, why=why)
            continue
        if without_nan and _has_nan(eager):
            failed = failed or Elsewhere(kind, about, why=f"{NOT_COMPARED}: eager gives NaN on it")
            continue
        return Elsewhere(kind, about, case, eager, in_float64(case, eager, masks))
    return failed


def rows_of(
    model: ir.Model,
    run: FileRun,
    example: tuple[EagerStep, EagerStep | None],
    others: Sequence[Elsewhere],
    precision: torch.dtype | None = None,
    named: bool = False,
) -> list[Row]:
    """A row for each tensor at the example, then one for each other input.

    Args:
        model: The file.
        run: What the fresh process found: at the example, then at those others of which there is a step of eager.
        example: Eager at the example, also in float64.
        others: Eager's side of the others.
        precision: The type in which the file computes float32, where that is another.
        named: Whether rows have the outputs' names in the file behind their numbers: somebody may have chosen them.
    """
    names = (
        {f"output {index}": f"output {index} ({clean(name_of(value))})" for index, value in enumerate(results_of(model))} if named else {}
    )
    places, carried, opaque = places_of_rows(model), changes_of(model).carried, opaque_parameters(model)
    kept = {name for name, entry in (read_state(model.metadata_props) or {}).items() if entry.initializer in carried}

    def rows(eager: EagerStep, precise: EagerStep | None, found: FileStep, lost: Mapping[str, str]) -> list[Row]:
        half = eager.half if precise is None else precise.half
        all_rows = compare(eager.beside({*found.buffers, *kept}), precise, found, lost, precision, eager.untouched, opaque, half)
        placed = [replace(row, node=places.get((row.kind, row.name), "")) for row in all_rows]
        return [replace(row, name=names.get(row.name, row.name)) if row.kind == "output" else row for row in placed]

    first, *steps = run.steps
    assert isinstance(first, FileStep)
    result = rows(*example, first, run.lost)
    allowed = {(row.kind, row.name): row.tolerance for row in result}
    for other in others:
        about = f" ({other.about})" if other.about else ""
        whole = Row(f"inputs{about}", other.kind, (), "", float("nan"), None, 0.0, "", True, note=other.why)
        if other.eager is None:
            result.append(whole)
            continue
        found = steps.pop(0)
        if isinstance(found, str):
            result.append(replace(whole, ok=False, problem=f"the file fails on it, eager does not: {found}"))
            continue
        there = [row for row in rows(other.eager, other.precise, found, {}) if row.name not in run.lost or row.kind != "buffer"]
        there = [row if row.problem else _as_far(row, allowed.get((row.kind, row.name), 0.0)) for row in there]
        worst = max(there, key=lambda row: row.badness, default=None)
        if worst is None:
            continue
        problem = "; ".join(_constants(model, (example[0], other.eager), (first, found))) or worst.problem
        name = worst.name if worst.kind == "output" else f"{worst.kind} {worst.name}"
        result.append(replace(worst, name=f"{name}{about}", kind=other.kind, problem=problem, ok=worst.ok and not problem))
    return result


def _as_far(row: Row, allowed: float) -> Row:
    """The row, allowed at least what was allowed at the example: how far eager is from float64 is luck where a tensor is one number."""
    tolerance = max(row.tolerance, allowed)
    return replace(row, tolerance=tolerance, ok=row.error <= tolerance)


def _constants(model: ir.Model, eager: tuple[EagerStep, EagerStep], file: tuple[FileStep, FileStep]) -> Iterator[str]:
    """The outputs of the file that do not move with its inputs, where eager's do."""
    for value, *tensors in zip(results_of(model), *(step.outputs for step in (*eager, *file)), strict=False):
        wanted, moved, found, stayed = tensors
        if (
            torch.equal(found, stayed)
            and not torch.equal(wanted, moved)
            and (
                moved.shape != wanted.shape
                or difference(moved, wanted) > largest(moved) * tolerance_of(str(moved.dtype).removeprefix("torch."))
            )
        ):
            yield f"the file's output {name_of(value)!r} is a constant: it does not move with the inputs, eager's does"
