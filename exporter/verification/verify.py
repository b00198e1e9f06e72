"""verify(): the round trip as proof. Export, reopen in a fresh process, run on onnxruntime, compare with eager PyTorch."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from exporter.errors import short
from exporter.files.named import names_in
from exporter.files.program import Program
from exporter.files.tensors import data_files
from exporter.forward.arguments import check_call, check_model, check_values, in_order
from exporter.forward.case import Case
from exporter.forward.eager_failure import eager_failure
from exporter.forward.export import export
from exporter.forward.inputs import each_once
from exporter.forward.plain_tensors import held_plainly
from exporter.gradient_graph.model import lost_counts
from exporter.runtime.providers import choose, precision_of, said_of
from exporter.verification.bisect import first_departure
from exporter.verification.compare import largest
from exporter.verification.eager import EagerStep, draws, in_backward, in_float64, measured_step, with_the_files_masks
from exporter.verification.elsewhere import Elsewhere, other_runs, rows_of
from exporter.verification.existing import lost_gradients, names_allowed, note_on_values, note_on_weights, open_existing, weight_rows
from exporter.verification.kept import note_on_state
from exporter.verification.notes import (
    choices_of,
    note_on_backward,
    note_on_changes,
    note_on_constants,
    note_on_half,
    note_on_kept_code,
    note_on_kept_values,
    note_on_no_departure,
    note_on_outputs,
    note_on_zeros,
    notes_on,
)
from exporter.verification.process import FileRun, FileStep, run_in_a_fresh_process
from exporter.verification.report import STEPS, Report
from exporter.verification.rows import ELSEWHERE, Row
from exporter.verification.steps import copy_of, entries_of_copy, shapes_of
from symbolics.errors import PythonopError, PythonopWarning, RunError
from symbolics.graph.flatten import flattened
from symbolics.graph.values import function_of, is_python_op, name_of
from symbolics.graph.walk import walk
from symbolics.node.metadata import results_of
from symbolics.node.names import MARK_COUNT_KEY
from symbolics.users import TOOK

__all__ = ["verify"]

#: Its stages, for whoever listens: `pythonop verify` shows them.
_log = logging.getLogger("pythonop")


@short
def verify(
    model: torch.nn.Module | Case,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamo: bool = True,
    setup: str | None = None,
    allow: Iterable[Any] | None = None,
    inline: Iterable[Any] = (),
    portable: Any = False,
    opaque: Any = (),
    functions: Any = (),
    fallback: bool = False,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    bisect: bool = False,
    steps: int = 5,
    timeout: float = 600.0,
    file: Any = None,
    providers: Sequence[Any] | None = None,
) -> Report:
    """Compare a model's ONNX file and its gradients with eager PyTorch, in a fresh process.

    The model is exported and saved. Another Python process, which has only the file, runs it on onnxruntime with its gradient
    graph. These are compared with eager, a row of the report each: outputs, the gradients of every parameter and float input,
    and the buffers that forward changes, for one random output gradient. The same is done at a second input, made up of values
    of the same kind, and at a second size where the file leaves axes open. Where the model drops out, eager drops the same
    elements. Where the model also runs in float64, that is the reference, and the tolerance comes from eager's own error.

    Args:
        model: The model, in the mode that the file should have; or a `Case`, which has the arguments. It is not changed.
        args, kwargs: Example arguments of its forward.
        dynamo: Which of torch's exporters runs: torch.export (True) or TorchScript (False).
        setup: ``package.module:function``, called first in the fresh process. It registers (`register`) what cannot be
            imported, such as classes of ``__main__`` and classes inside functions.
        allow: What that process may import. Default: what the exported file names, because this process has just written it.
            With ``file``: what an export of the model names.
        inline, portable, opaque, functions, fallback, dynamic_shapes, opset_version: As `export` takes them. Where ``portable``
            leaves no PythonOp, that process calls no ``setup`` and may import nothing, whatever ``allow`` says.
        bisect: Whether to look for the first node that departs, where something differs (`Report.first_departure`). Not for a
            model that drops out.
        steps: How often a step runs for the times in the report.
        timeout: Seconds that the fresh process may take.
        file: A path, or what else `load` takes: compare this file, and export none. The first rows are its weights, bit by bit.
            Functions that have changed since its export are in the notes. Of a file whose functions somebody inlined, outputs and
            buffers are compared, and one more row says that gradients were not: ``ok`` is then False.
        providers: As `load` takes them. With a ``precision`` of "bfloat16", tensors of float32 may differ as bfloat16 does.

    Returns:
        The report. ``ok`` says whether all is equal; ``print`` shows the rows.

    Raises:
        ExportError: The model cannot be exported, or fails in eager mode on its own example.
        FormatError: ``file`` is damaged, or a training step.
        TrustError: The fresh process cannot import a class. The message has the way out.
        RunError: That process failed otherwise; the message has the end of its output. Or no output of the file has a gradient,
            and eager's gradients are not all zero.
        ArgumentError: There is no such provider.
        PythonopError: The model draws random numbers other than Dropout's, or keeps state between calls, so that two runs
            cannot be compared.

    Examples:
        >>> report = exporter.verify(model, (x,))
        >>> report.ok
        True
    """
    case = (
        model
        if isinstance(model, Case)
        else Case(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            inline=tuple(inline),
            portable=portable,
            opaque=opaque,
            functions=functions,
            fallback=fallback,
        )
    )
    case = replace(case, args=tuple(case.args) if isinstance(case.args, (tuple, list)) else (case.args,))
    if providers is not None:
        choose(providers)
    check_model(case.model, dynamo=dynamo)
    check_call(case.args, case.kwargs, dynamo=dynamo)
    check_values(case.model, case.args, case.kwargs)
    args, kwargs = each_once(case.args, case.kwargs or {})
    case = replace(case, args=args, kwargs=kwargs if dynamo else in_order(case.model, kwargs))
    options = {
        "dynamo": dynamo, "dynamic_shapes": case.dynamic_shapes, "inline": case.inline, "portable": case.portable, "opaque": case.opaque,
        "functions": case.functions, "fallback": case.fallback, "opset_version": opset_version,
    }  # fmt: skip
    with held_plainly(case.model):
        return _compared(case, options, setup, allow, bisect, steps, timeout, file, providers)


def _compared(
    case: Case, options: dict[str, Any], setup: str | None, allow: Iterable[Any] | None, bisect: bool, steps: int, timeout: float, file: Any,
    providers: Sequence[Any] | None,
) -> Report:  # fmt: skip
    """`verify`, of arguments that have been looked at."""
    _log.info("running %s in eager mode", type(case.model).__name__)
    try:
        eager = EagerStep.run(case)
    except PythonopError:
        raise
    except Exception as error:
        raise eager_failure(error, "a backward() from the outputs of model(*args)" if in_backward(error) else "model(*args)") from error
    random, said = draws(case, eager), list[warnings.WarningMessage]()
    seconds: dict[str, float] = {}
    if file is None:
        _log.info("exporting %s", type(case.model).__name__)
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("ignore", ".* cannot be opened by another process", PythonopWarning)  # here that is an error
                warnings.filterwarnings("always", f".*{TOOK}")
                copied = copy_of(case.model)
                program = export(copied, case.args, case.kwargs, **{**options, **entries_of_copy(case, copied)})
        finally:
            for each in said:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        seconds["export"] = time.perf_counter() - begin
    else:
        program = Program(open_existing(file))
    eager, masks = with_the_files_masks(case, eager, program.model) if random else (eager, None)
    _log.info("running %s in float64", type(case.model).__name__)
    precise = in_float64(case, eager, masks)
    _log.info("running %s at other inputs", type(case.model).__name__)
    others = other_runs(case, program.model, masks, eager)
    lost = [] if file is None else list(lost_gradients(lost_counts(program.model).values()))
    if lost:
        eager = eager.without_gradients()
        others = [other if other.eager is None else replace(other, eager=other.eager.without_gradients()) for other in others]
    if allow is not None:
        allowed = list(allow)
    else:
        allowed = [*names_in(program.model), *case.allow] if file is None else names_allowed(program.model, case, **options)
    if file is None and case.portable and not program.opaque:
        allowed, setup = [], None
    with tempfile.TemporaryDirectory(prefix="pythonop-verify-") as folder:
        is_there = isinstance(file, (str, os.PathLike))
        path = Path(file).absolute() if is_there else Path(folder, "model.onnx")
        if not is_there:
            program.save(path)
        _log.info("running the file in a fresh process")
        asked = [eager, *(other.eager for other in others if other.eager is not None)]
        run = run_in_a_fresh_process(path, Path(folder), asked, allowed, setup, steps, timeout, providers, gradients=not lost)
        size = sum(each.stat().st_size for each in {path, *data_files(program.model), *Path(folder).glob("model.onnx*")} if each.exists())
    _log.info("comparing")
    _refuse_no_path(eager, run.steps[0])
    eager_seconds, eager_memory = measured_step(case, eager, steps)
    seconds |= {**run.seconds, "eager step": eager_seconds}
    memory = {name: used for name, used in zip(STEPS, (eager_memory, run.memory), strict=True) if used is not None}
    rows = rows_of(program.model, run, (eager, precise), others, getattr(torch, precision_of(providers) or "", None), file is not None)
    weights = weight_rows(program.model, case.model) if file is not None else []
    found = run.steps[0]
    assert isinstance(found, FileStep)
    other_outputs = list(note_on_outputs(eager.outputs, found.outputs, [name_of(value) for value in results_of(program.model)]))
    notes = [
        *(note for _, note in lost),
        *other_outputs,
        *note_on_weights(weights, program.model, str(file) if is_there else "model.onnx"),
        *note_on_changes(run.changed),
        *note_on_half(rows),
        *(note_on_kept_values(said) if all(row.ok for row in rows) else ()),
    ]
    if file is not None:
        notes += note_on_values(program.model, allowed)
    same_model = not other_outputs and all(row.ok for row in weights)
    if same_model:
        notes += [
            *note_on_state(rows, program.model),
            *note_on_backward(rows, eager.by_backward, is_there=not eager.no_backward),
            *note_on_constants(rows),
            *note_on_zeros(rows),
            *(note_on_kept_code(rows, program.model) if file is not None else ()),
            *notes_on(rows, choices_of(program.model, gates=eager.half is not None)),
        ]
    made_by = "a file that was there" if file is not None else "torch.export" if options["dynamo"] else "TorchScript"
    report = Report(
        [*weights, *rows, *(row for row, _ in lost)], _facts(case, program.model, made_by, size, run, providers), _functions(program), seconds, memory=memory,
        notes=notes, program=program,
    )  # fmt: skip
    if bisect and not report.ok and not lost and masks is None and same_model:  # with other weights, the first node that reads one departs
        _log.info("looking for the first node that departs")
        report.first_departure = first_departure(program, *_where_it_differs(case, eager, rows, others), allowed)
        if report.first_departure is None:
            report.notes.append(note_on_no_departure(_functions(program)))
    return report


def _where_it_differs(case: Case, eager: EagerStep, rows: list[Row], others: list[Elsewhere]) -> tuple[Case, list[torch.Tensor | None]]:
    """The example, unless all is equal there; and the cotangents."""
    bad = {row.kind for row in rows if not row.ok}
    if bad <= set(ELSEWHERE):
        for other in others:
            if other.kind in bad and other.case is not None and other.eager is not None:
                return other.case, other.eager.cotangents
    return case, eager.cotangents


def _refuse_no_path(eager: EagerStep, found: FileStep | str) -> None:
    """A file without any gradient says nothing of the model, unless eager's are all zero: behind torch.round they are."""
    assert isinstance(found, FileStep)
    if shapes_of(found.outputs) != shapes_of(eager.outputs):
        return  # that is said in the report
    wanted = [has for has, g in zip(found.differentiable, eager.cotangents, strict=False) if g is not None]
    if wanted and not any(wanted) and any(largest(g) for g in eager.gradients.values() if g is not None):
        raise RunError("the outputs have a gradient in eager, and none in the file: no operator on their way is differentiable there")


