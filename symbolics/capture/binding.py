"""The arguments of one call: bound by forward's signature, their tensors and symbolic sizes taken out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container
from typing import Any

import sympy
import torch

from symbolics import torch_private as private
from symbolics.capture.outputs import sizes_of
from symbolics.capture.trace.sizes import is_traced_size
from symbolics.errors import ExportError, Faq
from symbolics.node.containers import Slot, fill
from symbolics.node.torch_arguments import PartialSize
from symbolics.text import clean

__all__ = ["Slots", "TracedSize", "bind", "has_setup_context"]


class TracedSize(sympy.Symbol):  # type: ignore[misc]
    """A size of which a trace knows the example's number alone: it may be that of an open axis."""

    @classmethod
    def of(cls, number: int) -> TracedSize:
        """The size that is this number in the example."""
        return cls(f"d{number}", integer=True, positive=True)


def has_setup_context(cls: Any) -> bool:
    """Whether the Function has the separate setup_context of PyTorch 2."""
    return cls.setup_context is not torch.autograd.Function.setup_context


@functools.lru_cache(maxsize=1024)
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def bind(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[inspect.BoundArguments, list[str], int]:
    """Arguments by forward's signature without ctx, defaults applied to those that can be passed by position.

    Returns:
        The bound arguments; the name of each positional one; how many of them the caller passed.

    Raises:
        ExportError: The call does not fit forward's signature.
    """
    signature = _signature(cls.forward)
    if not has_setup_context(cls):
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:  # forward(*args) takes ctx among them
            signature = signature.replace(parameters=parameters[1:])
    if isinstance(cls.forward, functools.partial):  # what it binds by name is its own business
        own = cls.forward.keywords
        signature = signature.replace(parameters=[p for name, p in signature.parameters.items() if name not in own or name in kwargs])
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the call does not fit the signature of forward: {error}") from error
    given = set(bound.arguments)
    bound.apply_defaults()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in given:  # apply hands on no keyword: forward has its own default
            del bound.arguments[name]
    names: list[str] = []
    passed = 0
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound.arguments[name]))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
        if name in given:
            passed = len(names)
    return bound, [*names, *sorted(bound.kwargs)], passed


class Slots:
    """Takes the tensors and symbolic sizes out of arguments."""

    def __init__(self) -> None:
        self.values: list[Any] = []  # tensors and sizes, by slot index
        self.order: list[str] = []
        self._top: list[int] = []  # which argument a slot came from

    def take(self, value: Any) -> Any:
        """The argument with `Slot`s in place of its tensors and symbolic sizes."""
        self._top.append(len(self.values))
        return fill(value, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._add(leaf, "size" if is_traced_size(leaf) else "tensor")
        if isinstance(leaf, torch.SymInt):
            known = leaf.node.maybe_as_int()
            return known if known is not None else self._add(leaf, "size")
        if isinstance(leaf, torch.Size) and any(isinstance(n, (torch.SymInt, torch.Tensor)) for n in leaf):
            return PartialSize(self._leaf(n) for n in leaf)
        if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            computed = "float" if isinstance(leaf, torch.SymFloat) else "bool"
            if not leaf.node.has_hint():  # no example has it: x.item(), float(x)
                raise ExportError(
                    f"an argument is a {computed} that was read out of a tensor (by .item(), float() or bool()); a file could only hold today's value: "
                    "pass the tensor, or keep the value as a Python number"
                )
            raise ExportError(
                f"an argument is a {computed} computed from a dynamic size ({leaf}); "
                "a file could only hold today's value: pass the size as an int, or as a tensor",
                faq=Faq.FROM_A_SIZE,
            )
        return leaf

    def _add(self, value: Any, kind: str) -> Slot:
        self.values.append(value)
        self.order.append(kind)
        return Slot(len(self.values) - 1, kind)  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the op takes as tensors (under TorchScript a size is a traced tensor)."""
        return [value for value in self.values if isinstance(value, torch.Tensor)]

    @property
    def sizes(self) -> list[torch.SymInt]:
        """What the op takes as symbolic ints."""
        return [value for value in self.values if isinstance(value, torch.SymInt)]

    @property
    def tensors_and_sizes(self) -> list[Any]:
        """All slots in order, with traced sizes as ints."""
        return [int(v) if kind == "size" and isinstance(v, torch.Tensor) else v for v, kind in zip(self.values, self.order, strict=True)]

    def dims(self, dynamic: Container[int]) -> list[list[Any]]:
        """The dims of each slot (of a size its value): an int, or a sympy expression of what may differ between two runs.

        Args:
            dynamic: The example sizes of dynamic dims, in a trace. It knows numbers alone: where there are such dims, each size from 2 on may come
                from one, and each that is an argument.
        """
        if not private.is_tracing():
            return [sizes_of(value) for value in self.values]
        with private.paused_capture():  # a trace hands out sizes as tensors, and warns of who makes them numbers
            numbers = [list(v.shape) if kind == "tensor" else [int(v)] for v, kind in zip(self.values, self.order, strict=True)]
        return [
            [TracedSize.of(n) if dynamic and (n > 1 or kind == "size") else n for n in dims]
            for dims, kind in zip(numbers, self.order, strict=True)
        ]

    def path(self, index: int) -> str:
        """Which argument a slot came from."""
        return str(max(i for i, start in enumerate(self._top) if start <= index))

    def check(self, names: list[str], function: Any) -> None:
        """Refuse tensors that a PythonOp cannot take.

        Args:
            names: Those of the arguments.
            function: What is called.
        """
        for index, value in enumerate(self.values):
            if not isinstance(value, torch.Tensor):
                continue
            argument = names[int(self.path(index))]
            if hasattr(type(value), "__tensor_flatten__"):
                raise ExportError(
                    f"argument {argument} is of {clean(type(value).__module__)}'s tensor class {type(value).__name__}, which wraps other tensors: "
                    "a PythonOp takes plain ones: name the Function in inline=, or give it what is inside"
                )
            if value.is_complex():
                raise ExportError(
                    f"argument {argument} is a complex tensor, which a PythonOp cannot take: {_way_out_of_complex(argument, function)}"
                )
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                raise ExportError(
                    f"argument {argument} is not a dense tensor ({value.layout}): convert it before the call, or inline the Function"
                )


def _way_out_of_complex(argument: str, function: Any) -> str:
    """What to do where a call takes a complex tensor: only a Function can be inlined, and views go into a forward that is one's own."""
    around = "a module around it that takes and returns real tensors"
    if not isinstance(function, type):
        return f"name in opaque= {around}"
    return f"pass torch.view_as_real({argument}), and let forward begin with torch.view_as_complex; name the Function in inline=; or name in opaque= {around}"
