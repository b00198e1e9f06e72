"""Runs one row on one exporter and says what became of it."""

from __future__ import annotations

import copy
import re
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.utils import _pytree as pytree

import exporter
from exporter.files.trust import registered, unregister
from exporter.runtime.library import available
from symbolics.errors import PythonopWarning
from symbolics.node.metadata import changes_of
from tests.end_to_end.functions import arguments, backward, callables, calls, ctx_api, operators, outputs, warned  # noqa: F401  (they fill CASES)
from tests.end_to_end.functions.case import CASES, Case
from tests.end_to_end.functions.worker import ALLOW, ENGINES, Worker, seed
from tests.support import counted_applies, nodes

__all__ = ["ROWS", "Cell", "Row", "check_row"]

BATCH = torch.export.Dim("batch", min=2)


@dataclass(frozen=True)
class Row:
    """One line of rows.toml; see there."""

    id: str
    group: str
    what: str
    dynamo: str
    torchscript: str
    dynamo_says: str = ""
    torchscript_says: str = ""
    dynamo_portable: str = "works"
    torchscript_portable: str = "works"
    portable_says: str = ""
    portable_since: str = ""
    note: str = ""
    rule: str = ""


ROWS = [Row(**entry) for entry in tomllib.loads(Path(__file__).with_name("rows.toml").read_text())["row"]]


@dataclass
class Cell:
    """What became of a row on one exporter.

    Attributes:
        outcome: works, inlined, warned, registered, refused, torch, or wrong; of a portable file also opaque.
        message: The error or the warnings.
        engines: Those that ran it, forward and backward, equal to eager, twice.
    """

    outcome: str
    message: str = ""
    engines: list[str] = field(default_factory=list)


def check_row(name: str, dynamo: bool, worker: Worker, folder: Path, portable: bool = False) -> Cell:
    """Export, save, reopen in a fresh process, run forward and backward twice on each engine, compare with eager.

    Args:
        name: The case.
        dynamo: Which exporter.
        worker: The fresh process.
        folder: Where the file goes.
        portable: Whether the file is to run without Python: then it works where it has no PythonOp and names no class.
    """
    case, before = CASES[name], registered()
    actions = [(case.body.__module__, name, "setup")] if case.setup else []
    if case.setup:
        case.setup()
    try:
        cell = _check(case, dynamo, worker, folder, actions, portable)
        if case.register and cell.outcome == "refused":
            case.register()
            again = _check(case, dynamo, worker, folder, [*actions, (case.body.__module__, name, "register")], portable)
            if again.outcome == "works":
                return Cell("registered", cell.message, again.engines)
            return again
        return cell
    finally:
        for name in set(registered()) - set(before):
            unregister(name)


def _check(case: Case, dynamo: bool, worker: Worker, folder: Path, actions: list[tuple[str, str, str]], portable: bool) -> Cell:
    try:
        runs = [_eager(case, 0), _eager(case, 1)]
    except TypeError as error:  # eager itself takes no such call
        return Cell("torch", f"{type(error).__name__}: {error}")
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program = _export(case, dynamo, portable)
        except Exception as error:
            alone = _torch_alone(case, dynamo, folder)
            if alone is not None:
                return Cell("torch", alone)
            if not isinstance(error, exporter.ExportError):
                return Cell("wrong", f"{type(error).__name__}: {error}")
            return Cell("refused", str(error))
    said = [str(w.message) for w in caught if issubclass(w.category, PythonopWarning)]
    try:
        onnx.checker.check_model(program.model_proto, full_check=True)
    except Exception as error:
        return Cell("wrong", f"onnx.checker: {error}")
    path = folder / "model.onnx"
    program.save(path)
    names = [value.name for value in program.model.graph.inputs]
    if len(names) != len(runs[0].inputs):
        return Cell("wrong", f"the file has the inputs {names}")
    engines = [e for e in ENGINES if e == "reference" or available() is None]
    made = [value.name for value in program.model.graph.outputs]
    following = [(name, made.index(output)) for name, output in changes_of(program.model).carried.items()]
    differentiable = any(run.gradients for run in runs)
    count = len(nodes(program.model, "PythonOp"))
    alone = portable and not count
    job = {
        "path": str(path),
        "actions": [] if alone else actions,
        "gradient": differentiable or case.raises,
        "engines": engines,
        "allow": [] if alone else case.allow or ALLOW,
        "runs": [
            (
                dict(zip(names, run.inputs, strict=True)),
                {name: np.ones(v.shape, v.dtype) if s is None else s for name, v, s in zip(made, run.outputs, run.seeds)},
            )
            for run in runs
        ],
    }
    answer = worker.run(job)
    if "error" in answer:
        refusal = answer["error"].startswith(("TrustError", "UnsupportedOperatorError", "PythonopError", "RunError"))
        return Cell("refused" if refusal else "wrong", answer["error"])
    for engine, results in answer["ok"].items():
        for number, (run, (values, gradients)) in enumerate(zip(runs, results, strict=True)):
            returned, wrong = values[: len(values) - len(following)], ""
            for name, index in following:
                problem = _unequal(values[index], run.buffers[name], case.loose)
                wrong = wrong or (problem and f"the next value of {name}: {problem}")
            difference = wrong or _difference(run, returned, gradients, case, [names, case.loose])
            if difference:
                return Cell("wrong", f"run {number + 1} on {engine}: {difference}; it said {said}")
    if portable and program.portable:
        opaque = [call.reason for call in program.portable if call.kind == "PythonOp"]
        return Cell("opaque" if opaque else "works", "\n".join(opaque), engines)
    if not count or count != (runs[0].applies if case.applies is None else case.applies):
        return Cell("inlined", "\n".join(said), engines)
    return Cell("warned" if said else "works", "\n".join(said), engines)


