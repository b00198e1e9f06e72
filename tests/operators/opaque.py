"""One call of an operator as an opaque node: exported here, run in another process, compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import exporter
from symbolics.errors import RunError
from tests.operators.samples import Call, Operator

__all__ = ["answer", "compared"]


def answer(job: tuple[str, list[str], list[torch.Tensor], list[torch.Tensor | None]]) -> list[torch.Tensor | None] | str:
    """What a file gives in a process that knows nothing else of it: outputs, then the gradient of each float input.

    Args:
        job: The file, what it may name, the inputs, a cotangent for each output (None for an output without a gradient).

    Returns:
        The tensors; or what was raised, as text.
    """
    path, allow, tensors, cotangents = job
    try:
        return _run(exporter.load(path, allow=allow), tensors, cotangents)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _run(model: Callable[..., Any], tensors: list[torch.Tensor], cotangents: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = model(*given)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    floats = [x for x in given if x.requires_grad]
    found: Any = [None] * len(floats)
    if pairs:
        found = torch.autograd.grad([y for y, _ in pairs], floats, [c for _, c in pairs], allow_unused=True)
    # A process cannot hand uint64 to another.
    return [*(y.detach().view(torch.int64) if y.dtype is torch.uint64 else y.detach() for y in outputs), *found]


def compared(call: Call, dynamo: bool, folder: Path, ask: Callable[[Any], Any]) -> list[str]:
    """Export a call of an operator with opaque="missing", and compare outputs and gradients with eager's.

    Args:
        call: The call.
        dynamo: Which of torch's exporters.
        folder: Where the file goes.
        ask: Hands a job of `answer` to another process.

    Returns:
        The operators that became nodes.
    """
    model = Operator(call)
    program = exporter.export(model, tuple(call.tensors), dynamo=dynamo, opaque="missing")
    nodes = [node.function for node in program.opaque]
    path = str(folder / "m.onnx")
    program.save(path)
    outputs = model(*(t.detach().clone().requires_grad_(t.is_floating_point()) for t in call.tensors))
    cotangents = [torch.randn(y.shape) if y.requires_grad else None for y in (outputs if isinstance(outputs, tuple) else (outputs,))]
    try:
        eager = _run(model, call.tensors, cotangents)
    except RuntimeError as error:  # PyTorch has no derivative of it: outputs alone are compared
        if "not implemented" not in str(error):
            raise
        cotangents = [None] * len(cotangents)
        eager = _run(model, call.tensors, cotangents)
    answered = ask((path, nodes, call.tensors, cotangents))
    if isinstance(answered, str):
        raise RunError(answered)
    for index, (ours, theirs) in enumerate(zip(answered, eager, strict=True)):
        ours = torch.zeros_like(theirs) if ours is None and theirs is not None else ours
        theirs = torch.zeros_like(ours) if theirs is None and ours is not None else theirs
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-3, atol=1e-4, msg=lambda text, i=index: f"tensor {i}: {text}")
    return nodes
