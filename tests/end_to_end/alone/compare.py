"""What torch.onnx.export alone makes of a model, and what it makes under the hook and through exporter.export: the same, or better."""

from __future__ import annotations

import copy
import inspect
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch.utils import _pytree as pytree

import exporter
from symbolics.node.metadata import results_of
from tests.support import counted_applies

__all__ = ["DOORS", "Given", "Made", "doors", "worse"]

DOORS = ("hook", "export")


@dataclass
class Given:
    """What is exported.

    Attributes:
        model: The model, of which each export gets a copy (itself, where it cannot be copied).
        args, kwargs: The example arguments.
        options: Of torch.onnx.export.
        runs: More arguments of the same kind, (args, kwargs) each, that the file is run with.
        allow: What the file may name.
        loose: Tolerance of numbers.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    allow: Sequence[str] = ()
    loose: float = 1e-4


@dataclass
class Made:
    """What an export made, or why nothing.

    Attributes:
        error: Why there is no file, or why it does not run.
        inputs, outputs: (name, type, sizes; None for an open one).
        wrong: For each of the runs: "" where the numbers are eager's, else what differs.
        functions: The names of the Functions that eager calls.
    """

    error: str = ""
    inputs: list[tuple[str, int, list[Any]]] = field(default_factory=list)
    outputs: list[tuple[str, int, list[Any]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)


def worse(given: Given, dynamo: bool, door: str, alone: Made | None = None) -> str:
    """What is worse than torch.onnx.export alone; "" where nothing is.

    Args:
        given: What is exported.
        dynamo: Which exporter.
        door: One of `DOORS`.
        alone: What `doors` made of torch's, where it was asked before.
    """
    alone = alone or doors(given, dynamo, "torch")
    if alone.error or any(alone.wrong):
        return ""
    ours = doors(given, dynamo, door)
    if ours.error:
        named = ours.error.startswith(("ExportError", "TrustError")) and any(name in ours.error for name in alone.functions)
        return "" if named else f"fails: {ours.error}"
    if any(ours.wrong):
        return "; ".join(f"run {number}: {text}" for number, text in enumerate(ours.wrong) if text)
    return _differs("input", alone.inputs, ours.inputs, given, dynamo) or _differs(
        "output", alone.outputs, ours.outputs, given, dynamo and not alone.functions
    )


def _differs(what: str, alone: list[Any], ours: list[Any], given: Given, named: bool) -> str:
    """What differs of inputs or outputs. Names are compared as far as somebody gave them: TorchScript makes up what is left, dynamo numbers results."""
    if what == "input" and not named and len(ours) > len(alone):
        return ""  # inputs that forward does not read, which TorchScript drops
    asked = len(ours) if named else len(given.options.get(f"{what}_names", ()))
    shown = [
        [(name if number < asked else "", kind, len(sizes)) for number, (name, kind, sizes) in enumerate(values)]
        for values in (ours, alone)
    ]
    if shown[0] != shown[1]:
        return f"{what}s {shown[0]}, torch alone {shown[1]}"
    for (name, _, sizes), (_, _, wanted) in zip(ours, alone, strict=True):
        if what == "input" and any((a is None) != (b is None) for a, b in zip(sizes, wanted)):
            return f"the sizes of {name}: {sizes}, torch alone {wanted}"
    return ""


def doors(given: Given, dynamo: bool, door: str) -> Made:
    """One export: by "torch" alone, under the "hook", or by our "export"; run beside eager."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        try:
            _export(given, dynamo, door, path)
            return _run(given, path)
        except Exception as error:
            return Made(error=f"{type(error).__name__}: {error}")


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _export(given: Given, dynamo: bool, door: str, path: Path) -> None:
    torch.manual_seed(0)
    model, args, kwargs, options = _copied(given.model), _copied(given.args), _copied(given.kwargs), dict(given.options)
    if door != "export":
        if not dynamo:
            options.setdefault("training", torch.onnx.TrainingMode.PRESERVE)
        else:
            options.setdefault("verbose", False)
        if kwargs:
            options["kwargs"] = kwargs
    if door == "torch":
        torch.onnx.export(model, args, str(path), dynamo=dynamo, **options)
    elif door == "hook":
        with exporter.hook():
            torch.onnx.export(model, args, str(path), dynamo=dynamo, **options)
    else:
        exporter.export(model, args, kwargs or None, dynamo=dynamo, **options).save(path)


def _run(given: Given, path: Path) -> Made:
    model = ir.load(path)
    results = results_of(model)
    made = Made("", *([_value(value) for value in values] for values in (model.graph.inputs, results)))
    if given.allow and any(name.startswith("pythonop.") for name in model.metadata_props):
        session: Any = exporter.inference_session(path, list(given.allow))
    else:
        quiet = ort.SessionOptions()
        quiet.log_severity_level = 4
        session = ort.InferenceSession(path, quiet, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    for args, kwargs in [(given.args, given.kwargs), *given.runs]:
        torch.manual_seed(0)
        with counted_applies() as called:
            result = _copied(given.model)(*_copied(args), **_copied(kwargs))
        made.functions.update(cls.__qualname__ for cls in called)
        eager = [_array(leaf) for leaf in pytree.tree_leaves(result) if leaf is not None]
        said = f"no {len(names)} of the arguments fit the inputs {names}"
        for arrays in _chosen(given, args, kwargs, len(names)):
            torch.manual_seed(0)
            try:
                got = session.run([value.name for value in results], dict(zip(names, arrays, strict=True)))
            except Exception as error:  # of other arguments than these
                said = f"{type(error).__name__}: {error}"
                continue
            said = _unequal(got, eager, given.loose)
            if not said:
                break
        made.wrong.append(said)
    return made


def _value(value: ir.Value) -> tuple[str, int, list[Any]]:
    sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
    return str(value.name), int(value.dtype or 0), sizes or []


def _chosen(given: Given, args: Any, kwargs: Any, count: int) -> Iterator[list[np.ndarray]]:
    """What is fed: the tensors; where the file has another number of inputs, any as many of all leaves (exporters drop what is not read)."""
    forward = given.model.forward if isinstance(given.model, torch.nn.Module) else None
    order = [] if forward is None or isinstance(forward, torch.ScriptMethod) else list(inspect.signature(forward).parameters)
    ordered = sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    for keywords in (dict(ordered), kwargs):
        leaves = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor | bool | int | float)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        some = [tensors] if len(tensors) == count else itertools.combinations(leaves, count)
        yield from ([_array(leaf) for leaf in chosen] for chosen in some)


def _array(leaf: Any) -> np.ndarray:
    tensor = torch.as_tensor(leaf).detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to_dense().numpy().copy() if tensor.dtype is not torch.bfloat16 else tensor.float().numpy()


def _unequal(got: Sequence[Any], eager: Sequence[np.ndarray], loose: float) -> str:
    if len(got) != len(eager):
        return f"{len(got)} outputs, {len(eager)} in eager"
    for number, (own, want) in enumerate(zip(got, eager, strict=True)):
        own = np.asarray(own)
        if own.shape != want.shape or own.dtype != want.dtype:
            return f"output {number}: {own.dtype}{list(own.shape)}, in eager {want.dtype}{list(want.shape)}"
        if not np.allclose(own, want, rtol=loose, atol=loose, equal_nan=True):
            return f"output {number}: {own.ravel()[:4]}, in eager {want.ravel()[:4]}"
    return ""
