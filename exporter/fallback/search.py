"""The search for a way out of an export that failed: which ways there are, in which order, and what came of each."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from exporter.fallback.proof import Proof
from exporter.fallback.told import none_works, taken_instead, ways_tried
from exporter.fallback.way import Obstacle, Way
from exporter.files.program import Program
from exporter.forward.arguments import keywords_apart
from exporter.forward.case import Case
from exporter.forward.hook import under
from exporter.forward.inputs import dynamic_axes, each_once
from exporter.forward.onnx_program import make_runnable
from exporter.forward.session import Hook
from exporter.forward.unchanged import unchanged
from exporter.forward.ways_out import Failed, said_once, taken_for_constants
from symbolics.node.opaque import Opaque
from symbolics.text import headline
from symbolics.users import warn

__all__ = ["differs", "tried", "way_out"]

#: How many modules of one way may stand in it, one behind the other, and how many exports are tried at all.
_MOST_MODULES, _MOST_TRIES = 8, 24
#: Seconds that ways may take which nobody asked for: as long as the export that failed, within these.
_LEAST, _MOST = 5.0, 60.0


class _Enough(Exception):
    """No further way is tried."""


class _Wrong(Exception):
    """A way exports, and its file is not eager's model."""

    def __init__(self, text: str, obstacle: Obstacle) -> None:
        super().__init__(text)
        self.obstacle = obstacle


def way_out(failed: Failed, said: list[warnings.WarningMessage], kept: Program | None) -> Any:
    """Take the first way that works.

    Args:
        failed: The export.
        said: What it warned of; then what there is to show.
        kept: The file that it made, which is right at the example alone; None: it made none.

    Returns:
        What the export is to return.

    Warns:
        PythonopWarning: What failed, and which way was taken.

    Raises:
        ExportError: No way works; the text lists them. Or the model fails in eager mode.
    """
    search, before = Search(failed, None), list(said)
    current, found, why = failed.hook, None, ""
    try:
        found = search.run()
    except Exception as error:
        why = f"the model fails in eager mode: {headline(error)}"
    if found is None:
        told = none_works(failed, search.asked, search.attempts, why)
        if kept is None:
            raise told from failed.error
        current.program, said[:] = kept, before
        warn("; ".join(line.strip() for line in str(told).splitlines()))
        return None
    way, current.program = found
    said[:] = search.said
    current.opaque.meet_as(search.opaque)
    current.program.fallback = way.beside(search.asked, failed.model)
    warn(taken_instead(failed, search.asked, way))
    if not failed.dynamo:
        return None
    if current.program.torch_program is not None:
        return current.program.torch_program
    made = torch.onnx.ONNXProgram(current.program.model, None)
    make_runnable(made, [])
    return made


def tried(failed: Failed) -> Exception:
    """The error of an export that failed, with what came of the ways that are cheap enough to try."""
    search = Search(failed, time.perf_counter() + min(max(failed.seconds, _LEAST), _MOST))
    with said_once() as said:
        try:
            found = search.run()
        except Exception:  # the model fails in eager mode, too: that is another error, and not asked for
            return failed.error
        finally:
            said.clear()
    return ways_tried(failed, search.asked, search.attempts, None if found is None else found[0], search.ended)


def differs(failed: Failed, program: Program) -> str:
    """How a file differs from eager, in a sentence; "" where it does not, or where they cannot be compared.

    Args:
        failed: The export that gave it.
        program: The file.
    """
    search = Search(failed, None)
    with contextlib.suppress(Exception), search.guarded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search.proof.begin()
        return search.proof.against(program, strict=False)
    return ""


