"""verify(): the round trip as proof. Export, reopen in a fresh process, run on onnxruntime, compare with eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.case import Case
from exporter.forward.export import export
from exporter.forward.inputs import named_tensors
from exporter.module.load import draw_seed
from exporter.verification.masks import Masks, OtherDraws
from exporter.verification.provenance import node_of
from exporter.verification.report import Report, Row
from symbolics.errors import FormatError, PythonopError, RunError, TrustError, UnsupportedOperatorError
from symbolics.node.metadata import read_state
from symbolics.node.names import CALL_ATTRIBUTE, MARK_COUNT_KEY, OUTPUTS_KEY, PYTHON_OP

__all__ = ["names_in", "verify"]

#: What a difference may be at least, relative: some hundred roundings of the type.
_FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: How much larger than eager's own error the file's may be: it rounds in another order.
_FACTOR = 10.0
#: Above this, eager's own error says that the function is not smooth (it rounds, sorts or thresholds): float64 takes other turns.
_ROUGH = 1e-3
_SEED = 20240229
#: Who reads a tensor is said by the node behind these.
_LAYOUT = frozenset(("Transpose", "Reshape", "Identity", "Cast", "Unsqueeze", "Squeeze"))


def verify(
    model: torch.nn.Module | Case,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamo: bool = True,
    setup: str | None = None,
    allow: Iterable[Any] | None = None,
    inline: Iterable[Any] = (),
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    bisect: bool = False,
    steps: int = 5,
    timeout: float = 600.0,
) -> Report:
    """Whether a model's ONNX file and its gradients equal eager PyTorch's.

    The model is exported, saved, opened by another Python process that knows the file alone, and run there on
    onnxruntime with its gradient graph. Outputs and the gradients of every parameter and float input are compared with
    eager PyTorch, for one random cotangent. Where the model drops out, eager drops what the file drops. Where the model also runs in float64, that is the reference, and the tolerance
    comes from eager's own error against it.

    Args:
        model: The model, in the mode that the file should have; or a Case, which brings the arguments. It is not changed.
        args, kwargs: Example arguments of its forward.
        dynamo: Which of torch's exporters.
        setup: ``package.module:function``, called first in the fresh process: it registers (`exporter.register`) what
            cannot be imported, such as classes of ``__main__`` and classes inside functions.
        allow: What that process may import. Default: what the exported file names, which this process has just written.
        inline, dynamic_shapes, opset_version: As `exporter.export` takes them.
        bisect: Where something differs, look for the first node that departs (`Report.first_departure`); not in a model that drops out.
        steps: How often a step is run for the times.
        timeout: Seconds that the fresh process may take.

    Raises:
        ExportError: The model cannot be exported.
        TrustError: The fresh process cannot resolve a class; the message names the remedy.
        RunError: It failed otherwise; the message has the end of its account. Or no output of the file has a gradient, and
            eager's gradients are not all zero.
        PythonopError: The model draws random numbers other than Dropout's, so that no two runs are comparable.
    """
    case = model if isinstance(model, Case) else Case(model, args, kwargs, dynamic_shapes=dynamic_shapes, inline=tuple(inline))
    inputs = case.args if isinstance(case.args, (tuple, list)) else (case.args,)
    keywords = case.kwargs or {}
    eager = _Eager.run(case.model, tuple(inputs), keywords)
    draws = _draws(case.model, tuple(inputs), keywords, eager)
    begin = time.perf_counter()
    program = export(
        copy.deepcopy(case.model),
        tuple(inputs),
        case.kwargs,
        dynamo=dynamo,
        dynamic_shapes=case.dynamic_shapes,
        inline=case.inline,
        opset_version=opset_version,
    )
    seconds = {"export": time.perf_counter() - begin}
    masks = None
    if draws:
        eager, masks = _with_the_files_masks(case.model, tuple(inputs), keywords, eager, program.model)
    precise = _precise(case.model, tuple(inputs), keywords, eager, masks)
    allowed = [*names_in(program.model), *case.allow] if allow is None else list(allow)
    with tempfile.TemporaryDirectory(prefix="pythonop-verify-") as folder:
        path = Path(folder, "model.onnx")
        program.save(path)
        found = _in_a_fresh_process(path, eager, allowed, setup, steps, timeout)
        size = sum(file.stat().st_size for file in Path(folder).glob("model.onnx*"))
    _refuse_no_path(eager, found)
    seconds.update(found["seconds"])
    seconds["eager step"] = _eager_seconds(case.model, tuple(inputs), keywords, eager, steps)
    places = _places(program.model)
    rows = [replace(row, node=places.get((row.kind, row.name), "")) for row in _compare(eager, precise, found)]
    report = Report(rows, _facts(case, program.model, dynamo, size, found), _functions(program.model), seconds)
    if bisect and not report.ok and masks is None:
        from exporter.verification.bisect import first_departure

        report.first_departure = first_departure(program, case.model, tuple(inputs), keywords, eager.cotangents, allowed)
    return report


# ------------------------------------------------------------------------------------------------------------- eager


@dataclass
class _Eager:
    """One step of the model itself.

    Attributes:
        inputs: name -> the tensor given, detached.
        outputs: The tensors that it returned, flat.
        cotangents: One an output; None where it has no gradient.
        gradients: (kind, name) -> gradient, None where eager has none.
    """

    inputs: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    gradients: dict[tuple[str, str], torch.Tensor | None]

    @classmethod
    def run(
        cls,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind: torch.dtype | None = None,
        given: list[Any] | None = None,
        masks: Masks | None = None,
    ) -> _Eager:
        """Run a copy of the model; with ``kind`` in that type, with ``masks`` instead of its dropouts' own."""
        model = copy.deepcopy(model)
        if kind is not None:
            model = model.to(kind)
        leaves: dict[int, torch.Tensor] = {}

        def fresh(value: torch.Tensor) -> torch.Tensor:
            if not value.is_floating_point():
                return value.detach().clone()
            leaf = value.detach().clone() if kind is None else value.detach().to(kind)
            leaves[id(value)] = leaf.requires_grad_()
            return leaf.clone()  # no leaf: a model may change its input in place

        named = named_tensors(model, args, kwargs)
        with torch.enable_grad(), contextlib.nullcontext() if masks is None else masks.given():
            copies, keywords = pytree.tree_map_only(torch.Tensor, fresh, (args, kwargs))
            outputs = [leaf for leaf in pytree.tree_leaves(model(*copies, **keywords)) if isinstance(leaf, torch.Tensor)]
            if given is None:
                generator = torch.Generator().manual_seed(_SEED)
                given = [
                    torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) if out.requires_grad else None
                    for out in outputs
                ]
            roots = [(out, g) for out, g in zip(outputs, given, strict=True) if g is not None]
            if roots:
                torch.autograd.backward([out for out, _ in roots], [g.to(out.dtype) for out, g in roots])
        gradients = {("parameter gradient", name): p.grad for name, p in model.named_parameters() if p.requires_grad}
        gradients |= {("input gradient", name): leaves[id(t)].grad for name, t in named.items() if t.is_floating_point()}
        return cls({name: t.detach() for name, t in named.items()}, [out.detach() for out in outputs], list(given), gradients)


