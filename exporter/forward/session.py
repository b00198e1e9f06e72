"""One export under a hook: its surroundings, eager's judgement of it, and how the file gets written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from exporter.errors import is_full
from exporter.files.outlined import outline_modules
from exporter.files.program import Program
from exporter.files.save import writable
from exporter.files.trust import name_of
from exporter.files.valid import check_valid
from exporter.forward.changes import check_written
from exporter.forward.eager_graph import EagerGraph, Lost
from exporter.forward.failures import of_torch
from exporter.forward.functions import describe_functions, say_names
from exporter.forward.history import History
from exporter.forward.longer import Example
from exporter.forward.portable import StaysOpaque, make_portable, named
from exporter.forward.reached import warn_of_others
from exporter.forward.recomputed import warn_of_recomputed
from exporter.forward.unchanged import attributes_unchanged, unchanged
from exporter.gradient_graph.inside import expand_gradients
from exporter.gradient_graph.slow_operators import without_slow_operators
from exporter.train_mode.buffers import add_lost, warn_of_lost
from symbolics import torch_private as private
from symbolics.capture.branches import branches_noticed
from symbolics.capture.disguise import as_in_eager
from symbolics.capture.function_modules import function_calls
from symbolics.capture.interception import belongs_to_torch, settled
from symbolics.capture.marks import marking
from symbolics.capture.opaque_modules import opaque_calls
from symbolics.capture.operator_calls import is_translated
from symbolics.capture.recorder import Recorder, active_recorder
from symbolics.capture.restored import KeptState
from symbolics.capture.translate import translations
from symbolics.errors import ExportError
from symbolics.graph.collector import without_gc
from symbolics.node.names import UNCHECKED_KEY, qualified_name
from symbolics.node.opaque import Opaque
from symbolics.node.patterns import Patterns
from symbolics.quirks import TRACED
from symbolics.text import causes
from symbolics.users import warn

__all__ = ["Hook", "capturing", "check_place", "judged", "surroundings", "translates", "write"]


@dataclass
class Hook:
    """What an open hook knows.

    Attributes:
        inline: Which Functions are inlined.
        portable: Which Functions become ONNX functions; True: all that can, False: none.
        opaque: Which operators, modules and functions become PythonOps.
        functions: Which modules become ONNX functions.
        program: The last model that was exported under it, None before.
        eager_check: Whether the Functions of one eager run are looked for in the file.
        gradients: Whether its user has gradients enabled where he exports.
        fallback: Whether a way out is taken where torch's exporter cannot take the model.
        trying: Whether this is a try of such a way.
    """

    inline: Patterns
    portable: Patterns | bool = False
    opaque: Opaque = field(default_factory=Opaque)
    functions: Patterns = field(default_factory=Patterns)
    program: Program | None = None
    eager_check: bool = True
    gradients: bool = True
    fallback: bool = False
    trying: bool = False


@contextlib.contextmanager
def surroundings(current: Hook, verbose: bool | None) -> Iterator[None]:
    """A recorder for a hook that was installed, and the autograd of eager mode whatever surrounds the export; torch says nothing of a failure."""
    current.gradients = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        if not verbose and not is_full():
            stack.enter_context(private.untold_failures())
        if active_recorder() is None:
            stack.enter_context(Recorder(inline=current.inline, names=name_of, chosen=current.opaque))
        stack.enter_context(settled())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def translates(given: Collection[Any] | None, opset: int | None) -> None:
    """Tell the recorder which operators of torch.library the exporter has translations of, as `is_translated` takes them."""
    recorder = active_recorder()
    assert recorder is not None
    recorder.translated = lambda overload: is_translated(overload, given, opset)


@contextlib.contextmanager
def capturing(
    current: Hook, model: Any, dynamo: bool, keywords: dict[str, Any] | None = None, constants: dict[int, Any] | None = None
) -> Iterator[Recorder]:
    """The surroundings of one export; errors of ours come out as they were raised."""
    recorder = active_recorder()
    assert recorder is not None
    with contextlib.ExitStack() as stack:
        capture = recorder.begin(model, traced=not dynamo)
        if isinstance(model, torch.nn.Module):
            stack.enter_context(marking(model, keywords, constants))
            for seen_as in TRACED:
                stack.enter_context(seen_as(model))
        if dynamo:
            stack.enter_context(private.allow_in_dynamo(_all_functions(torch.autograd.Function)))
            stack.enter_context(branches_noticed())
            stack.enter_context(private.quiet_exporter(translations().values()))
        try:
            yield recorder
            if capture.error is not None:  # torch found another way, which went around what we refused
                raise capture.error
        except Exception as error:
            if capture.error is None or error is capture.error:
                raise
            own = capture.error.__cause__
            raise capture.error from (own if own is not None or _leads_to(error, capture.error) else error)


def _leads_to(error: BaseException | None, end: BaseException) -> bool:
    """Whether an error was raised because of another: naming it as that one's cause would make a ring."""
    return any(each is end for each in causes(error, contexts=True))


