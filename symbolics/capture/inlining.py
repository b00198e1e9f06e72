"""What inlining a Function takes: the ctx of its forward, and which calls have to be inlined."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from symbolics.capture.binding import Slots, bind, has_setup_context
from symbolics.errors import ExportError
from symbolics.node.containers import expand_leaves, fill

__all__ = [
    "OTHER_GRADIENTS",
    "InlineContext",
    "answers_for_parameters",
    "closed_over",
    "code_given",
    "inlined",
    "modules_among",
    "runs_inlined",
    "stands_in_inlined",
    "state_of",
    "trainable_module",
]

#: Said of an inlined Function that `answers_for_parameters`.
OTHER_GRADIENTS = (
    ", and not what its backward computes: all those parameters are arguments, too, so that it answers for them itself (an adjoint method, say), and eager's "
    "gradients differ by what it computes otherwise. Compare them with exporter.verify; to keep its backward, export with portable=True, or pass the parameters alone and let "
    "forward run a function of them (torch.func.functional_call)"
)

F = TypeVar("F", bound=Callable[..., Any])


class InlineContext:
    """The ctx of an inlined forward: it takes everything and keeps what the graph needs."""

    def __init__(self, args: Iterable[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """As torch's."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """As torch's: forward-mode differentiation has no place in a file."""

    def mark_dirty(self, *tensors: Any) -> None:
        """As torch's: the in-place operations themselves are traced."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """As torch's: gradients stop at these outputs."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """As torch's: the derivative of traced operations does not depend on it."""


#: The code of what runs an inlined forward: where the look up the stack ends.
_RUNNERS: set[types.CodeType] = set()


def runs_inlined(function: F) -> F:
    """Decorates the function that runs an inlined forward."""
    _RUNNERS.add(function.__code__)
    return function


def stands_in_inlined(frame: types.FrameType | None, given: Collection[types.CodeType]) -> bool:
    """Whether code is of an inlined forward itself, and not of a module or a function that it is given.

    Autograd is off in a forward, and what it detaches is its own affair: its backward says what flows. A module that it calls is mostly
    run again by that backward, with gradients on: what is stopped there stays stopped. Unless that module has a backward of its own.

    Args:
        frame: Where the code stands.
        given: What `code_given` found among the arguments.
    """
    while frame is not None and frame.f_code not in _RUNNERS:
        if frame.f_code in given:
            return False
        if frame.f_code.co_varnames[:1] == ("self",):
            this = frame.f_locals.get("self")
            if isinstance(this, torch.nn.Module) and not _has_a_backward(type(this)):
                return False
        frame = frame.f_back
    return True


def _has_a_backward(cls: type) -> bool:
    """Whether a module answers for its gradient itself, as reversible blocks do with a method backward_pass: it is a part of its Function."""
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    return any("backward" in name and callable(value) for base in own for name, value in vars(base).items())


class _Running(Protocol):
    given: frozenset[types.CodeType] | None