def _draws(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: _Eager, masks: Masks | None = None) -> bool:
    """Whether another run gives another result."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(_SEED + 1)
        again = _Eager.run(model, args, kwargs, given=eager.cotangents, masks=masks)
    finally:
        torch.random.set_rng_state(state)
    return any(_difference(one, two) > 1e-3 for one, two in zip(again.outputs, eager.outputs, strict=True) if one.is_floating_point())


def _with_the_files_masks(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: _Eager, file: ir.Model
) -> tuple[_Eager, Masks]:
    """Eager again, with the masks that the fresh process will draw.

    Raises:
        PythonopError: The model draws something else.
    """
    try:
        masks = Masks(file, int(draw_seed(torch.Generator().manual_seed(_SEED))))
        eager = _Eager.run(model, args, kwargs, given=eager.cotangents, masks=masks)
        if not _draws(model, args, kwargs, eager, masks):
            return eager, masks
        reason = "not by Dropout alone"
    except (OtherDraws, UnsupportedOperatorError) as error:
        reason = str(error)
    raise PythonopError(
        f"two runs of the model with one input differ: it draws random numbers{_drawing(model)}, and eager and onnxruntime draw different ones, so that "
        f"nothing can be compared ({reason}). Verify the same model with dropout 0 (`for m in model.modules(): if hasattr(m, 'p'): m.p = 0.0`, or the "
        "dropout arguments of its config), which leaves all else in training mode, or in eval()"
    )


_DRAWING = (
    torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout, torch.nn.RReLU,
)  # fmt: skip


def _drawing(model: torch.nn.Module) -> str:
    """The modules that are known to draw, for a message."""
    found = [
        f"{type(module).__name__} {name!r}"
        for name, module in model.named_modules()
        if isinstance(module, _DRAWING) and module.training and getattr(module, "p", True)
    ]
    return f" ({', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''})" if found else ""


def _precise(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: _Eager, masks: Masks | None) -> _Eager | None:
    """The same step in float64, None where the model cannot run in it."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} | {
        t.dtype for t in eager.inputs.values() if t.is_floating_point()
    }
    if kinds <= {torch.float64}:
        return None
    try:
        found = _Eager.run(model, args, kwargs, torch.float64, eager.cotangents, masks)
    except Exception:  # a Function of fixed types: eager itself is then the reference
        return None
    same = len(found.outputs) == len(eager.outputs) and all(
        one.shape == two.shape for one, two in zip(found.outputs, eager.outputs, strict=True)
    )
    return found if same and found.gradients.keys() == eager.gradients.keys() else None