class Search:
    """Looks for a way that works.

    Args:
        failed: The export.
        until: When no further way is begun; None: all are tried.

    Attributes:
        asked: What the caller told.
        attempts: Each way that did not work, and why not.
        said: The warnings of the way that works.
        ended: Whether all ways were tried.
        opaque: All that ``opaque=`` had on that way.
        proof: Compares files with eager.
    """

    def __init__(self, failed: Failed, until: float | None) -> None:
        self._failed, self._until = failed, until
        self.asked = Way(failed.dynamo)
        self.attempts: list[tuple[Way, str]] = []
        self.said: list[warnings.WarningMessage] = []
        self.ended = False
        self.opaque = Opaque()
        self._obstacles = {self.asked: Obstacle.of(failed.error, failed.model)}
        args, kwargs = keywords_apart(failed.model, failed.args, failed.kwargs)
        self._args, self._kwargs = args, kwargs
        self.proof = Proof(Case(failed.model, *each_once(args, kwargs)))

    def run(self) -> tuple[Way, Program] | None:
        """The first way that works, with its file; None where none does.

        Raises:
            Exception: The model fails in eager mode on its own example.
        """
        with self.guarded():
            self.proof.begin()
        with contextlib.suppress(_Enough):
            for way, modules in self._starts():
                if (found := self._along(way, modules)) is not None:
                    return found
            self.ended = True
        return None

    def _starts(self) -> Iterator[tuple[Way, bool]]:
        """Where to begin, and whether modules may become nodes."""
        other = replace(self.asked, dynamo=not self.asked.dynamo)
        for modules in (False, True):
            yield self.asked, modules
            yield other, modules
        if any(self._failed.options.get(name) for name in ("dynamic_shapes", "dynamic_axes")):
            for way in (self.asked, other):
                yield replace(way, sizes=False), True

    def _along(self, way: Way, modules: bool) -> tuple[Way, Program] | None:
        """Try a way, and on from what stands in it."""
        for _ in range(_MOST_MODULES + 4):
            if way not in self._obstacles:
                found = self._tried(way)
                if found is not None:
                    return way, found
            further = way.past(self._obstacles[way], self._failed.model, modules=modules)
            if further is None or len(further.modules) > _MOST_MODULES:
                return None
            way = further
        return None

    def _tried(self, way: Way) -> Program | None:
        late = self._until is not None and self.attempts and time.perf_counter() > self._until
        if late or len(self.attempts) >= _MOST_TRIES:
            raise _Enough
        model = self._failed.model
        try:
            with self.guarded(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                program = self._exported(way)
                if frozen := taken_for_constants(said):
                    raise _Wrong(f"the trace would keep what came of the example: {frozen[0]}", Obstacle.at(frozen[1], model))
                shown = [each for each in said if not issubclass(each.category, DeprecationWarning)]
                if wrong := self.proof.against(program):
                    raise _Wrong(wrong, Obstacle())
        except _Wrong as error:
            self._obstacles[way] = error.obstacle
            self.attempts.append((way, str(error)))
        except Exception as error:  # whatever this way stumbles over is its answer
            self._obstacles[way] = Obstacle.of(error, model)
            head = getattr(error, "head", "") or str(error) or type(error).__name__
            self.attempts.append((way, head.splitlines()[0]))
        else:
            self.said = shown
            return program
        return None

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What a try does to the model, its arguments and the random states is undone."""
        with unchanged(self._failed.model, self._failed.args, self._failed.kwargs):
            yield

    def _exported(self, way: Way) -> Program:
        failed = self._failed
        opaque = Opaque([*failed.hook.opaque.items, *way.operators, *way.modules])
        asked = failed.hook
        hook = Hook(asked.inline, asked.portable, opaque, functions=asked.functions, eager_check=asked.eager_check, trying=True)
        with under(hook):
            torch.onnx.export(failed.model, failed.args, None, kwargs=failed.kwargs or None, dynamo=way.dynamo, **self._options(way))
        assert hook.program is not None
        self.opaque = opaque
        return hook.program

    def _options(self, way: Way) -> dict[str, Any]:
        """What else torch.onnx.export is given; of one exporter's options the other gets what it has a word for."""
        known = inspect.signature(torch.onnx.export).parameters
        options = {name: value for name, value in self._failed.options.items() if name in known and name not in ("f", "kwargs", "dynamo")}
        shapes = options.pop("dynamic_shapes", None)
        if not way.sizes:
            options.pop("dynamic_axes", None)
            shapes = None
        if way.dynamo:
            for name in ("training", "operator_export_type", "custom_opsets", "export_modules_as_functions", "autograd_inlining"):
                options.pop(name, None)
            if not self.asked.dynamo:
                options["optimize"] = bool(options.pop("do_constant_folding", True))
            return {**options, **({"dynamic_shapes": shapes} if shapes is not None else {})}
        if self.asked.dynamo:
            options["do_constant_folding"] = bool(options.get("optimize", True))
            for name in (
                "optimize",
                "custom_translation_table",
                "report",
                "verify",
                "profile",
                "dump_exported_program",
                "artifacts_dir",
                "external_data",
            ):
                options.pop(name, None)
            if shapes is not None:
                options["dynamic_axes"] = dynamic_axes(self._failed.model, self._args, self._kwargs, shapes, options.get("input_names"))
                options.setdefault("input_names", None)
        return options
