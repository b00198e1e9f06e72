"""Modules that become ONNX functions: while a model is captured, the tensors that a call of one takes and gives go through boundaries.

All inside is captured as ever; `symbolics.graph.outline` makes a function of it in the finished graph. Hooks of the module itself run around that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.gradients_in_forward import boundary
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.errors import ExportError
from symbolics.graph.boundaries import Edge, Origin
from symbolics.node.containers import fill
from symbolics.node.dtypes import onnx_type
from symbolics.node.names import qualified_name
from symbolics.node.patterns import Patterns

__all__ = ["function_calls"]

_calls = itertools.count()


@contextlib.contextmanager
def function_calls(model: Any, chosen: Patterns) -> Iterator[None]:
    """While the block runs, calls of the modules that are meant have boundaries in what is captured.

    Args:
        model: The model; what is no module has none.
        chosen: Which modules are meant.

    Raises:
        ExportError: A module is meant whose calls cannot be told.
    """
    caught = []
    try:
        for path, module in list(model.named_modules()) if isinstance(model, torch.nn.Module) and chosen.items else []:
            if not chosen.matches(type(module), module):
                continue
            if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
                opaque = getattr(module.forward, "stands_in", False)
                why = "opaque= means as well" if opaque else "was compiled" if isinstance(module, torch.jit.ScriptModule) else ""
                raise ExportError(
                    f"functions= means the module {path or '<root>'} ({qualified_name(type(module))}), which {why or 'has a forward that is no method of its class'}, "
                    "so that no function can be made of its calls: leave it out of one of the two, or name a module around it"
                )
            vars(module)["forward"] = _bounded(module, _origin(path, type(module)))
            caught.append(module)
        yield
    finally:
        for module in caught:
            del vars(module)["forward"]


def _origin(path: str, cls: type) -> Origin:
    name = re.sub(r"\W", "_", cls.__name__)
    return Origin(re.sub(r"[^\w.]", "_", cls.__module__), name, qualified_name(cls), path)


def _bounded(module: torch.nn.Module, origin: Origin) -> Any:
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # In a body of torch.cond, Dynamo traces this; under torch.func, tensors are wrappers.
        if torch.compiler.is_dynamo_compiling() or (recorder := active_recorder()) is None:
            return original(*args, **kwargs)
        if not recorder.listening() or private.transforms_active():
            return original(*args, **kwargs)
        return _Call(recorder, origin, original).run(args, kwargs)

    return forward


class _Call:
    """One call."""

    def __init__(self, recorder: Recorder, origin: Origin, original: Callable[..., Any]) -> None:
        self._recorder, self._origin, self._original = recorder, origin, original
        self._number = next(_calls)
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # each tensor, and what the call reads in its place
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        names = _names(self._original, len(args))
        args = tuple(_filled(name, value, self._take) for name, value in zip(names, args, strict=True))
        kwargs = {name: _filled(name, value, self._take) for name, value in kwargs.items()}
        result = _filled("output", self._original(*args, **kwargs), self._give)
        for tensor, inside, version in list(self._taken.values()):
            if inside._version != version:  # changed in place: so is the caller's
                tensor.copy_(self._give(f"{len(self._given)}", inside, changed=True))
        return result

    def _take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._taken:
            inside = boundary(tensor, self._edge(False, len(self._taken), name, tensor))
            self._taken[id(tensor)] = tensor, inside, inside._version
        return self._taken[id(tensor)][1]

    def _give(self, name: str, tensor: torch.Tensor, changed: bool = False) -> torch.Tensor:
        if id(tensor) in self._given:
            return self._given[id(tensor)][1]
        for outer, inside, version in self._taken.values() if not changed else ():
            if tensor is outer or (tensor is inside and inside._version == version):
                return outer  # it is what it was given
        outside = boundary(tensor, self._edge(True, len(self._given), name, tensor))
        self._given[id(tensor)] = tensor, outside
        for outer, inside, _ in self._taken.values():
            if private.shares_memory(tensor, inside):
                way = "change a copy (x.clone())"
                self._recorder.capture.aliases.pairs.append(
                    (outside, outer, f"{self._origin.of}, which functions= names, gives a view of it", way)
                )
        return outside

    def _edge(self, out: bool, index: int, name: str, tensor: torch.Tensor) -> str:
        edge = Edge(self._origin, self._number, out, index, name)
        if (
            private.is_tracing() and tensor.is_floating_point()
        ):  # torch.export says it itself; an integer may be of another type after translation
            with private.paused_capture():
                sizes = tuple(tensor.shape) if not self._recorder.capture.dynamic else (None,) * tensor.dim()
            edge = replace(edge, type=onnx_type(tensor.dtype), shape=sizes)
        return edge.text


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the positional arguments of a call."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    return names + [f"{rest}.{i}" for i in range(count - len(names))]


def _filled(name: str, value: Any, put: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The same with another tensor in the place of each."""
    count = itertools.count()

    def leaf(each: Any) -> Any:
        number = next(count)
        if not isinstance(each, torch.Tensor) or each.layout != torch.strided or each.is_quantized or each.is_complex():
            return each
        return put(name if each is value else f"{name}.{number}", each)

    return fill(value, leaf)
