"""Eager's own graph is the judge of an export: the Functions that hang on one eager run are in the file, or it fails.

A capture can only say what it saw. What it did not see shows in the autograd graph of one eager run on the example inputs: each
node of a Function there must be a PythonOp of the file, or was inlined with a notice.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.state import ModelState
from symbolics import _torch_private as private
from symbolics.arguments import qualified_name
from symbolics.capture import Call, Recorder, belongs_to_torch
from symbolics.errors import ExportError
from symbolics.file import ORT_DOMAIN, PYTHON_OP
from symbolics.patterns import Patterns
from symbolics.stop_gradient import differentiable_inputs

__all__ = ["EagerGraph", "Lost"]


@dataclass
class Lost:
    """A Function that eager calls more often than the file does.

    Attributes:
        function: The class.
        eager: How many of its calls hang on eager's outputs.
        found: How many the file holds with a gradient.
        call: Where the first was made.
    """

    function: type
    eager: int
    found: int
    call: Call

    def error(self) -> ExportError:
        """What to tell the user."""
        name, place = qualified_name(self.function), f"module {self.call.module or '<root>'} at {self.call.source or 'a line unknown'}"
        if self.call.operator:
            why = f"it is called inside the operator {self.call.operator}, which the exporter sees as one"
            remedy = f"call the Function in place of {self.call.operator}"
        else:
            why = "under an exporter the model takes another way, or runs where the exporter cannot look"
            remedy = "let it call the Function there, too (look for is_tracing, is_exporting, is_in_onnx_export)"
        return ExportError(
            f"{name}, called in {place}: eager makes {self.eager} call{'s' * (self.eager != 1)} of it that gradients flow through, the file has "
            f"{self.found or 'none'}.\n"
            f"  why: {why}; its own backward would be lost\n"
            f"  way out: {remedy}; name it in inline= if the derivative of what is exported is right;\n"
            "  or pass eager_check=False and answer for the gradients yourself"
        )


@dataclass
class EagerGraph:
    """The Functions of one eager run.

    Attributes:
        calls: Function class -> its calls that hang on an output by gradients.
        unchecked: Why there is nothing to compare with, "" where there is.
        failed: Whether that is because the run raised.
    """

    calls: dict[type, list[Call]] = field(default_factory=dict)
    unchecked: str = ""
    failed: bool = False

    @classmethod
    def of(cls, model: torch.nn.Module, args: Any, kwargs: dict[str, Any] | None) -> EagerGraph:
        """Run a model once and look at the graph behind its outputs; model, arguments and random state stay as they were.

        Args:
            model: The model, in the mode of the export.
            args, kwargs: Example arguments; float tensors count as needing a gradient.
        """
        args, kwargs = pytree.tree_map(
            _fresh, differentiable_inputs(((args,) if isinstance(args, torch.Tensor) else tuple(args), kwargs or {}))
        )
        try:
            with _unchanged(model), Recorder(survey=[]) as recorder, torch.enable_grad(), _uncompiled():
                recorder.watch(model)
                result = model(*args, **kwargs)
        except Exception as error:
            return cls(unchecked=f"an eager run raised {type(error).__name__}: {' '.join(str(error).split())[:200]}", failed=True)
        made_by = {id(node): call for node, call in recorder.survey or ()}
        calls: dict[type, list[Call]] = {}
        for node in _nodes(_tensors(result)):
            function = private.function_of(node)
            if function is not None and not belongs_to_torch(function):
                calls.setdefault(function, []).append(made_by.get(id(node), Call()))
        return cls(calls)

    @property
    def operators(self) -> set[str]:
        """The operators of torch.library that call Functions."""
        return {call.operator for calls in self.calls.values() for call in calls if call.operator}

    def inside_operators(self) -> list[Lost]:
        """The Functions that operators call, for an export that failed."""
        found = ((function, calls, next((call for call in calls if call.operator), None)) for function, calls in self.calls.items())
        return [Lost(function, len(calls), 0, call) for function, calls, call in found if call is not None]

    def translated(self, model: ir.Model, names: Callable[[Any], str | None]) -> list[tuple[type, str]]:
        """The Functions that only operators call, and that operator, where a model exists and has no call of the Function at all."""
        held = {node.attributes["name"].as_string() for node in _python_ops(model)} if self.operators else set()
        return [
            (function, calls[0].operator)
            for function, calls in self.calls.items()
            if all(call.operator for call in calls) and (names(function) or qualified_name(function)) not in held
        ]

    def lost(self, model: ir.Model, inlined: dict[str, str], inline: Patterns, names: Callable[[Any], str | None]) -> list[Lost]:
        """What the file lacks.

        Args:
            model: The exported model.
            inlined: Functions that were inlined with a notice, by qualified name.
            inline: Those that were to be inlined.
            names: Names of registered classes.
        """
        count: Counter[str] = Counter()
        repeated: set[str] = set()
        for node in _python_ops(model) if self.calls else ():
            name, flags = node.attributes["name"].as_string(), node.attributes.get("input_requires_grads")
            count[name] += flags is not None and any(flags.as_ints())
            if node.graph is not model.graph:  # a body may run many times
                repeated.add(name)
        found = []
        for function, calls in self.calls.items():
            name = names(function) or qualified_name(function)
            enough = count[name] >= len(calls) or (name in repeated and count[name])
            if not enough and qualified_name(function) not in inlined and not inline.matches(function):
                found.append(Lost(function, len(calls), count[name], next((c for c in calls if c.source), calls[0])))
        return found


def _python_ops(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP))


def _fresh(leaf: Any) -> Any:
    """Objects that a forward may change, copied where they can be; tensors are copies already."""
    if isinstance(leaf, (torch.Tensor, torch.nn.Module, type)) or callable(leaf):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf


def _tensors(result: Any) -> list[torch.Tensor]:
    found = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):  # a container that torch does not know
            found += [value for value in vars(leaf).values() if isinstance(value, torch.Tensor)]
    return found


def _nodes(outputs: list[torch.Tensor]) -> Iterator[Any]:
    """Every node of the graph behind some tensors, once."""
    seen = {t.grad_fn for t in outputs if t.grad_fn is not None}
    todo = list(seen)
    while todo:
        node = todo.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)


# --------------------------------------------------------------------------------------------- nothing is changed

_CONTAINERS = (list, dict, set, deque)


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put back what a forward changes: buffers, attributes of modules and what is in them, random states; warn of nothing twice."""
    modules = [(module, dict(vars(module))) for module in model.modules()]
    containers = {id(v): (v, copy.copy(v)) for _, attributes in modules for v in attributes.values() if type(v) in _CONTAINERS}
    tensors = [(v, v._version, v.detach().clone()) for _, attributes in modules for v in attributes.values() if isinstance(v, torch.Tensor)]
    python, numpy, devices = (
        random.getstate(),
        np.random.get_state(),
        sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda}),
    )
    with ModelState.of(model).restored(model):
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.inference_mode(False):
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for module, attributes in modules:
                vars(module).update(attributes)
                for name in set(vars(module)) - set(attributes):
                    del vars(module)[name]
            for value, before in containers.values():
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(before)
            with torch.no_grad():
                for tensor, version, values in tensors:
                    if tensor._version != version and tensor.shape == values.shape:
                        tensor.copy_(values)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Functions behind torch.compile run as they are written; a compilation would cost more than the export."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
