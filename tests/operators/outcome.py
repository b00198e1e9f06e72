"""One call on one exporter, in one word.

`works`, `torch.onnx fails` (also without us), `refused` (an error of ours), `kink` (a gradient at a point without a derivative, where
eager and the file take different ones of those that there are; an index of one among equals), `inexact` (onnxruntime's own kernel of the
operator is exact to two units in the last place of 1, not of a small result), `random`, `wrong`, `crash`.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import os
import pickle
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import exporter
from exporter.errors import PythonopError
from tests.operators.numbers import Eager, Other, Reference, kink, reference, run
from tests.operators.samples import Call, Group, Operator

__all__ = ["CHOICES", "KERNELS", "Outcome", "opaque_outcomes", "outcomes", "said"]

#: torch's documentation leaves open which of equal elements these name, and where it does not, the element is the same.
CHOICES = re.compile(r"arg(max|min|sort)|sort|topk|median|mode|kthvalue|cum(max|min)|(max|min)_reduction|max_pool")

#: Operators that are one kernel of onnxruntime each, which adds to 1, or takes from it, what may be small.
KERNELS = re.compile(r"sigmoid|nn_functional_(celu|elu|mish|selu|silu|softplus)")
_EXACT = 2 * torch.finfo(torch.float32).eps

_RIGHT = ("works", "kink", "inexact")
_ALONE = 120  # seconds
_SEEDS = 4  # so many draws that agree are no accident: bernoulli(0) is 0
_NOT_RUN = "onnxruntime cannot run the model"


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        word: See the module.
        stage: How far it came: export, load, forward, backward.
        why: The error, or the first difference; one line.
        trains: Whether there is a gradient to compare.
    """

    word: str
    stage: str
    why: str = ""
    trains: bool = True


class _EagerRefuses(Exception):
    """Eager takes no such call: there is nothing to compare with."""


@dataclass
class _Expected:
    tensors: list[torch.Tensor]
    wrt: list[int]
    seeds: list[torch.Tensor]
    eager: Eager
    references: list[Reference]
    ordered: bool


def outcomes(name: str, group: Group, dynamo: bool, opaque: str = "") -> Iterator[tuple[str, Outcome | str]]:
    """Each kind of a group with its outcome; "eager" and "file" before eager or a file are tried, which may end the process.

    A kind that eager refuses does not appear again.

    Args:
        name: The operator's, as in `samples.operators`.
        group: The calls.
        dynamo: Which of torch's exporters.
        opaque: An entry of ``opaque=``; another process exports then, and what works says as its why which nodes there are.
    """
    make = functools.partial(_loaded_opaque, opaque=opaque) if opaque else _loaded
    loaded: Any = None  # by the first kind that is not random
    made: Any = None  # by the last one that a file was made for
    first = ""
    for number, (kind, tensors) in enumerate(group.kinds.items()):
        yield kind, "eager"
        try:
            expected = _expected(group.call, tensors)
        except _EagerRefuses:
            if not number:
                return
            continue
        yield kind, "file"
        if expected is None:
            yield kind, Outcome("random", "forward")
            continue
        outcome = None if loaded is None else _compared(name, loaded, group.call, expected)
        if outcome is None or (first in _RIGHT and outcome.word not in _RIGHT):
            # The first kind; and a file that is right, but was traced with other values, may differ by right.
            made = make(group.call, tensors, dynamo)
            outcome = made if isinstance(made, Outcome) else _compared(name, made, group.call, expected)
            outcome.trains = outcome.trains and bool(expected.wrt)
            if loaded is None:
                loaded, first = made, outcome.word
        if outcome.stage in ("load", "forward") and (outcome.word == "wrong" or outcome.why.startswith(_NOT_RUN)):
            _torch_too(outcome, group.call, expected, dynamo)
        if opaque and outcome.word == "works":
            outcome.why = ", ".join(dict.fromkeys(made.nodes))
        yield kind, outcome
        if isinstance(loaded, Outcome):
            return  # other values make no other file


def opaque_outcomes(name: str, group: Group, dynamo: bool) -> Iterator[tuple[str, Outcome | str]]:
    """As `outcomes`, with opaque="missing"; what does not work so is tried with all operators named, and says so where that works."""
    for kind, found in outcomes(name, group, dynamo, "missing"):
        if isinstance(found, Outcome) and found.word not in (*_RIGHT, "random"):
            for _, named in outcomes(name, Group(group.call, {kind: group.kinds[kind]}), dynamo, "aten::*"):
                if isinstance(named, Outcome) and named.word in _RIGHT:
                    named.why = f"named: {named.why}"
                    found = named
        yield kind, found


# --------------------------------------------------------------------------------------------------------------- eager