def _facts(case: Case, model: ir.Model, made_by: str, size: int, found: FileRun, providers: Sequence[Any] | None) -> dict[str, Any]:
    import onnxruntime  # not installed where verify is not used

    parameters = list(case.model.parameters())
    return {
        "model": type(case.model).__name__,
        "exporter": made_by,
        "mode": "training" if case.model.training else "evaluation",
        "parameters": f"{sum(p.numel() for p in parameters):,} in {len(parameters)} tensor{'' if len(parameters) == 1 else 's'}",
        "nodes": sum(1 for _ in ir.traversal.RecursiveGraphIterator(model.graph)),
        "nodes of the gradient graph": found.backward_nodes,
        "stop-gradient marks": model.metadata_props.get(MARK_COUNT_KEY, "0"),
        "file": f"{size:,} bytes",
        "opset": model.opset_imports.get("", ""),
        "versions": f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, Python {sys.version.split()[0]}",
        **({} if providers is None else {"execution providers": said_of(providers)}),
    }


def _functions(program: Program) -> dict[str, int]:
    """How often each Function is called, as a PythonOp or as an ONNX function."""
    names = [name for node in walk(flattened(program.model).graph) if is_python_op(node) and (name := function_of(node))]
    return dict(Counter([*names, *(call.function for call in program.portable if call.kind == "function")]).most_common())
