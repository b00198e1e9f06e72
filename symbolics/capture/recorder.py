"""Recorder: turns a call of ``Function.apply``, of an operator, or of a module that ``opaque=`` names, during an export into an AutogradCall and one opaque op.

Both exporters share it. While a recorder is the listener of a thread, each outermost call comes to it. It runs forward once,
unseen by the exporter, to learn the outputs, files a `Record` under a key and calls
``torch.ops.pythonop.call(inputs, sizes, key)`` in the Function's place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from symbolics import torch_private as private
from symbolics.capture.binding import Slots, bind
from symbolics.capture.callsite import Callsites, autocast_state
from symbolics.capture.capture import Capture
from symbolics.capture.eager_calls import EagerCall, EagerCalls, example_of
from symbolics.capture.gradient_hooks import GradientHook, HookedTensor, arguments_of, changes_nothing, shown_hook, unhook, why_not_portable
from symbolics.capture.gradient_ops import Answers
from symbolics.capture.inlining import (
    OTHER_GRADIENTS,
    answers_for_parameters,
    closed_over,
    inlined,
    modules_among,
    state_of,
    trainable_module,
)
from symbolics.capture.interception import belongs_to_torch, original_apply
from symbolics.capture.listener import Listener, active_listener
from symbolics.capture.loops import as_handed_on
from symbolics.capture.no_gradients import NoGradients
from symbolics.capture.opaque_modules import OpaqueModule
from symbolics.capture.opaque_op import Record, forget, remember
from symbolics.capture.operator_calls import UNDER_TRANSFORMS, origin_of, run_inlined
from symbolics.capture.other_hooks import check_module_hooks, check_parameter_hooks
from symbolics.capture.probe import observe
from symbolics.capture.restored import KeptState
from symbolics.capture.returned_numbers import handed_on
from symbolics.capture.told import tell
from symbolics.capture.trace import Trace
from symbolics.errors import ExportError
from symbolics.node.attributes import write_attributes
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot
from symbolics.node.dtypes import onnx_type
from symbolics.node.names import qualified_name
from symbolics.node.opaque import Opaque
from symbolics.node.operators import Operator, why_never
from symbolics.node.patterns import Patterns
from symbolics.users import warn

__all__ = ["Capture", "Recorder", "active_recorder"]

_keys = itertools.count()

#: Why what an entry of ``opaque=`` means is a node.
NAMED = "opaque= names it"


def active_recorder() -> Recorder | None:
    """The recorder that listens in this thread, None outside a hook."""
    listener = active_listener()
    return listener if isinstance(listener, Recorder) else None


class Recorder(Listener):
    """Records the calls of the exports under one hook, in one thread.

    Attributes:
        inline, chosen: Which Functions are inlined in place of becoming a node; what ``opaque=`` makes a node.
        names: Names of registered objects, for arguments without a portable form.
        records: key -> Record, in the order of the calls.
        portable, opaque: Which Functions a function of the file may stand for: theirs may hide modules; those for which none can, and why.
        unsaid: Functions with arguments that no node can say, and why: a function of the file has to stand for them.
        answers, no_gradients: What torch.autograd.grad gave in eager mode; where backward gave None there, though a gradient was needed.
        read, eager: What eager mode read of the model before it wrote it, by name (None where nobody saw); the calls that it made.
        translated: Which operators the exporter has a translation of: those of torch.library stay what they are.
        lacking: The names of torch's own operators that ``opaque="missing"`` means, with or without their overload: the exporter failed at them.
        kept: What the Functions keep between calls.
        capture: The export that is running, or the last one.
    """

    def __init__(
        self, inline: Patterns | None = None, names: Callable[[Any], str | None] = lambda _: None, chosen: Opaque | None = None
    ) -> None:
        super().__init__()
        self.inline, self.chosen = inline or Patterns(), chosen or Opaque()
        self.names = names
        self.portable: Callable[[type], bool] = lambda _: False
        self.opaque: dict[type, str] = {}
        self.unsaid: dict[type, ExportError] = {}
        self.records: dict[str, Record] = {}
        self.answers: Answers = {}
        self.no_gradients = NoGradients()
        self.read: set[str] | None = None
        self.eager = EagerCalls()
        self.translated: Callable[[Any], bool] = lambda _: False
        self.lacking: set[str] = set()
        self.kept = KeptState()
        self.capture = Capture()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        forget(self.records)

    def begin(self, model: Any, traced: bool = False) -> Capture:
        """A model is about to be exported; traced: by torch.jit.trace."""
        self.eager.begin()
        known = isinstance(model, torch.nn.Module)
        self.capture = Capture(Callsites(model), bool(model.training), model=model) if known else Capture()
        self.capture.trace = Trace() if traced else None
        if known:
            check_parameter_hooks(model)
            check_module_hooks(model, self.capture.warned)
        return self.capture

    def listening(self) -> bool:
        """Whether a call in this thread, now, belongs to an export."""
        return super().listening() and (private.is_tracing() or (torch.compiler.is_exporting() and private.captures_here()))

    def refuse(self, what: str, why: str | ExportError) -> NoReturn:
        """Stop the export for what was called, and why; torch may try another way, the hook raises this error in the end.

        Raises:
            ExportError: Always; it names the module and the line of user code.
        """
        module, source = self.capture.sites.here()
        place = f"{what}, called in module {module or '<root>'} at {source or 'a line unknown'}"
        self.capture.error = self.capture.error or (why if isinstance(why, ExportError) else ExportError(why)).at(place)
        raise self.capture.error

    # ------------------------------------------------------------------------------------------------------ apply

    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for ``cls.apply(*args, **kwargs)``."""
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return self._inline_checkpoint(args)
        if belongs_to_torch(cls):
            if private.is_module_hook(cls) and self.capture.model is not None:
                self._check_module_hooks()  # one that forward registers
            return original_apply(cls, args, kwargs)
        if self.capture.error is not None:  # torch tries a second strategy after an error; it cannot do better
            raise self.capture.error
        read = self.capture.flags.read(None, *self.capture.held.call(args, kwargs))
        args, kwargs = read.args, read.kwargs
        if read.copies:
            result = self.apply(cls, args, kwargs)
            self.capture.flags.note(read, result)
            return result
        module, source = self.capture.sites.here()
        with self._told_where(cls, module, source):
            if self.inline.matches(cls):
                return self.run_inline(cls, args, kwargs)
            for check in self.capture.taken.pushing:
                check(cls, (args, kwargs))
            if self._is_portable(cls):
                return self._node(cls, args, kwargs, module, source)
            hidden = trainable_module(args, kwargs)
            if hidden is not None:
                beside = OTHER_GRADIENTS if answers_for_parameters(args, kwargs) else ""
                if cls in self.opaque:
                    beside += f". No function of the file can stand for it: {self.opaque[cls]}"
                self._notice(cls, module, f"its argument {hidden} holds trainable parameters, which an opaque node would hide", beside)
                return self.run_inline(cls, args, kwargs)
            return self._node(cls, args, kwargs, module, source)

    @contextlib.contextmanager
    def _told_where(self, cls: Any, module: str, source: str) -> Iterator[None]:
        """Errors of the block say what was called, and where."""
        try:
            yield
        except ExportError as error:
            if self.capture.error is None:
                self.capture.error = error.at(
                    f"{qualified_name(cls)}, called in module {module or '<root>'} at {source or 'a line unknown'}"
                )
            raise self.capture.error from error.__cause__

    def _is_portable(self, cls: Any) -> bool:
        return isinstance(cls, type) and cls not in self.opaque and (cls in self.unsaid or self.portable(cls))

    @property
    def choosing(self) -> bool:
        """Whether any operator is `chosen`."""
        return bool(self.chosen.operators.items or self.lacking)

    def chooses(self, overload: Any) -> str:
        """Why ``opaque=`` makes a node of each call of an operator, "" where it does not."""
        if not self.choosing or not (operator := Operator.of(overload)).takes_tensors:
            return ""
        if self.chosen.operators.matches(operator):
            return NAMED
        return "" if self.lacking.isdisjoint((operator.name, operator.name.rpartition(".")[0])) else "torch.onnx cannot translate it"

    def keeps(self, operator: Operator) -> bool:
        """Whether a call of an operator becomes a node: it is chosen; or no exporter knows it, it is not inlined, and autograd sees it as one."""
        return bool(self.chooses(operator.overload)) or (
            operator.takes_tensors
            and not self.translated(operator.overload)
            and not self.inline.matches(operator)
            and not private.is_composite(operator.overload)
        )

    def operator(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Stand in for ``overload(*args, **kwargs)``."""
        if self.capture.error is not None:
            raise self.capture.error
        operator = Operator.of(overload)
        if not operator.takes_tensors:
            return self._quietly(call)
        module, source = self.capture.sites.here()
        chosen = self.chooses(overload)
        if not chosen and self.translated(overload) and not self.inline.matches(operator):
            self.capture.translated.setdefault(operator.name, (module, source))
            with self.deaf():  # what it calls belongs to it
                return call()
        with self._told_where(operator, module, source):
            if not chosen and not self.keeps(operator):
                return run_inlined(operator, args, kwargs)
            if private.transforms_active():
                raise ExportError(UNDER_TRANSFORMS)
            return operator.result_of(self._node(operator, args, kwargs, module, source))

    def module(self, opaque: OpaqueModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a call of a module."""
        if self.capture.error is not None:
            raise self.capture.error
        read = self.capture.flags.read(None, *self.capture.held.call((*self._state(opaque), *args), kwargs))
        module, source = self.capture.sites.here()
        with self._told_where(opaque, module, source):
            if private.transforms_active():
                raise ExportError(UNDER_TRANSFORMS)
            result = opaque.result_of(self._node(opaque, read.args, read.kwargs, module, source))
        self.capture.flags.note(read, result)
        return result

    def _state(self, opaque: OpaqueModule) -> list[torch.Tensor]:
        with self.deaf(), private.unheard():  # reading the parts of complex ones is none of the model's calls
            return opaque.parts({} if self.capture.trace is None else self.capture.trace.pairs)

    def record_operator(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, source: str
    ) -> tuple[str, Slots]:
        """File the record of a call that stands in a graph captured before; its key, and the tensors and sizes among its arguments."""
        with self._told_where(operator, module, source):
            return self._record(operator, args, kwargs, module, source)

    # ------------------------------------------------------------------------------------------------------ hooks

    def hook(self, tensor: torch.Tensor, hook: Any, handle: Any = None, parameter: str = "") -> None:
        """Carry a hook on the gradient of a tensor, by `symbolics.capture.gradient_hooks`.

        Args:
            tensor: The tensor.
            hook: What was registered.
            handle: What removes the hook.
            parameter: The name of the parameter that had the hook before the export, "" for a hook that the forward registers.

        Raises:
            ExportError: A file cannot name the hook, and it may change the gradient.
        """
        what = f"the hook {shown_hook(hook)} on the gradient of " + (f"the parameter {parameter!r}" if parameter else "a tensor")
        failure = why_not_portable(hook, self.names)
        if failure is not None:
            if changes_nothing(hook):
                self.warn_of_hook(what)
                return
            self.refuse(
                what,
                "a file cannot name it: make it a function at the top level of a module (functools.partial gives it more arguments), or give it "
                "a name with exporter.register(hook, name) here and in the process that runs the file",
            )
        module, source = self.capture.sites.here()
        with private.unheard(), torch.enable_grad():
            key, slots = self._record(GradientHook, (tensor, *arguments_of(hook)), {}, module, source)
        value = private.traced_value(tensor) if private.is_tracing() else None
        (result,) = self._call_op(slots, key)
        self.capture.hooks.append(HookedTensor(key, tensor, value, result, handle))

    def _check_module_hooks(self) -> None:
        assert self.capture.model is not None
        try:
            check_module_hooks(self.capture.model, self.capture.warned)
        except ExportError as error:
            self.capture.error = self.capture.error or error
            raise

    def end_forward(self) -> None:
        """The model's forward returned: what was registered and not removed is there to stay."""
        if any(each.removed and each.key in self.capture.taken.hooked for each in self.capture.hooks):
            self.refuse(
                "a hook on the gradient of a tensor",
                "forward takes a gradient through it and then removes it, which no file can say: register it on a view of the tensor (x.view_as(x)) that only "
                "that gradient goes through, and leave it there",
            )
        if (trace := self.capture.trace) is not None:
            gone = {id(each.result) for each in self.capture.hooks if each.removed}
            trace.anchors = [anchor for anchor in trace.anchors if id(anchor) not in gone]
        unhook(self.capture.hooks)
        self.capture.hooks.clear()

    def warn_of_hook(self, what: str) -> None:
        """Say that a hook that changes nothing is not carried."""
        module, source = self.capture.sites.here()
        warn(
            f"{what}, in module {module or '<root>'} at {source or 'a line unknown'}: it returns nothing, so gradients are the same without it, "
            "and the file does not run it."
        )

    def _node(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, source: str) -> Any:
        with private.unheard(), as_handed_on((args, kwargs)):  # reading a tensor's properties would cost a call of each mode
            key, slots = self._record(cls, args, kwargs, module, source)
        outputs = self.records[key].outputs
        results = self._call_op(slots, key)
        for source_index, output_index in outputs.dirty:
            changed = slots.values[source_index]
            results[output_index] = self._write_back(changed, results[output_index])
            if self.capture.trace is not None:
                self.capture.trace.dirtied.append(changed)
            self.capture.aliases.change(changed, qualified_name(cls))
        for index in outputs.mutated:
            self.capture.aliases.change(slots.values[index], qualified_name(cls))
        for one, other, how in (
            *((slots.values[i], results[j], "one of its arguments or a view of it") for i, j in outputs.aliases),
            *((results[i], results[j], "two tensors of one memory") for i, j in outputs.shared),
        ):
            why = f"{qualified_name(cls)} at {source or 'a line unknown'} returned {how}"
            self.capture.aliases.pairs.append(
                (one, other, why, "return a copy from that forward (x.clone()), or change a copy of the tensor")
            )
        if torch.is_grad_enabled():
            self.capture.aliases.keep(each for each in (*slots.values, *results) if isinstance(each, torch.Tensor))
        tell(outputs.told, results)
        who = f"{qualified_name(cls)}, called in module {module or '<root>'} at {source or 'a line unknown'}"
        return handed_on(outputs.template, outputs.moved, results, who)

    def _write_back(self, target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Let a dirty input stand for the output that replaces it; the caller gets the same object, as from eager."""
        if self.capture.trace is None:
            return target.copy_(result)
        self.capture.trace.replace(target, result)
        return target if target.requires_grad == result.requires_grad else result

    def _record(
        self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, source: str, seen: EagerCall | None = None
    ) -> tuple[str, Slots]:
        """File a record of a call, of which an eager run may have been ``seen``; its key, and the tensors and sizes among its arguments."""
        bound, names, passed = bind(cls, args, kwargs)
        name, operator = self._name(cls), cls if isinstance(cls, Operator) else None
        if operator is not None and (why := why_never(operator.overload)):
            raise ExportError(f"no node can stand for it: {why}; leave it out of opaque=")
        opaque = cls if isinstance(cls, OpaqueModule) else None
        passed = passed if isinstance(cls, type) else len(bound.args)
        if opaque is not None:
            count = len(opaque.names)
            names = [*opaque.names, *(f"{i}" for i in range(len(bound.args) - count)), *names[len(bound.args) :]]
        for variable in [name for name, value in closed_over(cls.forward) if isinstance(value, (torch.Tensor, torch.nn.Module))]:
            # It is no argument: autograd gives it no gradient, and neither do we.
            self._warn(cls, module, f"forward closes over {variable!r}; it is not in the file and gets no gradient: pass it as an argument")
        slots = Slots()
        positional = tuple(slots.take(value) for value in bound.args)
        keywords = {name: slots.take(value) for name, value in sorted(bound.kwargs.items())}
        given = len(slots.values)
        hidden = state_of(modules_among(bound.args, bound.kwargs), slots) if self._is_portable(cls) else []
        slots.check([*names, *{index: name for _, name, index in reversed(hidden) if index >= given}.values()], cls)
        self.capture.aliases.check_read(slots.tensors)
        if (trace := self.capture.trace) is not None:
            trace.reading(slots.tensors)
            trace.sizes.check_frozen((*bound.args, *bound.kwargs.values()), names)
        arguments = slots.tensors_and_sizes[:given]
        seen = seen if seen is not None or private.is_tracing() else self.eager.like(cls, (module, source), arguments)
        example = example_of(slots, given, seen) if self.portable(cls) or self._is_portable(cls) else []
        observed = functools.partial(
            observe,
            cls,
            (bound.args[:passed], bound.kwargs),
            arguments,
            self._quietly,
            seen,
            self.eager.missing,
            self.capture.dynamic,
        )
        with self.kept.watching(cls) as state:
            outputs = observed() if opaque is None else opaque.observed(observed, names, seen.outputs if seen is not None else None)
        outputs = self.kept.said_of_call(outputs, cls, state)
        changed = [*(i for i, _ in outputs.dirty), *outputs.mutated]
        self.capture.aliases.check_apart(changed, slots.values, lambda i: names[int(slots.path(i))])
        outputs.input_sizes += [] if private.is_tracing() else slots.dims(())[given:]
        grad = torch.is_grad_enabled()
        # Of a Function, autograd does not see those in lists.
        given_tensors = (*bound.args, *bound.kwargs.values()) if isinstance(cls, type) else slots.tensors
        tracked = {id(value) for value in given_tensors if isinstance(value, torch.Tensor)}
        tracked |= {id(slots.values[index]) for *_, index in hidden}
        flags = tuple(grad and isinstance(t, torch.Tensor) and t.requires_grad and id(t) in tracked for t in slots.values)
        call = AutogradCall(
            id="",
            name=name,
            args=positional,
            kwargs=keywords,
            outputs=outputs.template,
            input_types=tuple(onnx_type(t.dtype) if isinstance(t, torch.Tensor) else onnx_type(torch.int64) for t in slots.values),
            input_ranks=tuple(t.dim() if isinstance(t, torch.Tensor) else 0 for t in slots.values),
            input_requires_grads=flags,
            **self.no_gradients.of(cls, module, source, slots.order[:given], flags),
            output_types=tuple(onnx_type(o.dtype) for o in outputs.tensors),
            output_ranks=tuple(len(o.shape) for o in outputs.tensors),
            output_requires_grads=tuple(o.requires_grad for o in outputs.tensors),
            inplace=bool(outputs.dirty),
            training=self.capture.training,
            autocast=autocast_state(),
            passed=None if passed == len(bound.args) else passed,
            operator=None if operator is None else origin_of(operator, source),
            module=None if opaque is None else opaque.origin(self.names),
        )
        call = replace(call, id=(key := f"{next(_keys)}"))
        traced = None
        try:  # an argument without a portable form is an error here, where module and line are known
            attributes = write_attributes(call, self.names)
        except ExportError as error:
            if cls in self.opaque:
                raise ExportError(f"{error}. No function of the file can stand for it: {self.opaque[cls]}", faq=error.faq) from error
            if not isinstance(cls, type):
                raise
            if not self._is_portable(cls):
                self.unsaid[cls] = error
                return self._record(cls, args, kwargs, module, source, seen)
            traced = call
        if hidden or traced is not None:
            every = tuple(Slot(index, kind) for index, kind in enumerate(slots.order))  # type: ignore[arg-type]
            traced, call = call, replace(call, args=every, kwargs={}, passed=None)
            attributes = write_attributes(call, self.names)
        if outputs.mutated:
            declared = "ctx.mark_dirty" if operator is None else "mutates_args, or (a!) in its schema"
            shown = ", ".join(f"argument {names[int(slots.path(i))]}" for i in outputs.mutated)
            text = f"its forward changes {shown} in place without {declared}; the node leaves it as it was: declare the change"
            self._warn(cls, module, text)
            why = f"{qualified_name(cls)} changes it in place without {declared}"
            way = "call ctx.mark_dirty in that forward, and return it" if operator is None else "declare the change where it is registered"
            self.capture.aliases.stale += [(slots.values[i], why, way) for i in outputs.mutated]
        for effect in filter(functools.partial(self.kept.is_new, cls), outputs.side_effects):
            self._warn(cls, module, effect)
        sizes = slots.dims(self.capture.dynamic)
        chosen = self.chooses(operator.overload) if operator is not None else NAMED if opaque is not None else ""
        self.records[key] = Record(call, attributes, outputs, module, source, cls, sizes, traced, hidden, chosen=chosen, example=example)
        remember(key, self.records[key])
        return key, slots

    def _name(self, cls: Any) -> str:
        """What the file calls a Function: one name, one class."""
        name = self.names(cls) or qualified_name(cls)
        cls = getattr(cls, "identity", cls)  # of a module its class
        other = self.capture.classes.setdefault(name, cls)
        if other is not cls:
            raise ExportError(
                f"two classes of this model have the name {name}, a file could only mean one: make the class once and keep it, or give each a name "
                "with exporter.register(cls, name), here and in the process that runs the file"
            )
        return name

    def _call_op(self, slots: Slots, key: str) -> list[torch.Tensor]:
        with self.deaf():
            context, *outputs = torch.ops.pythonop.call(slots.tensors, slots.sizes, key)
        if self.capture.trace is not None:
            self.capture.trace.anchors.append(outputs[0] if outputs else context)
        return outputs

    def _quietly(self, run: Callable[[], Any]) -> Any:
        """Run without being captured: what a Function calls inside stays inside."""
        with self.deaf(), private.paused_capture():
            return run()

    def run_inline(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a Function as the model's own code."""
        for effect in filter(functools.partial(self.kept.is_new, cls), self.kept.effects_inlined(cls)):
            self._warn(cls, self.capture.sites.here()[0], effect)
        if private.is_tracing() and hasattr(cls, "symbolic"):
            return original_apply(cls, args, kwargs)  # its symbolic serves, as without the hook
        return inlined(self.capture, cls, args, kwargs)

    def _inline_checkpoint(self, args: tuple[Any, ...]) -> Any:
        run_function, _preserve_rng_state, *inputs = args
        cls = torch.utils.checkpoint.CheckpointFunction
        if not self.inline.matches(cls):
            self._notice(cls, self.capture.sites.here()[0], "a reentrant checkpoint recomputes, a file has nothing to gain from it")
        return run_function(*inputs)

    def _notice(self, cls: type, module: str, why: str, beside: str = "") -> None:
        if qualified_name(cls) not in self.capture.inlined:
            self.capture.inlined[qualified_name(cls)] = why
            self._warn(cls, module, f"inlined, because {why}. Its gradient is the derivative of its forward{beside}")

    def _warn(self, cls: Any, module: str, text: str) -> None:
        warn(f"{qualified_name(cls)} in module {module or '<root>'}: {text}.")