def _expected(call: Call, tensors: list[torch.Tensor]) -> _Expected | None:
    """What eager makes of a call; None: not the same each time, as it draws numbers or leaves memory as it was."""
    model = Operator(call)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, *others = [run(model, tensors, (), seed=seed) for seed in range(_SEEDS)]
            wrt = _differentiable(model, tensors)
            draws = torch.Generator().manual_seed(1)
            seeds = [torch.rand(t.shape, generator=draws) + 0.5 for t in first.outputs]
            single, _, references = reference(model, tensors, wrt, seeds)
            other = run(model, tensors, wrt, seeds, seed=1).gradients
    except Exception as error:
        raise _EagerRefuses(str(error)) from error
    if not first.outputs:
        raise _EagerRefuses("no tensor comes out")
    slopes = [(one, two) for one, two in zip(single.gradients.values(), other.values(), strict=True) if one is not None and two is not None]
    if not all(_same(first.outputs, each.outputs) for each in others) or not all(_same([one], [two]) for one, two in slopes):
        return None
    args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
    ordered = call.function is not torch.unique or kwargs.get("sorted", True) or kwargs.get("dim") is not None
    return _Expected(tensors, wrt, seeds, single, references, ordered)


def _same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two, strict=True))


def _differentiable(model: Operator, tensors: list[torch.Tensor]) -> list[int]:
    """The float inputs that eager gives a gradient: all, or those that it takes one by one."""

    def takes(wrt: list[int]) -> bool:
        try:
            outputs = run(model, tensors, wrt).outputs
            run(model, tensors, wrt, [torch.ones_like(t) for t in outputs])
        except Exception:
            return False
        return True

    floats = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    if takes(floats):
        leaves = [t.detach().clone().requires_grad_(i in floats) for i, t in enumerate(tensors)]
        made = model(*leaves)
        return floats if any(t.requires_grad for t in (made if isinstance(made, tuple) else (made,))) else []
    return [i for i in floats if takes([i])]


# -------------------------------------------------------------------------------------------------------------- export


def _loaded(call: Call, tensors: list[torch.Tensor], dynamo: bool) -> Any:
    """The call's file as a module, or what came of the attempt."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = exporter.export(Operator(call), tuple(t.clone() for t in tensors), dynamo=dynamo)
        except Exception as error:
            alone = _alone(call, tensors, dynamo)
            if isinstance(alone, str):
                return Outcome("torch.onnx fails", "export", alone)
            return _failed(error, "export")
        path = Path(folder) / "model.onnx"
        try:
            program.save(path)
            return exporter.load(path)
        except Exception as error:
            return _failed(error, "load")


def _failed(error: Exception, stage: str) -> Outcome:
    text = said(error)
    found = re.search(_NOT_RUN, text)
    if found is not None:  # nobody refused it: onnxruntime was handed a file that it cannot run
        return Outcome("crash", stage, text[found.start() :])
    refused = isinstance(error, PythonopError) and not isinstance(error, torch.onnx.OnnxExporterError)
    return Outcome("refused" if refused else "crash", stage, text)


def said(error: BaseException) -> str:
    """An error in one line, without what changes from machine to machine."""
    if isinstance(error, PythonopError) and isinstance(error, torch.onnx.OnnxExporterError) and error.__context__ is not None:
        error = error.__context__  # torch's own, which we tell in fewer words
    while error.__cause__ is not None and not isinstance(error, PythonopError):
        error = error.__cause__  # torch.onnx says first what everybody should try
    text = f"{type(error).__name__}: {error}".split("\n\n")[0]
    text = re.sub(r"\x1b\[\d+m|\(?/[\w./-]+/site-packages/|/tmp/\w+/", "", re.sub(r"0x[0-9a-f]+", "0x…", text))
    text = " ".join(text.split())
    return text[:220] + ("…" if len(text) > 220 else "")


def _loaded_opaque(call: Call, tensors: list[torch.Tensor], dynamo: bool, opaque: str) -> Any:
    """The file of another process, where operators became ``nodes``, as a module; or what came of the attempt."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        made = _apart(lambda: _opaque_nodes(call, tensors, dynamo, opaque, path))
        if isinstance(made, str):
            return Outcome("crash", "export", made)
        if isinstance(made, Outcome):
            return made
        try:
            module: Any = exporter.load(path, allow=made)
            module.nodes = made
            return module
        except Exception as error:
            return _failed(error, "load")