@contextlib.contextmanager
def code_given(capture: _Running, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """While the block runs, ``capture.given`` is the code that the forward of a Function has from its caller: it runs it, and backward again.

    Of a module there is none: its frames say that they are a module's.

    Args:
        capture: What the forward is inlined into. Where it is given nothing to run, nothing is set.
        cls: The Function; a class that is made for a call closes over what it runs.
        args, kwargs: Its arguments.
    """
    # What is written in the class is its own, though a decorator of its forward (custom_fwd) closes over it.
    brought = [value for _, value in closed_over(cls.forward) if not getattr(value, "__qualname__", "").startswith(f"{cls.__qualname__}.")]
    values = [*args, *kwargs.values(), *brought]
    found = [_methods_of(leaf) for value in values for leaf in expand_leaves(value)]
    outer, codes = capture.given, [codes for codes in found if codes is not None]
    if codes:
        capture.given = frozenset[types.CodeType]().union(outer or (), *codes)
    try:
        yield
    finally:
        capture.given = outer


def _methods_of(value: Any, depth: int = 0) -> set[types.CodeType] | None:
    """The code that a value brings along; None for a value that is nothing to run."""
    if isinstance(value, (type, torch.Tensor)) or depth > 3:
        return None
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return set[types.CodeType]().union(*(_methods_of(part, depth + 1) or () for part in parts))
    if isinstance(value, torch.nn.Module):
        return set()
    if isinstance(code := getattr(getattr(value, "__func__", value), "__code__", None), types.CodeType):
        return {code}
    methods = {
        item.__code__
        for base in type(value).__mro__
        for name, item in vars(base).items()
        if isinstance(item, types.FunctionType) and (name == "__call__" or not name.startswith("_"))
    }
    return methods if methods or callable(value) else None


@runs_inlined
def inlined(capture: _Running, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of a Function gives, run as the model's own code.

    Args:
        capture: What it is inlined into.
        cls, args, kwargs: The Function, and its arguments.
    """
    bound, _, passed = bind(cls, args, kwargs)
    context = InlineContext(bound.args[:passed])
    with code_given(capture, cls, args, kwargs):
        if has_setup_context(cls):
            result = cls.forward(*bound.args, **bound.kwargs)
            cls.setup_context(context, bound.args, result)
        else:
            result = cls.forward(context, *bound.args[:passed], **bound.kwargs)
    stop = {id(t) for t in context.non_differentiable}
    return fill(result, lambda leaf: torch.ops.pythonop.stop_gradient(leaf) if id(leaf) in stop and leaf.is_floating_point() else leaf)


def trainable_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The first argument that is, or belongs to, a module with trainable parameters.

    Raises:
        ExportError: An argument is a function that closes over such a module. It may run the module, or only ask it for
            something: nobody can tell whether the derivative of forward is what its backward computes.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        for leaf in expand_leaves(value):
            for module, closed in _modules_behind(leaf):
                if any(p.requires_grad for p in module.parameters()):
                    if closed:
                        raise ExportError(
                            f"argument {name} is a function over the {type(module).__name__} in {closed!r}, whose trainable parameters would be hidden: pass the "
                            "module itself or the parameters, or name the Function in inline= if the derivative of its forward is what you want"
                        )
                    return str(name)
    return None


def modules_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    """The modules that arguments are, belong to, or close over; each once."""
    found = [m for value in (*args, *kwargs.values()) for leaf in expand_leaves(value) for m, _ in _modules_behind(leaf)]
    return list(dict.fromkeys(found))


def answers_for_parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each trainable parameter of the modules among the arguments is an argument, too: backward then has gradients of its own for them."""
    leaves = [leaf for value in (*args, *kwargs.values()) for leaf in expand_leaves(value)]
    given = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    modules = [module for leaf in leaves for module, _ in _modules_behind(leaf)]
    return all(id(p) in given for module in modules for p in module.parameters() if p.requires_grad)


def _modules_behind(value: Any, closed: str = "", depth: int = 0) -> Iterator[tuple[torch.nn.Module, str]]:
    """The modules of a callable, each with the variable that a function closes over it by ("" for modules and methods)."""
    if isinstance(value, torch.nn.Module):
        yield value, closed
    elif depth > 3:
        return
    elif isinstance(value, types.MethodType):
        yield from _modules_behind(value.__self__, closed, depth + 1)
    elif isinstance(value, functools.partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from _modules_behind(item, closed, depth + 1)
    elif isinstance(value, types.FunctionType):
        for name, content in closed_over(value):
            yield from _modules_behind(content, name, depth + 1)


def closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over, and their values; also the arguments of a functools.partial."""
    while isinstance(function, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents


def state_of(modules: Iterable[torch.nn.Module], slots: Slots) -> list[tuple[torch.nn.Module, str, int]]:
    """A slot for each parameter and buffer of some modules, behind those of the arguments; what is an argument as well has its own."""
    known = {id(value): index for index, value in enumerate(slots.values)}
    found = []
    for module in modules:
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
            if id(tensor) not in known:
                slots.take(tensor)
                known[id(tensor)] = len(slots.values) - 1
            found.append((module, name, known[id(tensor)]))
    return found