def _all_functions(base: type) -> list[type]:
    """Every Function class that exists now and that a model may call."""
    found: list[type] = []
    cls: type
    for cls in base.__subclasses__():
        if not belongs_to_torch(cls):
            found.append(cls)
        found += _all_functions(cls)
    return found


def judged(
    current: Hook,
    model: Any,
    args: Any,
    kwargs: Any,
    export: Callable[[], Any],
    *,
    example: Example,
    training: bool | None = None,
) -> Any:
    """Export, and let eager's own graph judge the file.

    What got lost because the model asks whether it is traced is exported once more: what leads to the Function is told that it is
    not traced, then all of the model.

    Args:
        current: The hook.
        model, args, kwargs: The model and its example arguments.
        export: Makes ``current.program``.
        training: The mode that the export puts the model into; None for its own.
        example: What the exporter exports with.

    Raises:
        ExportError: A Function that gradients flow through in eager mode is not in the file.
    """
    recorder = active_recorder()
    assert recorder is not None
    portable = current.portable
    recorder.portable = portable.matches if isinstance(portable, Patterns) else lambda _: portable
    recorder.opaque, recorder.unsaid, recorder.lacking, recorder.kept = {}, {}, set(), KeptState()
    history = History(model)
    with opaque_calls(model, recorder.chosen.calls), function_calls(model, current.functions), recorder.kept:
        while True:
            try:
                return _judged(current, model, args, kwargs, export, training, example, history)
            except StaysOpaque as stays:
                recorder.opaque[stays.function] = stays.reason
            except ExportError as error:  # without a translation that is right, or torch.export stopped in their midst
                if not current.opaque.missing or recorder.lacking.issuperset(error.operators):
                    raise
                recorder.lacking.update(error.operators)


def _judged(
    current: Hook,
    model: Any,
    args: Any,
    kwargs: Any,
    export: Callable[[], Any],
    training: bool | None,
    example: Example,
    history: History,
) -> Any:
    current.program = None
    with history.watched():
        eager = _eager_graph(current, model, args, kwargs, training, example.fakes)
    history.check()
    export = history.hidden(export)
    eager.check_saved_tensors()
    eager.check_changes()
    recorder = active_recorder()
    assert recorder is not None
    recorder.answers, recorder.no_gradients, recorder.read, recorder.eager = eager.taken, eager.no_gradients, eager.read, eager.made
    written = [parameter for name, parameter in _parameters(model) if name in eager.parameters]
    if written:
        export = unchanged(*written)(export)
    if eager.modules:
        export = attributes_unchanged(eager.modules)(export)
    result, lost = None, []
    try:
        result = example.exported(export)
        lost = _lost(current, eager)
    except Exception as error:
        eager.explain(error)
        if (own := of_torch(error, dynamo=example.fakes, others=recorder.capture.untranslated)) is error:
            raise
        raise own from error
    finally:
        if not lost:
            eager.made.clear()
    if lost:
        result = _again_as_in_eager(current, eager, lost, export)
        eager.made.clear()
    assert current.program is not None
    eager.check_taken(recorder.capture.taken.calls)
    eager.warn_of_parameters(current.program.model)
    warn_of_others(eager.others)
    if current.portable or recorder.unsaid:
        recorder.kept.restore()  # a memo of the capture fits no other trace
        placed = named(recorder.capture.placed, recorder.capture.axes, recorder.capture.equal)
        current.program.portable = make_portable(current.program.model, placed, current.portable, recorder.unsaid)
    expand_gradients(current.program.model)
    describe_functions(current.program.model, recorder.capture.classes, recorder.kept.values)
    say_names(current.program.model, recorder.capture.classes)
    add_lost(current.program.model, eager.state, eager.noted)
    check_written(eager.written, current.program.model)
    warn_of_lost(current.program.model)
    warn_of_recomputed(eager.recomputed)
    eager.warn_of_draws()
    if eager.unchecked:
        current.program.model.metadata_props[UNCHECKED_KEY] = eager.unchecked
        if eager.failed:
            warn(f"the Functions of the file could not be compared with those of eager mode: {eager.unchecked}.")
    without_slow_operators(current.program.model)
    outline_modules(current.program.model)  # last: all else looks at every node
    return result


