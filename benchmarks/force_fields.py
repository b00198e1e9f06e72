"""What force fields, as their packages make them, take from a file beside eager: energy and forces, and a training step on both.

    pip install --no-deps --target DIR mace-torch e3nn==0.4.4 ...        (or nequip e3nn ..., schnetpack ...: they ask for other releases of the same)
    PYTHONPATH=.:DIR python -m benchmarks.force_fields mace [--channels 8 64] [--runs 11] [--exporters dynamo torchscript] [--step] [--adamw 10]

The models are those of `benchmarks.force_field_models`: 64 atoms on a disturbed grid, random weights, open numbers of atoms and edges; the file is compared with eager at
64 atoms and at 50. File and eager run in turns on one thread; the ratio is the median of those of the rounds. `exporter.inference_session` is onnxruntime's own session: these files have no PythonOp.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnxruntime
import torch

import exporter
from benchmarks._force_field import ATOMS, Wrapped
from benchmarks._report import Figure, tell
from benchmarks.force_field_models import FAMILIES
from benchmarks.tangents import rounds

#: File / eager at 64 channels.
LIMIT = 1.0


def _loss(found: tuple[torch.Tensor, ...], forces: torch.Tensor) -> torch.Tensor:
    return found[0].square().mean() * 1e-4 + (found[1] - forces).square().mean()


def _session(model: Any) -> onnxruntime.InferenceSession:
    options = exporter.session_options()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return exporter.inference_session(model, sess_options=options)


def _shapes(model: Wrapped) -> tuple[Any, ...]:
    dims: dict[str, Any] = {}
    return tuple(
        axes and {axis: dims.setdefault(name, torch.export.Dim(name, min=2)) for axis, name in axes.items()} for axes in model.open
    )


def _exported(export: Any, model: Wrapped, given: tuple[torch.Tensor, ...], dynamo: bool, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(model, tuple(value.clone() for value in given), dynamo=dynamo, dynamic_shapes=_shapes(model), **more)


def _feeds(session: onnxruntime.InferenceSession, model: Wrapped, given: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    known = {name: value.numpy() for name, value in zip(model.names, given, strict=True)}
    return {value.name: known[value.name] for value in session.get_inputs()}


def _check(what: str, session: onnxruntime.InferenceSession, model: Wrapped) -> None:
    for atoms in (ATOMS, 50):
        given = model.given(atoms)
        expected = [value.detach().numpy() for value in model(*(value.clone() for value in given))]
        for found, wanted in zip(session.run(None, _feeds(session, model, given)), expected, strict=True):
            if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max()):
                raise RuntimeError(f"{what}: the file differs from eager at {atoms} atoms")


def _step(model: Wrapped, given: tuple[torch.Tensor, ...], target: torch.Tensor, dynamo: bool, optimizer: str, lr: float) -> Any:
    return _exported(
        exporter.export_training_step,
        model.train(),
        given,
        dynamo,
        loss=_loss,
        targets=(target,),
        optimizer=optimizer,
        hyperparameters={"lr": lr},
    )


def _eager_step(model: Wrapped, given: tuple[torch.Tensor, ...], target: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = _loss(model(*(value.clone() for value in given)), target)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _what(family: str, channels: int, model: Wrapped, given: tuple[torch.Tensor, ...], dynamo: bool) -> str:
    edges = max(
        value.shape[axis] for value, axes in zip(given, model.open, strict=True) for axis, name in (axes or {}).items() if name != "triples"
    )
    return f"{family}, {channels} channels, {edges} edges, {'dynamo' if dynamo else 'TorchScript'}"


def rows(family: str, channels: int, dynamo: bool, runs: int, *, with_step: bool) -> list[Figure]:
    """The figures of one model by one exporter.

    Raises:
        RuntimeError: The file gives other numbers than eager.
    """
    torch.manual_seed(0)
    model = FAMILIES[family](channels).eval()
    inputs = model.given()
    what = _what(family, channels, model, inputs, dynamo)
    program = _exported(exporter.export, model, inputs, dynamo, input_names=list(model.names))
    operators = Counter(node.op_type for node in program.model.graph)
    session = _session(program.model)
    _check(what, session, model)
    feeds = _feeds(session, model, inputs)
    calls = [lambda: session.run(None, feeds), lambda: model(*(value.clone() for value in inputs))]
    labels = ["energy and forces"]
    if with_step:
        target = torch.randn(inputs[0].shape)
        step = _step(model, inputs, target, dynamo, "sgd", 1e-6)
        trainer = _session(step.model)
        known = {**step.initial, **{name: value.numpy() for name, value in zip(model.names, inputs, strict=True)}, "target": target.numpy()}
        given = {value.name: known[value.name] for value in trainer.get_inputs()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        calls += [lambda: trainer.run(None, given), lambda: _eager_step(model, inputs, target, optimizer)]
        labels.append("training step")
    spent = rounds(calls, runs)
    figures = []
    for number, label in enumerate(labels):
        ratio = statistics.median(times[2 * number] / times[2 * number + 1] for times in spent)
        mine, theirs = (1e3 * statistics.median(times[2 * number + k] for times in spent) for k in (0, 1))
        note = f"{mine:.1f} ms; eager {theirs:.1f} ms; Einsums left: {operators['Einsum']}"
        limit = LIMIT if channels == 64 and number == 0 else None
        figures.append(Figure(f"{what}: {label}, file / eager", ratio, "ratio", limit, runs, note))
    return figures


def compiled(family: str, channels: int, runs: int) -> Figure:
    """Energy and forces by torch.compile, over eager; where it does not take the model, without a value and with its reason."""
    torch.manual_seed(0)
    model = FAMILIES[family](channels).eval()
    inputs = model.given()
    what = f"{_what(family, channels, model, inputs, dynamo=True)}: energy and forces, torch.compile / eager"
    fast = torch.compile(model)
    try:
        fast(*(value.clone() for value in inputs))
    except Exception as error:  # of its own, of many kinds
        return Figure(what, None, "ratio", note=f"torch.compile fails: {type(error).__name__}")
    spent = rounds([lambda: fast(*(value.clone() for value in inputs)), lambda: model(*(value.clone() for value in inputs))], runs)
    return Figure(what, statistics.median(times[0] / times[1] for times in spent), "ratio", None, runs)


def adamw(family: str, channels: int, dynamo: bool, count: int) -> Figure:
    """So many steps of AdamW on energy and forces: the largest difference of a parameter from eager's, over the largest way that one has gone."""
    torch.manual_seed(0)
    model = FAMILIES[family](channels)
    given = model.given()
    target = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1))
    step = _step(model, given, target, dynamo, "adamw", 1e-3)
    trainer, asked = exporter.Trainer(step), {value.name for value in step.model.graph.inputs}
    begin = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = dict(zip((*model.names, "target"), (*given, target), strict=True))
    batch = {name: value for name, value in batch.items() if name in asked}
    losses = [(float(trainer.step(batch)), _eager_step(model, given, target, optimizer)) for _ in range(count)]
    found = trainer.state_dict()
    apart = max(float((found[name] - value).abs().max()) for name, value in model.named_parameters() if name in found)
    gone = max(float((begin[name] - value).abs().max()) for name, value in model.named_parameters())
    note = f"losses {losses[0][1]:.6g} to {losses[-1][1]:.6g}, at most {max(abs(a / b - 1) for a, b in losses):.1e} apart"
    return Figure(
        f"{_what(family, channels, model, given, dynamo)}: {count} steps of AdamW, difference / way",
        apart / gone,
        "ratio",
        None,
        count,
        note,
    )


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: those whose packages are there")
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--exporters", nargs="+", choices=["dynamo", "torchscript"], default=["dynamo", "torchscript"])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--step", action="store_true", help="a training step, too")
    parser.add_argument("--adamw", type=int, default=0, metavar="N", help="so many steps of AdamW, beside eager's")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: up to a minute a model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for family in options.families or FAMILIES:
        if not options.families and importlib.util.find_spec(FAMILIES[family].package) is None:
            figures.append(Figure(f"{family}: energy and forces, file / eager", None, "ratio", note="its package is not there"))
            continue
        for channels in options.channels:
            for name in options.exporters:
                figures += rows(family, channels, name == "dynamo", options.runs, with_step=options.step)
                if options.adamw:
                    figures.append(adamw(family, channels, name == "dynamo", options.adamw))
            if options.compile:
                figures.append(compiled(family, channels, options.runs))
    return tell("force_fields", figures)


if __name__ == "__main__":
    sys.exit(main())
