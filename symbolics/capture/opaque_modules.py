"""Modules that become one node: how a call of one is caught before it begins, and what it is while a model is captured.

While an export runs, each module that ``opaque=`` names has a stand-in for its forward, which hands the call to the thread's listener.
Hooks of the module itself run around that, as part of the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from symbolics import torch_private as private
from symbolics.capture.callsite import Call
from symbolics.capture.listener import active_listener
from symbolics.capture.outputs import Outputs
from symbolics.capture.side_effects import same_values
from symbolics.capture.taken_values import TAKING
from symbolics.errors import ExportError
from symbolics.node.call import ModuleOrigin
from symbolics.node.containers import expand_leaves, fill
from symbolics.node.held_modules import Held, apart, modules_taken, with_modules
from symbolics.node.modules import written_module
from symbolics.node.names import qualified_name
from symbolics.node.patterns import Patterns
from symbolics.users import warn

__all__ = ["ModuleBackward", "OpaqueModule", "opaque_calls"]


class OpaqueModule:
    """A module as what a PythonOp calls, with what a Function class says of itself: a name, a forward with a signature.

    A call takes the module's parameters and buffers, then its own arguments. It returns what the module returns; where the module changes some
    of its buffers, a tuple of that and the changed ones: so a graph has the new values.

    Attributes:
        module: The module.
        names: The names of its parameters and buffers, as `state` found them last.
        changes: Those that it changes, by number, as far as that was seen.
        moved: The attributes that a call set, and that were put back.
    """

    #: There is a setup_context, as to say that forward takes no ctx.
    setup_context = None

    def __init__(self, module: torch.nn.Module) -> None:
        """Args: the module."""
        self.module, self._original = module, module.forward
        cls = type(module)
        self.identity: Any = cls
        self.__module__, self.__qualname__, self.__name__ = cls.__module__, cls.__qualname__, cls.__name__
        self.changes: tuple[int, ...] = ()
        self.moved: list[str] = []
        self._held, self._tensors, self._given = Held(module), list[torch.Tensor](), list[torch.Tensor]()

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Has the signature of a call; `apply` makes it."""
        raise NotImplementedError

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    @property
    def names(self) -> list[str]:
        """The names of the parameters and buffers."""
        return self._held.names

    def state(self) -> list[torch.Tensor]:
        """The parameters and buffers, as they are now: an exporter puts others into their places."""
        self._held, self._tensors = Held.of(self.module)
        self._given = self._tensors
        return self._tensors

    def parts(self, pairs: Mapping[int, torch.Tensor] = MappingProxyType({})) -> list[torch.Tensor]:
        """`state`, as a node takes it: of a complex tensor the real and imaginary parts, in a last dimension.

        Args:
            pairs: What a trace has for some of them, by their id.
        """
        state = self.state()
        self._given = self._held.outside([pairs.get(id(tensor), tensor) for tensor in state]) if self._held.complex else state
        return self._given

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the module itself, after `state`, and see which of its tensors it changes.

        Raises:
            ExportError: In training mode, it leaves a value with a gradient in a buffer.
        """
        versions = [tensor._version for tensor in self._tensors]
        # Kernels of batch norms write past the version.
        values = [None if tensor.requires_grad else tensor.detach().clone() for tensor in self._tensors]
        result = apart(self._run(*args, **kwargs), (self._tensors, args, kwargs))
        changed = [
            i
            for i, (tensor, version, value) in enumerate(zip(self._tensors, versions, values, strict=True))
            if tensor._version != version or (value is not None and not same_values(tensor, value))
        ]
        self.note({*changed, *self._held.replaced(self._tensors)})
        if kept := self._held.with_gradient(self.changes):
            what = (
                f"{qualified_name(self)}: it leaves a value with a gradient in its buffer {kept[0]}, which flows on to whoever reads that next, and in a "
                "file does not"
            )
            way = "detach what is written into the buffer (y.detach())"
            if any(module.training for module in self.module.modules() if private.parts_of(module)[1]):
                raise ExportError(f"{what}.\n  way out: {way}")
            warn(f"{what}: {way} where gradients are wanted")
        return result

    def note(self, changed: set[int]) -> bool:
        """Note that a call changes tensors of the module; whether one of them is news."""
        before, self.changes = self.changes, tuple(sorted({*self.changes, *changed}))
        return self.changes != before

    def written(self) -> list[Any]:
        """What `call` has changed, with what is there now."""
        return self._held.written(self._given, self._tensors, self.changes)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with other tensors in the places of its own."""
        held, count = self._held, len(self._tensors)
        state = held.inside(args[:count])
        try:
            return held.run(self._run, args[:count], state, self.changes, args[count:], kwargs)
        finally:
            self.note(set(held.replaced(state)))
            held.let_go(self._tensors)
            self.moved += [name for name in held.changed() if name not in self.moved]

    def observed(self, observe: Callable[[], Outputs], names: Sequence[str], seen: Outputs | None) -> Outputs:
        """What a call returns, once what it changes is known.

        Args:
            observe: Runs `apply` unseen.
            names: Of the arguments, the state first.
            seen: What eager's run of this call returned, None where there was none.

        Raises:
            ExportError: It changes an argument in place.
        """
        self.moved.clear()
        self.note(self._held.statistics())  # fake tensors do not show it
        if seen is not None:  # what it returned then ends in what it changed
            self.note({index for index, _ in seen.dirty if index < len(self.names)})
        before, outputs = self.changes, observe()
        self.note({index for index in outputs.mutated if index < len(self.names)})
        if self.changes != before:
            outputs = observe()
        changed = [index for index in (*outputs.mutated, *(i for i, _ in outputs.dirty)) if index >= len(self.names)]
        if changed:
            raise ExportError(
                f"it changes its argument {', '.join(names[i] for i in changed if i < len(names))} in place, which a node cannot: change a copy (x.clone()) "
                "in that forward, and return it"
            )
        if not outputs.tensors:
            raise ExportError("it returns no tensor, and a node has an output: return one (x.new_zeros(())), or name the module around it")
        if self.moved:
            outputs.side_effects.append(
                f"its forward sets {', '.join(self.moved[:5])}, which it may read in the next call; each call of the file begins without it: make what "
                "it has to remember a buffer, and write into that"
            )
        return outputs

    def result_of(self, returned: Any) -> Any:
        """What the module itself returns, of what `apply` returned."""
        return returned[0] if self.changes else returned

    def origin(self, names: Callable[[Any], str | None]) -> ModuleOrigin:
        """What another process needs to make the module.

        Args:
            names: The name under which an object is registered, or None.

        Raises:
            ExportError: It cannot be written down.
        """
        return ModuleOrigin(
            tuple(self.names), self._held.complex, self.changes, written_module(self.module, self._held, self._tensors, names)
        )


