"""A model that runs once in eager mode, and fails in its second step: what it keeps of the first one, and the way out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch

from exporter.forward.eager_failure import line_of
from symbolics import torch_private as private
from symbolics.errors import ExportError, PythonopError, as_raised
from symbolics.text import clean, ends, said

__all__ = ["second_step_failure"]

#: How far behind a tensor a Function is looked for.
_NODES = 1000


def second_step_failure(error: Exception, model: torch.nn.Module) -> PythonopError:
    """What to raise, from ``error``, where eager PyTorch fails in a step behind the first one: an ExportError, and of the class of ``error``.

    Args:
        error: What that step raised, with its traceback.
        model: The model that ran.
    """
    kept = next(_kept(model), None)
    lines = [f"eager PyTorch fails in the second step of the model, not the file: {type(error).__name__}: {ends(said(error), 300)}"]
    if place := line_of(error):
        lines.append(f"  {place}")
    if kept is not None:
        name, tensor, attribute = kept
        lines.append(f"  {name} keeps the graph of the step before{_function_behind(tensor)}")
        way = f"detach it ({attribute} = {attribute}.detach() behind the step), or have the Function that gives it call ctx.mark_non_differentiable in its forward"
    else:
        way = "let two steps of model(*args) and backward() run one after the other"
    lines.append(f"  way out: {way}")
    return as_raised(error, "\n".join(lines), ExportError)


def _kept(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """What of a model's state hangs on a graph: what to call it, itself, and the attribute that its module has it as."""
    for name, buffer in model.named_buffers():
        if buffer.grad_fn is not None:
            yield f"buffer {clean(name)!r}", buffer, f"self.{clean(name.rpartition('.')[2])}"
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                yield f"attribute {clean(f'{path}.{name}' if path else name)!r}", value, f"self.{clean(name)}"


def _function_behind(tensor: torch.Tensor) -> str:
    """The nearest autograd Function that gave a tensor, and where its forward stands; else what operator gave it."""
    first = tensor.grad_fn
    waiting, seen = [first], set[Any]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        cls = private.function_of(node)
        if cls is not None:
            code = getattr(inspect.unwrap(getattr(cls, "forward", cls)), "__code__", None)
            place = f", at {clean(os.path.basename(code.co_filename))}:{code.co_firstlineno}, in forward" if code is not None else ""
            return f": Function {clean(cls.__qualname__)} gave it{place}"
        waiting += [following for following, _ in node.next_functions]
    return f" (its grad_fn is {type(first).__name__})"
