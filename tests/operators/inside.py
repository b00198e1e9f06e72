"""``python -m tests.operators.inside [PATTERN ...]``: torch's operators under torch.autograd.grad in a forward, on both exporters.

Each float argument is read before the operator, by it, and behind it; the gradient by all of them has to be eager's. One sample of the database each,
in a process of its own. The exit status is 1 where one is wrong: a file that is refused, or that onnxruntime cannot run, is not.

    python -m tests.operators.inside "nn_functional_*" --exporters dynamo
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import exporter
from tests.operators import samples

__all__ = ["Inside", "judge"]

_EXPORTERS = {"dynamo": True, "torchscript": False}
_SECONDS = 120


class Inside(torch.nn.Module):
    """The gradients of an energy by the arguments of an operator that are floats; its inputs are the tensors among the arguments."""

    def __init__(self, call: samples.Call) -> None:
        super().__init__()
        self._call, self._floats = samples.Operator(call), call.floats

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """tensors: those of the call."""
        given = list(tensors)
        for i in self._floats:
            given[i] = tensors[i] * 0.999  # no input any more, and nearly as the database has it: many operators are undefined elsewhere
        read = [given[i] for i in self._floats]
        before = [h.sin() for h in read]
        energy = torch.zeros(())
        for out in pytree.tree_leaves(self._call(*given)):
            if out.is_floating_point():
                energy = energy + (out * torch.linspace(-1, 2, out.numel()).to(out.dtype).reshape(out.shape)).sum()
        for h, b in zip(read, before, strict=True):
            energy = energy + (h.cos() * b).sum()
        return tuple(torch.autograd.grad(energy, read, create_graph=True))


def judge(name: str, dynamo: bool) -> tuple[str, str]:
    """What became of an operator: (word, why).

    The words: right, wrong, refused (the export says why), not run (onnxruntime cannot), no gradient (eager has none), random.
    """
    group = next(samples.groups(name, 1), None)
    if group is None or not group.call.floats:
        return "no gradient", "no sample with a float"
    call = group.call
    model = Inside(call).eval()
    try:
        expected, again = (_eager(model, call, seed) for seed in (0, 1))
    except Exception as error:
        return "no gradient", str(error).strip().split("\n")[0]
    if not all(
        torch.equal(a, b) or ((a.isnan() == b.isnan()).all() and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(expected, again)
    ):
        return "random", ""
    try:
        program = exporter.export(model, tuple(t.clone() for t in call.tensors), dynamo=dynamo)
    except Exception as error:
        return "refused", str(error).strip().split("\n")[0]
    names = [f"tensors_{i}" for i in range(len(call.tensors))]
    try:
        session = exporter.inference_session(program.model)
        inputs = [value.name for value in session.get_inputs()]
        feeds = dict(zip(inputs if len(inputs) == len(call.tensors) else names, (t.numpy() for t in call.tensors)))
        found = session.run(None, {name: feeds[name] for name in inputs})
    except Exception as error:
        return "not run", str(error).strip().split("\n")[0]
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        mine = torch.as_tensor(a).to(b.dtype)
        if mine.shape != b.shape:
            return "wrong", f"gradient {number} has the shape {tuple(mine.shape)}, not {tuple(b.shape)}"
        if not _close(mine, b) and not _close(mine, _exact(model, call)[number].to(b.dtype)):
            return (
                "wrong",
                f"gradient {number} is off by {(mine - b).abs().max().item():.3g} of {b.nan_to_num(0, 0, 0).abs().max().item():.3g}",
            )
    return "right", ""


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    size = b.nan_to_num(0, 0, 0).abs().max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + size), equal_nan=True)


def _exact(model: Inside, call: samples.Call) -> list[torch.Tensor]:
    """Eager in float64: in float32 it may be further from that than the file is (logcumsumexp)."""
    wide = [t.double().requires_grad_() if t.is_floating_point() else t for t in call.tensors]
    return [g.detach() for g in model(*wide)]


def _eager(model: Inside, call: samples.Call, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [g.detach() for g in model(*[t.clone().requires_grad_(t.is_floating_point()) for t in call.tensors])]


def _child(name: str, dynamo: bool, answer: Any) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    answer.send(judge(name, dynamo))


def _judged(names: list[str], exporters: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """(operator, exporter, word, why), each from a process of its own."""
    context = multiprocessing.get_context("fork")
    for which in exporters:  # what an exporter loads the first time, the children have from here
        judge("sin", _EXPORTERS[which])
    for name in names:
        for which in exporters:
            mine, theirs = context.Pipe()
            child = context.Process(target=_child, args=(name, _EXPORTERS[which], theirs))
            child.start()
            theirs.close()
            try:
                word, why = mine.recv() if mine.poll(_SECONDS) else ("not run", f"longer than {_SECONDS} s")
            except EOFError:
                word, why = "not run", "the process ended"
            child.kill()
            child.join()
            yield name, which, word, why


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--exporters", nargs="+", choices=sorted(_EXPORTERS), default=sorted(_EXPORTERS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    skipped = samples.UNINITIALIZED | samples.IN_PLACE
    names = [name for name in samples.operators() if name not in skipped and any(fnmatch.fnmatch(name, p) for p in options.patterns)]
    counts: dict[str, Counter[str]] = {which: Counter() for which in options.exporters}
    for name, which, word, why in _judged(names, options.exporters):
        counts[which][word] += 1
        print(f"{name} {which}: {word}{f': {why}' if why else ''}", flush=True)
    for which, words in counts.items():
        print(f"{which}: {', '.join(f'{count} {word}' for word, count in words.most_common())}")
    return int(any(words["wrong"] for words in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