def _again_as_in_eager(current: Hook, eager: EagerGraph, lost: list[Lost], export: Callable[[], Any]) -> Any:
    failure: Exception | None = None
    names, before = ", ".join(sorted(qualified_name(each.function) for each in lost)), _inputs(current)
    way = {code for each in lost for code in each.call.code}
    # Who asks on the way to the Function; by a helper of its own; anybody. The fewer are told so, the less else changes.
    for told in (
        lambda asker: asker.f_code in way,
        lambda asker: asker.f_code in way or (asker.f_back is not None and asker.f_back.f_code in way),
        lambda asker: True,
    ):
        try:
            with as_in_eager(told):
                result = export()
        except Exception as error:
            failure = failure or error
            continue
        if still := _lost(current, eager):
            lost = still
        elif before is not None and _inputs(current) != before:
            failure = ExportError(f"the file then has the inputs {_inputs(current)} in place of {before}")
        else:
            warn(
                f"{names}: under an exporter the model goes around it, so it was told that it runs in eager mode (torch.jit.is_tracing() and the like "
                "were False): compare the file with the model on other inputs (exporter.verify)."
            )
            return result
    current.program = None
    raise lost[0].error(failure) from failure


def _parameters(model: Any) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return model.named_parameters() if isinstance(model, torch.nn.Module) else ()


def _inputs(current: Hook) -> list[str | None] | None:
    """The inputs that the graph reads."""
    if current.program is None:
        return None
    return [value.name for value in current.program.model.graph.inputs if value.uses() or value.is_graph_output()]


def _eager_graph(current: Hook, model: Any, args: Any, kwargs: Any, training: bool | None, fakes: bool) -> EagerGraph:
    if not isinstance(model, torch.nn.Module):
        return EagerGraph(unchecked="it was captured before")
    if not current.eager_check:
        return EagerGraph(unchecked="eager_check=False")
    recorder = active_recorder()
    keeps = recorder.keeps if recorder is not None else lambda _: False
    chosen = recorder.chooses if recorder is not None and recorder.choosing else None
    return EagerGraph.of(model, args, dict(kwargs), training=training, keeps=keeps, chosen=chosen, fakes=fakes, gradients=current.gradients)


def _lost(current: Hook, eager: EagerGraph) -> list[Lost]:
    program = current.program
    assert program is not None
    for function, operator in eager.translated(program.model, name_of):
        program.inlined[qualified_name(function)] = f"the operator {operator} that calls it has a translation of the user's own"
        warn(
            f"{qualified_name(function)} is called inside the operator {operator}, for which the exporter was given a translation: the gradient is the "
            "derivative of that translation."
        )
    return eager.lost(program.model, program.inlined, current.inline, name_of)


def check_place(f: Any) -> None:
    """Refuse, before the work, an ``f`` that `write` could not write to.

    Raises:
        ExportError: It is a path that cannot be written.
    """
    if f is not None and not hasattr(f, "write"):
        writable(f)


def write(program: Program, f: Any, external_data: bool | None = None) -> None:
    """What torch.onnx.export does with ``f``, finished and whole."""
    with without_gc():
        if hasattr(f, "write"):
            model = program.as_asked()
            check_valid(model)
            f.write(ir.to_proto(model).SerializeToString())
        else:
            program.save(os.fspath(f), external_data=external_data)
