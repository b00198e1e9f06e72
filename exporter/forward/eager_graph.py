"""Eager's own graph is the judge of an export: the Functions that hang on one eager run are in the file, or it fails.

A capture can only say what it saw. What it did not see shows in the autograd graph of one eager run on the example inputs: each
node of a Function there must be a PythonOp of the file, or was inlined with a notice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import textwrap
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.files.trust import name_of
from exporter.forward.changes import Changes
from exporter.forward.eager_failure import eager_failure, lacks_gradient
from exporter.forward.reached import calls_with_gradient, cut_off, parameters_behind
from exporter.forward.recomputed import changed_in_checkpoints
from exporter.forward.unchanged import unchanged
from exporter.train_mode.buffers import UNSEEN
from symbolics import torch_private as private
from symbolics.capture.callsite import Call
from symbolics.capture.disguise import as_exported, as_in_eager
from symbolics.capture.eager_calls import EagerCalls
from symbolics.capture.gradient_hooks import GradientHook, is_portable, is_removed
from symbolics.capture.gradient_ops import Answers
from symbolics.capture.interception import belongs_to_torch
from symbolics.capture.marks import differentiable_inputs
from symbolics.capture.no_gradients import NoGradients
from symbolics.capture.survey import OperatorCall, Survey
from symbolics.capture.uncompiled import uncompiled
from symbolics.capture.undifferentiable import StopWhereNone, is_refusal
from symbolics.errors import ExportError, PythonopError
from symbolics.graph.values import is_python_op
from symbolics.node.names import (
    MODULE_PROPERTY,
    SOURCE_PROPERTY,
    qualified_name,
)
from symbolics.node.operators import Operator
from symbolics.node.patterns import Patterns
from symbolics.text import cause
from symbolics.users import warn

__all__ = ["EagerGraph", "Lost"]

_lock = threading.RLock()


class CppFunction:
    """An autograd::Function of C++, which has no class in Python."""

    def __init__(self, name: str) -> None:
        """Args: its name in C++."""
        self.__module__, self.__qualname__ = "C++", name


@dataclass
class Lost:
    """A Function that eager calls more often than the file does.

    Attributes:
        function: The class, the `Operator`, or the `CppFunction`.
        eager: How many of its calls hang on eager's outputs.
        found: How many the file holds with a gradient.
        call: Where the first was made.
    """

    function: Any
    eager: int
    found: int
    call: Call

    def error(self, failure: Exception | None = None) -> ExportError:
        """What to tell the user.

        Args:
            failure: What the export as in eager mode raised, None where it came to an end.
        """
        name = "a hook on the gradient of a tensor" if self.function is GradientHook else qualified_name(self.function)
        place = f"module {self.call.module or '<root>'} at {self.call.source or 'a line unknown'}"
        if isinstance(self.function, CppFunction):
            why = "it is an autograd::Function of C++, called without an operator, so that no exporter sees the call"
            remedy = "register an operator whose Autograd kernel calls it (TORCH_LIBRARY_IMPL(mylib, Autograd, m))"
        else:
            why = "under an exporter the model takes another way, or runs where the exporter cannot look"
            remedy = "let it call the Function there, too (look for is_tracing, is_exporting, is_in_onnx_export)"
        return ExportError(
            f"{name}, called in {place}: eager makes {self.eager} call{'s' * (self.eager != 1)} of it that gradients flow through, the file has "
            f"{self.found or 'none'}.\n"
            f"  why: {why}; its own backward would be lost\n"
            + (f"  told that it runs in eager mode, the export fails: {cause(failure)}\n" if failure is not None else "")
            + f"  way out: {remedy}; name it in inline= if the derivative of what is exported is right;\n"
            "  or pass eager_check=False and answer for the gradients yourself"
        )


@dataclass
class EagerGraph:
    """The Functions of one eager run.

    Attributes:
        calls: Function class or operator -> its calls that hang on an output by gradients.
        unchecked: Why there is nothing to compare with, "" where there is.
        failed: Whether that is because the run raised, and the model as it is called without anybody looking does not.
        changed: The saved_tensors_hooks that give back something else than they were given, as text.
        state: The state (exporter/train_mode/reads.py) that the run changed, by name -> why a file may not carry it.
        noted: What it changed and is no state, in the same way.
        shared: The names of a buffer that has several, and that the run changed.
        taken: What each call of torch.autograd.grad that the forward made gave, by module and line.
        refused: Those of them that no file can be right about, not even once -> why, and the way out.
        no_gradients: Where a backward gives None, though a gradient is needed.
        read: What the run read of the model before it wrote it, by name; None where there was none.
        parameters: Those that it wrote.
        trained: The names of those that it gives a gradient.
        others: Parameters that it gives a gradient and that are not the model's.
        written: The names of those that it wrote, and that are read and trained.
        modules: Those whose attributes it wrote.
        made: All its calls, with what each was given and gave; noted for an exporter that believes fake kernels.
        recomputed: The buffers that it changed inside a checkpoint or a Function, by name -> which.
        drawn: The generators that its own code drew from, other than torch's.
    """

    calls: dict[Any, list[Call]] = field(default_factory=dict)
    unchecked: str = ""
    failed: bool = False
    changed: list[str] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    noted: dict[str, str] = field(default_factory=dict)
    taken: Answers = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    no_gradients: NoGradients = field(default_factory=NoGradients)
    read: set[str] | None = None
    parameters: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    others: list[torch.nn.Parameter] = field(default_factory=list)
    made: EagerCalls = field(default_factory=EagerCalls)
    recomputed: dict[str, str] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool | None = None,
        stopping: bool = False,
        keeps: Callable[[Operator], bool] = lambda _: False,
        chosen: Callable[[Any], object] | None = None,
        fakes: bool = False,
        gradients: bool = True,
        compiling: bool = False,
    ) -> EagerGraph:
        """Run a model once and look at the graph behind its outputs; model, arguments and random state stay as they were.

        Args:
            model: The model, in the mode of the export.
            args, kwargs: Example arguments; float tensors count as needing a gradient.
            training: The mode to run it in; None for its own.
            stopping: Whether gradients stop at arguments that PyTorch has none for.
            keeps, chosen: Which operators become nodes; which of torch's own, None for none.
            fakes: Whether the exporter has shapes and dtypes from their fake kernels.
            gradients: Whether the user has them enabled where he calls the model.
            compiling: Whether torch.compile compiles: it takes time, and a torch.cond may run in no other way.

        Raises:
            ExportError: The model fails on these arguments, as it does without anybody looking; a fake kernel says what is not so; or the loss of
                a training step cannot be exported.
        """
        inputs, keywords = differentiable_inputs((args, kwargs))
        mode = StopWhereNone() if stopping else contextlib.nullcontext()
        try:
            # One at a time: warnings and compilation are switched off in the whole process.
            with (
                _lock,
                unchanged(model, inputs, keywords) as kept,
                _quiet(),
                uncompiled() if not compiling else contextlib.nullcontext(),
                torch.enable_grad(),
                Survey(model, keeps, fakes, chosen) as survey,
                mode,
            ):
                if training is not None:
                    model.train(training)
                changes, drawn = Changes(model, kept), torch.get_rng_state()
                survey.given = changes.reads.read
                for leaf in pytree.tree_leaves((inputs, keywords)):  # the user's are leaves: backward() inside forward leaves a .grad there
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.retain_grad()
                with changes.reads, changed_in_checkpoints(model) as recomputed:
                    result = model(*inputs, **keywords)
                    changes.reads.read(result)
                survey.draws.look()
                found = cls(_calls(result, survey), changed=list(survey.changed), taken=copy.deepcopy(survey.taken))
                found.trained, found.others = parameters_behind(_tensors(result), model)
                found.made, survey.calls = survey.calls or found.made, None  # one run is enough
                if survey.backwards:
                    with unchanged(model, inputs, keywords), survey.deaf():
                        found.no_gradients = NoGradients.ask(survey.backwards)
                    survey.backwards.clear()
                del result

                def again() -> tuple[list[torch.Tensor], Any]:
                    torch.set_rng_state(drawn)
                    fresh, more = differentiable_inputs((args, kwargs))
                    result = model(*fresh, **more)
                    changes.reads.read(result)
                    return _tensors(result), (fresh, more)

                found.state, found.recomputed, found.drawn = changes.found(again), recomputed, survey.draws.sources
                found.noted, found.refused, found.shared = changes.noted, changes.refused, changes.shared
                found.read, found.parameters, found.modules = changes.reads.first, changes.parameters, changes.modules
                found.written = changes.trained
        except ExportError:  # a fake kernel, the loss of a training step: it names what is wrong
            raise
        except Exception as error:
            run = functools.partial(
                cls.of, model, args, kwargs, training=training, keeps=keeps, chosen=chosen, fakes=fakes, gradients=gradients
            )
            if not stopping and is_refusal(error):
                return run(stopping=True, compiling=compiling)
            own = _failure(model, args, kwargs, training, fakes, gradients)
            if own is not None:
                if lacks_gradient(own):  # for the export all inputs need one, so that this says nothing of what stands in its way
                    own = error
                raise eager_failure(own, getattr(model, "called", "")) from own
            if not compiling and "torch._dynamo" in sys.modules:
                return run(stopping=stopping, compiling=True)
            why = f"an eager run raised {type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' …')}"
            return cls(unchecked=why, failed=True, made=EagerCalls(why))
        return found

    def check_changes(self) -> None:
        """Refuse changes of state that leave a file wrong from the start.

        Raises:
            ExportError: The model makes such changes.
        """
        for name, why in self.refused.items():
            raise ExportError(f"forward changes {name!r} {why}")

    def check_taken(self, calls: Counter[tuple[str, str]]) -> None:
        """Refuse a file for which the model took fewer gradients than in eager mode.

        Args:
            calls: How many calls of torch.autograd.grad the export has seen, by module and line.

        Raises:
            ExportError: It has seen none on a line that makes some in eager mode.
        """
        for (module, source), answers in self.taken.items():
            if not calls[module, source]:
                raise ExportError(
                    f"torch.autograd.grad, called in module {module or '<root>'} at {source}: eager makes {len(answers)} call{'s' * (len(answers) != 1)} of it, "
                    "the export has seen none.\n"
                    "  why: under an exporter the model takes another way, or runs where the exporter cannot look\n"
                    "  way out: let it take the gradient there, too (look for is_tracing, is_exporting, is_in_onnx_export); or pass eager_check=False"
                )

    def warn_of_parameters(self, model: ir.Model) -> None:
        """Say which parameters have a gradient in eager mode, and none in the file."""
        names = cut_off(model, self.trained)
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            warn(
                f"{', '.join(map(repr, names[:5]))}{more}: parameters with a gradient in eager mode, and none in the file, for under this exporter no output "
                "depends on them: the model takes another way there, holds a copy, or makes numbers of them (.item(), numpy); look there, or try the other exporter."
            )

    def warn_of_draws(self) -> None:
        """Say that the file holds numbers which eager mode draws anew at each call."""
        if self.drawn:
            warn(
                f"forward draws numbers by {' and '.join(f'{name}' for name in self.drawn)}, outside of any autograd Function: the file holds what was drawn at "
                "its export, and never draws again. Draw by torch (torch.rand, which a file does anew), or pass the numbers as an input."
            )

    def explain(self, error: Exception) -> None:
        """Say what of the model an exporter stumbled over, where that is known.

        Args:
            error: What torch's exporter raised.

        Raises:
            ExportError: The forward changes state that no exporter carries, or takes a gradient where it cannot look.
        """
        known = next(((name, why) for name, why in self.state.items() if why != UNSEEN), None)
        if isinstance(error, PythonopError) or "data-dependent" in str(
            error
        ):  # a branch on values: exporter.forward.failures names its line
            return
        if "using `torch.autograd.grad`" in str(error):  # by Dynamo, which captures bodies
            line = re.findall(r'File "([^"]+)", line (\d+)', str(error))
            raise ExportError(
                f"torch.autograd.grad is called in the body of torch.cond, a loop or a scan{' at {}:{}'.format(*line[-1]) if line else ''}, which torch's "
                "exporter captures apart.\n  way out: take the gradient outside, of what torch.cond returns; or export with dynamo=False"
            ) from error
        if known is None and self.shared:
            raise ExportError(
                f"forward changes the buffer {self.shared[0]!r}, which is {self.shared[1]!r}, too, and torch's exporter fails ({cause(error)}).\n"
                "  way out: export with dynamo=False; or let one module have the buffer, and hand it to the other's forward"
            ) from error
        if known is None:
            return
        raise ExportError(
            f"forward changes {known[0]!r}, and no file can carry that: {known[1]}. torch's exporter fails there ({cause(error)}).\n"
            "  way out: register a buffer of fixed shape in __init__, and let forward write into it (buffer.copy_(...))"
        ) from error

    def check_saved_tensors(self) -> None:
        """Refuse saved_tensors_hooks that change values: a file keeps what the forward computed.

        Raises:
            ExportError: The model has such hooks.
        """
        if self.changed:
            raise ExportError(
                f"the saved_tensors_hooks {', '.join(dict.fromkeys(self.changed))} give back other values than they were given, so that eager's gradients are "
                "not those of the forward, and a file keeps what the forward computed.\n"
                "  way out: export without them (the gradients are then the exact ones); or put what they change into the backward of an autograd Function"
            )

    def translated(self, model: ir.Model, names: Callable[[Any], str | None]) -> list[tuple[type, str]]:
        """The Functions that only operators call, and that operator, where a model exists and has no call of the Function at all."""
        held = {node.attributes["name"].as_string() for node in model.graph.all_nodes() if is_python_op(node)}
        return [
            (function, calls[0].operator)
            for function, calls in self.calls.items()
            if all(call.operator for call in calls) and (names(function) or qualified_name(function)) not in held
        ]

    def lost(self, model: ir.Model, inlined: dict[str, str], inline: Patterns, names: Callable[[Any], str | None]) -> list[Lost]:
        """What the file lacks: calls that are not there, or that no gradient of an output reaches.

        A call of eager's and a node are the same if module and source line are. Nodes in bodies (of torch.cond, or a loop) may run
        any number of times and know no line; they stand for any call of their Function.

        Args:
            model: The exported model.
            inlined: Functions that were inlined with a notice, by qualified name.
            inline: Those that were to be inlined.
            names: Names of registered classes.
        """
        held: dict[str, Counter[Call]] = {}
        anywhere: set[str] = set()
        for node in calls_with_gradient(model) if self.calls else ():
            name, at = (
                node.attributes["name"].as_string(),
                Call(node.metadata_props.get(MODULE_PROPERTY, ""), node.metadata_props.get(SOURCE_PROPERTY, "")),
            )
            held.setdefault(name, Counter())[at] += 1
            if node.graph is not model.graph:
                anywhere.add(name)
        found = []
        for function, calls in self.calls.items():
            name = names(function) or qualified_name(function)
            if name in anywhere or qualified_name(function) in inlined or inline.matches(function):
                continue
            here = held.get(name, Counter())
            missing = Counter(replace(call, operator="") for call in calls) - here
            if missing:
                first = next(call for call in calls if replace(call, operator="") in missing)
                found.append(Lost(function, len(calls), len(calls) - missing.total(), first))
        return found


def _failure(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None, fakes: bool, gradients: bool
) -> Exception | None:
    """What the model raises as its user calls it: without a gradient for each input, and nobody looking.

    Of tensors without data nothing is known, nor of a model that asks who calls, and raises only where that is no exporter.
    """
    tensors = [
        leaf for leaf in (*pytree.tree_leaves((args, kwargs)), *model.parameters(), *model.buffers()) if isinstance(leaf, torch.Tensor)
    ]
    if any(map(private.is_fake, tensors)):
        return None
    asked: list[types.CodeType] = []

    def noted(asker: types.FrameType) -> bool:
        asked.append(asker.f_code)
        return True

    def called() -> Exception | None:
        with unchanged(model, args, kwargs):
            if training is not None:
                model.train(training)
            try:
                model(*args, **kwargs)
            except Exception as error:
                return error
        return None

    with _lock, _quiet(), torch.set_grad_enabled(gradients):
        failure = called()
        if failure is not None:
            with as_in_eager(noted):
                called()
        if asked:
            with as_exported(fakes):
                return None if called() is None else failure
    return failure


def _calls(result: Any, survey: Survey) -> dict[Any, list[Call]]:
    """The calls that hang on a result by gradients; all calls that were made where nobody can find tensors in the result."""
    made_by = {id(node): call for node, call in survey.made}
    hooked: dict[int, list[Call]] = {}
    for node, hook, handle, call in survey.hooked:
        if not is_removed(handle) and is_portable(hook, name_of):
            hooked.setdefault(id(node), []).append(call)
    outputs = _tensors(result)
    ends = [t.grad_fn for t in outputs if t.grad_fn is not None]
    calls: dict[Any, list[Call]] = {}
    operators = {id(node): each for each in survey.operators for node in each.made}
    behind = {id(node): running for node, running in survey.behind}
    inside = {id(node) for each in survey.operators if not each.kept for node in _nodes(each.made, each.sources)}
    counted = {id(each) for each in survey.operators if not behind.keys().isdisjoint(map(id, each.made))}
    cpps: dict[str, CppFunction] = {}
    for node in _nodes(ends, operators=operators, behind=behind) if outputs else {id(node): node for node, _ in survey.made}.values():
        if id(node) in hooked:
            calls.setdefault(GradientHook, []).extend(hooked[id(node)])
        operator = operators.get(id(node))
        if operator is not None and operator.kept:
            if id(operator) not in counted:
                counted.add(id(operator))
                calls.setdefault(operator.operator, []).append(operator.call)
            continue
        if id(node) not in inside and (cpp := private.cpp_function_of(node)):
            calls.setdefault(cpps.setdefault(cpp, CppFunction(cpp)), []).append(Call())
        function = private.function_of(node)
        if function is not None and not belongs_to_torch(function) and id(node) not in behind:
            calls.setdefault(function, []).append(made_by.get(id(node), Call()))
    return calls


def _tensors(result: Any, depth: int = 0) -> list[torch.Tensor]:
    found = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and depth < 3 and not isinstance(leaf, type):  # a container that torch does not know
            found += _tensors(list(vars(leaf).values()), depth + 1)
    return found


def _nodes(
    outputs: Iterable[Any],
    ends: Iterable[Any] = (),
    operators: Mapping[int, OperatorCall] | None = None,
    behind: Mapping[int, Any] | None = None,
) -> Iterator[Any]:
    """Every node of the graph behind some nodes, once, up to others; what hangs inside a kept operator is passed over.

    Behind a node that a backward made is the node whose backward that was, too: in the file it is that which the gradient hangs on.
    """
    todo = list(dict.fromkeys(outputs))
    seen = {*todo, *ends}
    while todo:
        node = todo.pop()
        yield node
        operator = (operators or {}).get(id(node))
        following = list(operator.sources) if operator is not None and operator.kept else [below for below, _ in node.next_functions]
        for below in (*following, (behind or {}).get(id(node))):
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warn of nothing twice."""
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        yield