def _export(case: Case, dynamo: bool, portable: bool) -> exporter.Program:
    torch.manual_seed(11)
    inputs = case.inputs()
    shapes = {"inputs": ({0: BATCH}, *[None] * (len(inputs) - 1))} if case.dynamic else None
    return exporter.export(case.wrap(case.model()), inputs, dynamo=dynamo, dynamic_shapes=shapes, portable=portable)


def _torch_alone(case: Case, dynamo: bool, folder: Path) -> str | None:
    """The error of torch's own exporter on the model, None where it has none."""
    torch.manual_seed(11)
    torch._dynamo.reset()
    inputs = case.inputs()
    shapes = {"inputs": ({0: BATCH}, *[None] * (len(inputs) - 1))} if case.dynamic else None
    options: dict[str, Any] = {"dynamic_shapes": shapes, "verbose": False} if dynamo else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(case.wrap(case.model()), inputs, str(folder / "alone.onnx"), dynamo=dynamo, **options)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        return f"{type(error).__name__}: {error}"
    return None


# ------------------------------------------------------------------------------------------------------------- eager


@dataclass
class _Eager:
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    seeds: list[np.ndarray | None]
    gradients: dict[Any, np.ndarray]  # a parameter's name, or the number of an input
    applies: int
    buffers: dict[str, np.ndarray]  # behind the forward
    error: str = ""


def _eager(case: Case, number: int) -> _Eager:
    model = case.model()
    torch.manual_seed(11 + number)
    inputs = list(case.inputs())
    if case.dynamic and number:
        inputs[0] = torch.randn(5, *inputs[0].shape[1:])
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    torch.manual_seed(0)
    seed(0)
    with counted_applies() as applies, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = copy.deepcopy(model)(*[t * 1 if t.requires_grad else t.clone() for t in leaves])
    count = len(applies)
    seed(0)
    result = model(*[t * 1 if t.requires_grad else t.clone() for t in leaves])
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    seeds = [torch.randn(t.shape).to(t.dtype) if t.requires_grad else None for t in made]
    pairs = [(t, s) for t, s in zip(made, seeds, strict=True) if s is not None]
    values = [t.detach().numpy().copy() for t in made]
    buffers = {name: buffer.detach().numpy().copy() for name, buffer in model.named_buffers()}
    error = ""
    if pairs:
        try:
            torch.autograd.backward([t for t, _ in pairs], [s.clone() for _, s in pairs])
        except Exception as raised:
            assert case.raises, raised
            error = str(raised)
    gradients: dict[Any, Any] = {name: p.grad for name, p in model.named_parameters()} | {i: t.grad for i, t in enumerate(leaves)}
    return _Eager(
        [t.detach().numpy().copy() for t in leaves],
        values,
        [None if s is None else s.numpy() for s in seeds],
        {k: g.to_dense().numpy() if g.layout is not torch.strided else g.numpy() for k, g in gradients.items() if g is not None},
        count,
        buffers,
        error,
    )


def _difference(run: _Eager, values: list[np.ndarray], gradients: Any, case: Case, how: list[Any]) -> str:
    names, tolerance = how
    if len(values) != len(run.outputs):
        return f"{len(values)} outputs, {len(run.outputs)} in eager"
    for i, (got, want) in enumerate(zip(values, run.outputs, strict=True)):
        if problem := _unequal(got, want, tolerance):
            return f"output {i}: {problem}"
    if case.raises:
        return (
            ""
            if isinstance(gradients, str) and run.error.split("\n")[0] in gradients
            else f"eager raises {run.error!r}, here: {gradients!r}"
        )
    if isinstance(gradients, str):
        return f"backward raised {gradients}"
    named = {name.removeprefix("_orig_mod."): gradient for name, gradient in (gradients or {}).items()}  # torch.compile's own prefix
    wanted = {names[k] if isinstance(k, int) else k: v for k, v in run.gradients.items()}
    for name, want in wanted.items():
        if name not in named:
            if want.any():
                return f"no gradient of {name}, in eager {want.ravel()[:4]}"
        elif problem := _unequal(named[name], want, tolerance):
            return f"gradient of {name}: {problem}"
    for name, got in named.items():
        if name not in wanted and np.asarray(got).any():
            return f"a gradient of {name}, which has none in eager"
    return ""


def _unequal(got: Any, want: np.ndarray, tolerance: float) -> str:
    got = np.asarray(got)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, in eager {want.dtype}{list(want.shape)}"
    if got.dtype.kind == "f":
        if not np.allclose(got, want, rtol=max(tolerance, 1e-2 if got.dtype == np.float16 else 0), atol=tolerance):
            return f"{got.ravel()[:4]}, in eager {want.ravel()[:4]}"
    elif not np.array_equal(got, want):
        return f"{got.ravel()[:4]}, in eager {want.ravel()[:4]}"
    return ""


def shown(message: str) -> str:
    """A message as the table shows it: one line, without what changes from machine to machine."""
    text = re.sub(r"(?<=\w):\d+(?=[: ,)])", "", message.split("\n\n")[0].replace("\n", " "))
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    return text[:300] + ("…" if len(text) > 300 else "")