class OpaqueFunction(OpaqueModule):
    """A function in the same place: the parameters and buffers that it takes are those of the modules among its arguments."""

    def __init__(self, function: Any) -> None:
        """Args: the function, at the top level of a module."""
        super().__init__(torch.nn.ModuleList())
        self.identity, self._original = self, function
        self._noted: dict[tuple[torch.nn.Module, ...], tuple[int, ...]] = {}
        self.__module__, self.__qualname__, self.__name__ = function.__module__, function.__qualname__, function.__name__

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the modules out of the arguments of a call that is about to be made."""
        self.module, args, kwargs = modules_taken(args, kwargs)
        self.changes = self._noted.get(tuple(self.module.children()), ())
        return args, kwargs

    def note(self, changed: set[int]) -> bool:
        """See `OpaqueModule.note`; the numbers are those of the modules of this call, and mean nothing for others."""
        news = super().note(changed)
        self._noted[tuple(self.module.children())] = self.changes
        return news

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_modules(self.module, args, kwargs)
        return self._original(*args, **kwargs)

    def python_functions(self) -> dict[str, dict[str, Any]]:
        """As `symbolics.node.fingerprints` takes them."""
        return {"forward": {"forward": self._original}}

    def origin(self, names: Callable[[Any], str | None]) -> ModuleOrigin:
        """See `OpaqueModule.origin`."""
        return replace(super().origin(names), function=True)


@dataclass(eq=False)
class ModuleBackward:
    """The backward of one call of a module in eager mode, as `symbolics.capture.no_gradients` asks for it.

    Attributes:
        function: The `OpaqueModule`.
        call: Where the call was made.
        targets: The tensors of the call that need a gradient, by number.
        roots: The gradient edges of what it returned, each with shape, dtype and device.
        given: Its arguments, the state first.
        called: The module with what it was called with.
    """

    function: OpaqueModule
    call: Call
    targets: dict[int, Any] = field(default_factory=dict)
    roots: list[tuple[Any, torch.Size, torch.dtype, torch.device]] = field(default_factory=list)
    given: tuple[Sequence[Any], dict[str, Any]] = ((), {})
    called: OpaqueModule | None = None

    @classmethod
    def of(cls, function: OpaqueModule, args: Sequence[Any], kwargs: dict[str, Any], result: Any, call: Call) -> ModuleBackward:
        """Of a call that was made with some arguments, the state first, and what it returned."""
        tensors = _tensors(args, kwargs)
        hooked = any(tensor.requires_grad and private.tensor_hooks(tensor) for tensor in tensors)
        if hooked or not torch.is_grad_enabled() or private.transforms_active():
            return cls(function, call)
        edge = torch.autograd.graph.get_gradient_edge
        made = [leaf for leaf in expand_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return cls(
            function,
            call,
            {number: edge(tensor) for number, tensor in enumerate(tensors) if tensor.requires_grad},
            [(edge(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in made],
            (args, kwargs),
            copy.copy(function),
        )

    def ask(self) -> dict[int, bool]:
        """The tensors that have no gradient though they need one, each with False: another run may give one.

        Where the module takes another way for other values, what has a gradient there has one in the file: zeros, where it has none in a run.
        A parameter has one, too, where the forward takes values out of torch: it may choose its way by them, and some way that no run here took may
        reach the parameter.
        """
        if not self.roots or not self.targets:
            return {}
        try:
            cotangents = [torch.ones(shape, dtype=dtype, device=device) for _, shape, dtype, device in self.roots]
            found = torch.autograd.grad(
                [edge for edge, *_ in self.roots], list(self.targets.values()), cotangents, retain_graph=True, allow_unused=True
            )
        except Exception:  # what it kept may have been changed since: then nothing is known of it
            return {}
        missing = {number for number, gradient in zip(self.targets, found, strict=True) if gradient is None}
        assert self.called is not None
        taking, count = _ValuesTaken(), len(self.called.names)
        for seed in range(-1, _OTHERS) if missing else ():
            with contextlib.suppress(Exception), taking:  # it need not take every value
                missing -= self._reached(seed)
            if taking.found:
                missing = {number for number in missing if number >= count}
            if not missing:
                break
        return dict.fromkeys(sorted(missing), False)

    def _reached(self, seed: int) -> set[int]:
        """The tensors that have a gradient when the module is called with other values; with -1, with the same."""
        assert self.called is not None
        args, kwargs = self.given
        count = len(self.called.names)
        copies: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(seed)

        def other(leaf: Any, own: bool) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = leaf.detach().clone()
            if not own and seed >= 0 and value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.device, value.dtype)
                value = -value if seed == 0 else drawn * (value.abs().mean() if seed % 2 else 1) + (value.mean() if seed % 2 else 0)
            copies.append(value.requires_grad_(leaf.requires_grad))
            return copies[-1]

        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            state = [other(value, True) for value in args[:count]]
            rest = fill(tuple(args[count:]), lambda leaf: other(leaf, False))
            named = {key: fill(value, lambda leaf: other(leaf, False)) for key, value in sorted(kwargs.items())}
            result = self.called.apply(*state, *rest, **named)
            roots = [leaf for leaf in expand_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            found = torch.autograd.grad(roots, [copies[n] for n in self.targets], list(map(torch.ones_like, roots)), allow_unused=True)
        return {number for number, gradient in zip(self.targets, found, strict=True) if gradient is not None}


class _ValuesTaken(TorchFunctionMode):
    """Whether what runs takes values of tensors out of torch, for an `if` among others."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in TAKING or name == "nonzero":  # how many there are is a value, too
            self.found = True
        return func(*args, **(kwargs or {}))