def _opaque_nodes(call: Call, tensors: list[torch.Tensor], dynamo: bool, opaque: str, path: Path) -> list[str] | Outcome:
    """Export and save; what became a node of its own."""
    torch._dynamo.reset()
    try:
        program = exporter.export(Operator(call), tuple(t.clone() for t in tensors), dynamo=dynamo, opaque=opaque)
        program.save(path)
    except Exception as error:
        failed = _failed(error, "export")
        if isinstance(error, torch.onnx.OnnxExporterError):
            failed.word = "torch.onnx fails"
        return failed
    return [node.function for node in program.opaque]


def _alone(call: Call, tensors: list[torch.Tensor], dynamo: bool) -> bytes | str:
    """The file that torch.onnx.export makes without us, or its error; in a process of its own, which it may end."""
    made: bytes | str = _apart(lambda: _exported(call, tensors, dynamo))
    return made


def _apart(make: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own, which it may end: that is told in words then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made"
        child = os.fork()
        if child == 0:
            signal.alarm(_ALONE)
            faulthandler.disable()  # pytest's would write pages about a death that is expected
            try:
                path.write_bytes(pickle.dumps(make()))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if path.exists():
            return pickle.loads(path.read_bytes())
    return f"the process died of {signal.Signals(-os.waitstatus_to_exitcode(status)).name}"


def _exported(call: Call, tensors: list[torch.Tensor], dynamo: bool) -> bytes | str:
    torch._dynamo.reset()
    file = io.BytesIO()
    options: dict[str, Any] = {"verbose": False} if dynamo else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(Operator(call), tuple(t.clone() for t in tensors), file, dynamo=dynamo, **options)
    except Exception as error:
        return said(error)
    return file.getvalue()


def _torch_too(outcome: Outcome, call: Call, expected: _Expected, dynamo: bool) -> None:
    """Say whether the file of torch.onnx alone has the same fault; one that does not run, either, is its own."""
    import onnxruntime

    made = _alone(call, expected.tensors, dynamo)
    if isinstance(made, str):
        outcome.why += " (torch.onnx alone fails)"
        return
    try:
        session = onnxruntime.InferenceSession(made, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        found = session.run(None, {name: t.numpy() for name, t in zip(names, expected.tensors)})
    except Exception:
        if outcome.word == "crash":
            outcome.word = "torch.onnx fails"
        outcome.why += " (the file of torch.onnx alone does not run)"
        return
    problem = _outputs([torch.as_tensor(array) for array in found], expected, "").problem
    outcome.why += (
        " (torch.onnx alone: the same)" if problem and outcome.word == "wrong" else "" if problem else " (torch.onnx alone is right)"
    )


# ------------------------------------------------------------------------------------------------------------- compare


def _compared(name: str, module: Any, call: Call, expected: _Expected) -> Outcome:
    """A forward and a backward of the loaded file beside eager's."""
    leaves = [t.detach().clone().requires_grad_(i in expected.wrt) for i, t in enumerate(expected.tensors)]
    trains = bool(expected.wrt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = module(*leaves)
        except Exception as error:
            return _without_gradient(name, module, expected, error)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        seen = _outputs(outputs, expected, name)
        if seen.problem:
            return Outcome("wrong", "forward", seen.problem, trains)
        try:
            pairs = [(t, seed) for t, seed in zip(outputs, expected.seeds) if t.requires_grad]
            if pairs and trains:
                torch.autograd.backward([t for t, _ in pairs], [seed.to(t.dtype) for t, seed in pairs])
        except Exception as error:
            return _failed(error, "backward")
    outcome = _gradients(name, leaves, call, expected)
    if outcome is not None and outcome.word == "wrong" and seen.choice and _same_shares(leaves, expected):
        return Outcome("kink", "backward", "the gradient of one among equals", trains)
    if outcome is not None:
        return outcome
    if seen.choice:
        return Outcome("kink", "backward", "an index of one among equals", trains)
    return Outcome("inexact" if seen.inexact else "works", "backward", seen.inexact, trains)


def _without_gradient(name: str, module: Any, expected: _Expected, error: Exception) -> Outcome:
    """A run that failed: the forward's fault, or that of the gradients which it is prepared for?"""
    try:
        with torch.no_grad():
            result = module(*[t.clone() for t in expected.tensors])
    except Exception as alone:
        return _failed(alone, "forward")
    problem = _outputs(list(result) if isinstance(result, (tuple, list)) else [result], expected, name).problem
    return Outcome("wrong", "forward", problem) if problem else _failed(error, "backward")


@dataclass
class _Seen:
    """What became of the outputs.

    Attributes:
        problem: The first difference; the rest does not matter then.
        choice: Whether indices of equals differ.
        inexact: The first difference that is no larger than what onnxruntime's kernel promises.
    """

    problem: str = ""
    choice: bool = False
    inexact: str = ""


def _outputs(found: list[torch.Tensor], expected: _Expected, name: str) -> _Seen:
    """The outputs beside eager's."""
    wanted = expected.eager.outputs
    if len(found) != len(wanted):
        return _Seen(f"{len(found)} outputs, {len(wanted)} in eager")
    if not expected.ordered:
        found, references = _ascending(found), [Reference(t, t, torch.zeros_like(t, dtype=torch.float64)) for t in _ascending(wanted)]
    else:
        references = expected.references
    seen = _Seen()
    for number, (one, two) in enumerate(zip(found, references)):
        problem, where = _unequal(one, two)
        said = f"output {number}: {problem}"
        if problem and one.dtype == torch.int64 and one.shape == two.single.shape and CHOICES.search(name) and _equals(expected):
            seen.choice = True
        elif problem and _is_exact(name, one, two, where, expected.tensors[0]):
            seen.inexact = seen.inexact or said
        elif problem:
            return _Seen(said)
    return seen


def _is_exact(name: str, found: torch.Tensor, wanted: Reference, where: torch.Tensor | None, x: torch.Tensor) -> bool:
    """Whether all that differs does so by no more than the operator's kernel promises; silu and mish are x times a kernel."""
    if where is None or not KERNELS.fullmatch(name):
        return False
    promised = (
        _EXACT * x.double().abs().clamp(min=1) if name.endswith(("silu", "mish")) else torch.full_like(found, _EXACT, dtype=torch.float64)
    )
    return bool(((found.detach().double() - wanted.double.double()).abs() <= promised)[where].all())


def _ascending(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of unique(sorted=False), whose order nobody promises, as sorted=True has them: values, then places, counts or both."""
    values, order = outputs[0].sort()
    rest = []
    for t in outputs[1:]:  # numbers of values, of which 0 is one; or how often there is each
        is_counts = t.shape == values.shape and bool((t > 0).all())
        rest.append(t[order] if is_counts else order.argsort()[t])
    return [values, *rest]


def _equals(expected: _Expected) -> bool:
    """Whether the first input has equal elements, among which an index may choose."""
    first = expected.tensors[0]
    return first.numel() != first.unique().numel()


def _same_shares(leaves: list[torch.Tensor], expected: _Expected) -> bool:
    """Whether the elements of each gradient are eager's in another order."""
    pairs = [(leaves[i].grad, eager) for i, eager in expected.eager.gradients.items() if eager is not None]
    return all(
        found is not None and torch.allclose(found.flatten().sort()[0], eager.flatten().sort()[0], 1e-4, 1e-6) for found, eager in pairs
    )


def _gradients(name: str, leaves: list[torch.Tensor], call: Call, expected: _Expected) -> Outcome | None:
    """The first difference among the gradients; None: there is none."""
    rest = iter(expected.references[len(expected.eager.outputs) :])
    others: dict[int, Other] = {}
    said: list[str] = []
    inexact = ""
    for number in expected.wrt:
        wanted = Reference(*[torch.zeros_like(leaves[number])] * 2, torch.zeros_like(leaves[number], dtype=torch.float64))
        if expected.eager.gradients[number] is not None:
            wanted = next(rest)
        found = leaves[number].grad
        found = torch.zeros_like(leaves[number]) if found is None else found
        problem, where = _unequal(found, wanted)
        if where is None and problem:
            return Outcome("wrong", "backward", f"gradient {number}: {problem}")
        # Eager has no number to compare with where it gives nan; what is there instead may be anything.
        where = where & ~(wanted.single.isnan() & wanted.double.isnan()) if where is not None else None
        if where is not None and where.any() and _is_exact(name, found, wanted, where, expected.tensors[0]):
            inexact = inexact or f"gradient {number}: {problem}"
        elif where is not None and where.any():
            said.append(f"gradient {number}: {problem}")
            others[number] = Other(found, wanted.single, where)
    if not others:
        return Outcome("inexact", "backward", inexact) if inexact else None
    try:
        word = "kink" if kink(Operator(call), expected.tensors, expected.seeds, others) else "wrong"
    except Exception:  # no float64 here: no slopes
        word = "wrong"
    return Outcome(word, "backward", said[0])


def _unequal(found: torch.Tensor, wanted: Reference) -> tuple[str, torch.Tensor | None]:
    """The difference in words, and the elements that differ where shape and type are equal."""
    found, single = found.detach(), wanted.single
    if found.shape != single.shape or found.dtype != single.dtype:
        return f"{_kind(found)}, in eager {_kind(single)}", None
    where = wanted.differs(found)
    if not where.any():
        return "", None
    got, want = found[where].flatten(), single[where].flatten()
    some = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in (got[0].item(), want[0].item())]
    return f"{some[0]}, in eager {some[1]} ({got.numel()} of {where.numel()} differ)", where


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