def _eager_seconds(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: _Eager, steps: int) -> float:
    model = copy.deepcopy(model)
    times = []
    for _ in range(max(1, steps)):
        begin = time.perf_counter()
        outputs = [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        roots = [(out, g) for out, g in zip(outputs, eager.cotangents, strict=True) if g is not None and out.requires_grad]
        if roots:
            torch.autograd.backward([out for out, _ in roots], [g for _, g in roots])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# ---------------------------------------------------------------------------------------------------- a fresh process


def names_in(model: ir.Model) -> list[str]:
    """The classes that a file names: Functions, and the types of their arguments and of the model's result."""
    found: dict[str, None] = {}

    def walk(data: Any) -> None:
        if isinstance(data, dict):
            for key, payload in data.items():
                if key in ("$enum", "$namedtuple", "$dataclass", "$mapping") and isinstance(payload, list):
                    found[payload[0]] = None
                elif key == "$callable":
                    found[payload] = None
                walk(payload)
        elif isinstance(data, list):
            for item in data:
                walk(item)

    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == PYTHON_OP and "name" in node.attributes:
            found[node.attributes["name"].as_string()] = None
            if CALL_ATTRIBUTE in node.attributes:
                walk(json.loads(node.attributes[CALL_ATTRIBUTE].as_string()))
    if OUTPUTS_KEY in model.metadata_props:
        walk(json.loads(model.metadata_props[OUTPUTS_KEY]))
    return [name for name in found if ":" in name]


def _in_a_fresh_process(path: Path, eager: _Eager, allow: list[Any], setup: str | None, steps: int, timeout: float) -> dict[str, Any]:
    """One step of the saved file, by a Python that has seen neither the model nor its module."""
    patterns = [entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}" for entry in allow]
    job = {
        "path": str(path), "allow": patterns, "setup": setup, "inputs": eager.inputs, "cotangents": eager.cotangents, "steps": steps, "seed": _SEED,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    folder = path.parent
    torch.save(job, folder / "job.pt")
    entries = [entry or os.getcwd() for entry in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    command = [sys.executable, "-m", "exporter.verification.worker", str(folder / "job.pt"), str(folder / "result.pt")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
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
        raise kinds.get(result["kind"], RunError)(f"in the fresh process: {result['kind']}: {result['error']}{remedy}")
    return result


# ----------------------------------------------------------------------------------------------------------- compare


def _refuse_no_path(eager: _Eager, found: dict[str, Any]) -> None:
    """A file without any gradient says nothing of the model, unless eager's are all zero: behind torch.round they are."""
    wanted = [has for has, g in zip(found["differentiable"], eager.cotangents, strict=False) if g is not None]
    if wanted and not any(wanted) and any(_largest(g) for g in eager.gradients.values() if g is not None):
        raise RunError("the outputs have a gradient in eager, and none in the file: no operator on their way is differentiable there")


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs are none."""
    a, b = got.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs())
    return float(gap.max()) if gap.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def _compare(eager: _Eager, precise: _Eager | None, found: dict[str, Any]) -> list[Row]:
    rows = []
    outputs = found["outputs"]
    for index, output in enumerate(eager.outputs):
        got = outputs[index] if index < len(outputs) else None
        rows.append(_row(f"output {index}", "output", output, got, precise.outputs[index] if precise is not None else None, 0.0))
    if len(outputs) > len(eager.outputs):
        rows.append(
            Row(
                "outputs",
                "output",
                (),
                "",
                float("nan"),
                None,
                0.0,
                "",
                False,
                f"the file has {len(outputs)} outputs, eager {len(eager.outputs)}",
            )
        )
    scales = [_largest(g) for g in eager.gradients.values() if g is not None]
    noise = max(scales, default=0.0)
    for (kind, name), wanted in eager.gradients.items():
        got = found["gradients"].get(f"{kind}:{name}")
        better = precise.gradients[kind, name] if precise is not None else None
        if wanted is None and got is None:
            continue
        if got is None and wanted is not None and not wanted.any():
            got = torch.zeros_like(wanted)  # where nothing can come through (torch.round), eager has zeros and a graph no path
        rows.append(_row(name, kind, wanted, got, better, noise))
    return rows


def _row(name: str, kind: str, wanted: torch.Tensor | None, got: torch.Tensor | None, better: torch.Tensor | None, noise: float) -> Row:
    shown = wanted if wanted is not None else got
    assert shown is not None
    about = (name, kind, tuple(shown.shape), str(shown.dtype).removeprefix("torch."))
    problem = ""
    if wanted is None:
        problem = "eager has no gradient, the file has one"
    elif got is None:
        problem = "missing in the file, eager has it"
    elif got.shape != wanted.shape or got.dtype != wanted.dtype:
        problem = f"the file gives {str(got.dtype).removeprefix('torch.')} of shape {list(got.shape)}"
    if problem:
        return Row(*about, float("nan"), None, 0.0, "", False, problem)
    assert wanted is not None and got is not None
    if not wanted.is_floating_point():
        differ = int((got != wanted).sum())
        return Row(
            *about, float(differ), None, 0.5, about[3], differ == 0, f"{differ} of {wanted.numel()} elements differ" if differ else ""
        )
    # A gradient that is 0 but for rounding (a bias in front of a norm) is measured by the largest one of the model.
    scale = max(_largest(wanted), 0.01 * noise) or 1.0
    floor = _FLOOR.get(wanted.dtype, 1e-1)
    own = None if better is None else _difference(wanted, better) / scale
    if better is None or own is None or own > max(_ROUGH, floor) or own != own:
        error, tolerance, reference, own = _difference(got, wanted) / scale, floor, about[3], None
    else:
        error, tolerance, reference = _difference(got, better) / scale, max(floor, _FACTOR * own), "float64"
    return Row(*about, error, own, tolerance, reference, error <= tolerance)


def _facts(case: Case, model: ir.Model, dynamo: bool, size: int, found: dict[str, Any]) -> dict[str, Any]:
    import onnxruntime

    parameters = list(case.model.parameters())
    return {
        "model": type(case.model).__name__,
        "exporter": "torch.export" if dynamo else "TorchScript",
        "mode": "training" if case.model.training else "evaluation",
        "parameters": f"{sum(p.numel() for p in parameters):,} in {len(parameters)} tensors",
        "nodes": sum(1 for _ in ir.traversal.RecursiveGraphIterator(model.graph)),
        "nodes of the gradient graph": found["backward_nodes"],
        "stop-gradient marks": model.metadata_props.get(MARK_COUNT_KEY, "0"),
        "file": f"{size:,} bytes",
        "opset": model.opset_imports.get("", ""),
        "versions": f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, Python {sys.version.split()[0]}",
    }


def _places(model: ir.Model) -> dict[tuple[str, str], str]:
    """(kind, name) of a row -> the node that makes the output, or the first that reads the parameter or input."""

    def reader(value: ir.Value | None) -> str:
        node = None
        while value is not None and (use := next(iter(value.uses()), None)) is not None:
            node = use.node
            value = node.outputs[0] if node.op_type in _LAYOUT else None
        return node_of(node)

    graph = model.graph
    found = {("output", f"output {index}"): node_of(value.producer()) for index, value in enumerate(graph.outputs)}
    found |= {("input gradient", str(value.name)): reader(value) for value in graph.inputs}
    state = read_state(model.metadata_props) or {}
    return found | {("parameter gradient", name): reader(graph.initializers.get(entry.initializer)) for name, entry in state.items()}


def _functions(model: ir.Model) -> dict[str, int]:
    calls = (node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.op_type == PYTHON_OP and "name" in node.attributes)
    return dict(Counter(node.attributes["name"].as_string() for node in calls).most_common())