#: On how many other values a module is called where a tensor of it got no gradient.
_OTHERS = 6


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order of its slots."""
    return [leaf for leaf in expand_leaves((*args, *(value for _, value in sorted(kwargs.items())))) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def opaque_calls(model: Any, chosen: Patterns) -> Iterator[None]:
    """While the block runs, calls of modules and functions go to the listener of their thread.

    Args:
        model: The model; what is no module has none.
        chosen: Which modules and functions are meant.

    Raises:
        ExportError: A module is meant whose calls cannot be caught.
    """
    caught, places = [], list[tuple[dict[str, Any], str, Any]]()
    try:
        for function in _functions(chosen):
            stand_in = _stand_in_of(OpaqueFunction(function), function, chosen)
            for names in [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]:
                places += [(names, name, function) for name, value in list(names.items()) if value is function]
            for names, name, value in places:
                if value is function:
                    names[name] = stand_in
        for path, module in list(model.named_modules()) if isinstance(model, torch.nn.Module) and chosen.items else []:
            if not chosen.matches(type(module), module):
                continue
            if "forward" in vars(module):
                raise ExportError(
                    f"opaque= means the module {path or '<root>'} ({qualified_name(type(module))}), whose forward is no method of its class, so that its calls "
                    "cannot be caught: name a module around it"
                )
            vars(module)["forward"] = _stand_in(OpaqueModule(module))
            caught.append(module)
        yield
    finally:
        for module in caught:
            del vars(module)["forward"]
        for names, name, function in places:
            names[name] = function


def _functions(chosen: Patterns) -> list[Any]:
    """The functions that are meant: themselves, or by a name that leads to one in a module that is loaded."""
    found = []
    for item in chosen.items:
        if isinstance(item, str):
            module, _, name = item.rpartition(":" if ":" in item else ".")
            item = vars(sys.modules[module]).get(name) if isinstance(sys.modules.get(module), types.ModuleType) else None
        if isinstance(item, types.FunctionType) and item not in found:
            found.append(item)
    return found


def _stand_in_of(opaque: OpaqueFunction, function: Any, chosen: Patterns) -> Any:
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        listener = active_listener()
        if listener is None or not listener.listening():
            return function(*args, **kwargs)
        chosen.meet(function)
        return listener.module(opaque, *opaque.take(args, kwargs))

    return stand_in


def _stand_in(opaque: OpaqueModule) -> Any:
    original = opaque.module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        listener = active_listener()
        if listener is None or not listener.listening():
            return original(*args, **kwargs)
        return listener.module(opaque, args, kwargs)

    forward.stands_in = True  # type: ignore[attr-defined]
    return forward
