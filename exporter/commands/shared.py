"""What the commands share: messages, progress, TARGETs, paths."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import pkgutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

import exporter
from exporter.commands.hints import instead_of_a_name, instead_of_a_target, no_such_module, on_the_command_line
from symbolics.errors import ExportError, Faq, PythonopError, PythonopWarning, RunError
from symbolics.node.patterns import listed
from symbolics.text import causes, clean, headline, message
from symbolics.users import TOOK

__all__ = [
    "Failure",
    "check_option",
    "checked",
    "dynamo_option",
    "eager_check_option",
    "explained",
    "external_data_option",
    "fallback_option",
    "functions_of",
    "functions_option",
    "inline_option",
    "json_option",
    "load_target",
    "loud",
    "loudness",
    "one_message",
    "opaque_of",
    "opaque_option",
    "opset_option",
    "output_name_option",
    "portable_facts",
    "portable_lines",
    "portable_of",
    "portable_options",
    "reported",
    "run_setups",
    "setup_option",
    "show",
    "status",
    "strict_option",
    "tell",
]


# Options that several commands have.
dynamo_option = click.option(
    "--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript."
)
inline_option = click.option(
    "--inline", multiple=True, metavar="PATTERN", help="Functions to inline: module:qualname or a glob over it. May be repeated."
)
opaque_option = click.option(
    "--opaque",
    multiple=True,
    metavar="ENTRY",
    help='What becomes one PythonOp: "missing" (operators without a translation), aten::NAME, module:qualname, or a glob. May be repeated.',
)
functions_option = click.option(
    "--function",
    "functions",
    multiple=True,
    metavar="PKG.MOD:CLASS",
    help="Modules whose calls become calls of an ONNX function each: module:qualname, a class's name, or a glob. May be repeated.",
)
fallback_option = click.option(
    "--fallback",
    is_flag=True,
    help="Where torch's exporter cannot take the model, take the first way out that works: --opaque, the other exporter, both, fixed sizes.",
)
_portable = click.option(
    "--portable",
    is_flag=True,
    help="Write the Functions as ONNX functions, so that the file needs no Python; a warning names those that cannot be.",
)
_portable_only = click.option(
    "--portable-only",
    multiple=True,
    metavar="PATTERN",
    help="Write these Functions so: module:qualname or a glob over it. It is an error where one cannot be. May be repeated.",
)
eager_check_option = click.option(
    "--eager-check/--no-eager-check",
    default=True,
    help="Look for the Functions of one eager run in the file (default), or save that run.",
)
setup_option = click.option(
    "--register",
    "setups",
    multiple=True,
    metavar="PKG.MOD:FUNCTION",
    help="Call this before anything else; it calls exporter.register(). May be repeated.",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Refuse a file with a Function that has changed since the export. Default: warn."
)
opset_option = click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
output_name_option = click.option(
    "--output-name",
    "output_names",
    multiple=True,
    metavar="NAME",
    help="The name of the first output, then of the second, ...: may be repeated. A training step then gives the outputs beside the loss.",
)
external_data_option = click.option("--external-data", is_flag=True, help="Keep the tensors in a file beside OUTPUT, which names it.")
check_option = click.option(
    "--check/--no-check",
    default=True,
    help="Before writing, see that onnx.checker passes each model and that onnxruntime opens it (default); or write whatever came out.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON, on one line.")

#: A stage that took longer stays on the terminal, with its seconds.
_LONG = 2.0
_LOUDNESS = "pythonop.loudness"


def loudness(command: Callable[..., Any]) -> Callable[..., Any]:
    """-q and -v; `loud` is what they say."""
    for flags, level, text in (
        (("-v", "--verbose"), 1, "Also print, to stderr, each stage with its seconds, and what torch and other packages say."),
        (("-q", "--quiet"), -1, "Print nothing but warnings, errors and what --json asks for. The exit code is the answer."),
    ):

        def said(context: click.Context, _: click.Parameter, given: bool, level: int = level) -> None:
            if given and context.meta.setdefault(_LOUDNESS, level) != level:
                raise Failure("-q and -v contradict each other: give one of them")

        command = click.option(*flags, is_flag=True, expose_value=False, callback=said, help=text)(command)
    return command


def loud() -> int:
    """-1 where the command is to be quiet, 1 where it is to tell more, else 0."""
    context = click.get_current_context(silent=True)
    return 0 if context is None else context.meta.get(_LOUDNESS, 0)


class Failure(click.ClickException):
    """Ends a command with exit code 2 and one message; where docs/faq.md has more of it, a line says so."""

    exit_code = 2

    def __init__(self, message: str, faq: Faq | None = None, most_lines: int = PythonopError.most_lines) -> None:
        super().__init__(message)
        self.faq, self.most_lines = faq, most_lines

    def show(self, file: Any = None) -> None:
        """Print the message: no more lines than an error has, without control characters that a file may have put into it."""
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), message(self.message, self.most_lines)))
        if self.faq is not None:
            console.print(Text(f"more: docs/faq.md#{self.faq}", "dim"))


@contextlib.contextmanager
def reported(context: click.Context) -> Iterator[None]:
    """Our errors become messages; warnings of ours become lines on stderr, each once: a command may export twice.

    So does what a trace keeps of the example's values. Other warnings of other packages are a number at the end, or lines with -v.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    told: set[str] = set()
    foreign: set[str] = set()

    def show_ours(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if not issubclass(category, PythonopWarning) and TOOK not in str(message):
            foreign.add(str(message))
            if loud() > 0:
                console.print(Text(f"{clean(filename)}:{lineno}: {category.__name__}: {clean(str(message), 2000)}", "dim"))
        elif str(message) not in told:
            told.add(str(message))
            console.print(Text.assemble(("warning: ", "yellow"), clean(str(message), 2000)))

    with warnings.catch_warnings():
        warnings.simplefilter("always", PythonopWarning)
        warnings.showwarning = show_ours
        try:
            yield
        except PythonopError as error:
            if context.obj["traceback"]:
                raise
            raise Failure(f"{error}{on_the_command_line(context, error)}", error.faq, error.most_lines) from error
        finally:
            if foreign and loud() == 0:
                console.print(Text(f"{len(foreign)} {'warnings' if len(foreign) > 1 else 'warning'} of other packages: -v shows", "dim"))


class _Stages(logging.Handler):
    """What a library call says about its progress becomes the text of a stage."""

    def __init__(self, begin: Callable[[str], None]) -> None:
        super().__init__()
        self._begin = begin

    def emit(self, record: logging.LogRecord) -> None:
        """One stage ends, another begins."""
        self._begin(record.getMessage())


@contextlib.contextmanager
def status(text: str, quiet: bool) -> Iterator[None]:
    """A stage: on a terminal, a line on stderr that says what is going on and since when. One of over two seconds stays there.

    Args:
        text: What is going on.
        quiet: Say nothing, but with -v.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    level = loud()
    if level < 0 or (quiet and level == 0):
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    current, begin = "", 0.0

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def end() -> None:
            seconds = time.perf_counter() - begin
            if level > 0 or (console.is_terminal and seconds > _LONG):
                console.print(Text(f"{current}: {seconds:.1f} s", "dim"))

        def start(what: str) -> None:
            nonlocal current, begin
            if current:
                end()
            current, begin = clean(what), time.perf_counter()
            progress.reset(task, description=current)

        stages, log = _Stages(start), logging.getLogger("pythonop")
        before, propagates = log.level, log.propagate
        log.addHandler(stages)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            start(text)
            yield
        finally:
            log.removeHandler(stages)
            log.setLevel(before)
            log.propagate = propagates
            end()


def show(content: RenderableType) -> None:
    """Print what a person asked for, but with -q."""
    if loud() >= 0:
        Console(highlight=False).print(content)


def tell(facts: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print what a command has done: the facts for a program, or the lines for a person."""
    if as_json:
        click.echo(json.dumps(facts))
        return
    console = Console(highlight=False, soft_wrap=True, quiet=loud() < 0)
    for line in lines:
        console.print(Text(line))


def _where() -> str:
    """How to see where an error comes from, for whoever does not see it already."""
    context = click.get_current_context(silent=True)
    if context is None or (context.obj or {}).get("traceback"):
        return ""
    return f"\n`pythonop --traceback {context.info_name} ...` shows where"


def _named(text: str, what: str) -> Any:
    """What package.module:name names.

    Raises:
        Failure: It cannot be imported, or there is no such name.
    """
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise Failure(f"{what} {text!r} is not of the form package.module:name{instead_of_a_target(text)}")
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        absent = no_such_module(module, error) if isinstance(error, Exception) else None
        raise Failure(f"{what} {text}: cannot import {module}: {absent or f'{headline(error)}{_where()}'}") from error
    try:
        return pkgutil.resolve_name(text)
    except AttributeError as error:
        raise Failure(f"{what} {text}: {module} has no {name}{instead_of_a_name(name, dir(sys.modules[module]))}") from error


def _called(text: str, what: str, found: Any = None) -> Any:
    """What the function that package.module:name names returns.

    Raises:
        Failure: As `_named`, or it raised.
    """
    function = _named(text, what) if found is None else found
    if not callable(function):
        raise Failure(f"{what} {text}: it is no function, but of type {type(function).__name__}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Failure(f"{what} {text}: it raised {headline(error)}{_where()}") from error


def load_target(text: str, *, bare: bool = False) -> exporter.Case:
    """The case that TARGET names.

    Args:
        text: ``package.module:name``.
        bare: Whether it may be a module without example arguments.

    Raises:
        click.ClickException: It cannot be imported, raises, or returns something else.
    """
    import torch

    from exporter.forward.case import Case

    found = _named(text, "TARGET")
    made = found if isinstance(found, torch.nn.Module) else _called(text, "TARGET", found)
    if isinstance(made, torch.nn.Module):
        if not bare:
            raise Failure(
                f"TARGET {text}: it is a module without example arguments: give them with --input NAME=DTYPE[SHAPE] (--input x=float32[2,3]), "
                "or let TARGET return (module, args)"
            )
        made = Case(made, ())
    if isinstance(made, tuple) and len(made) == 2:
        made = Case(*made)
    if not isinstance(made, Case) or not isinstance(made.model, torch.nn.Module):
        inside = f" of {type(made.model).__name__}" if isinstance(made, Case) else ""
        raise Failure(
            f"TARGET {text}: it returned something of type {type(made).__name__}{inside}, not (torch.nn.Module, args) or an exporter.Case"
        )
    return made


@contextlib.contextmanager
def _torch_hushed() -> Iterator[None]:
    """torch logs what it raises, once a level, with a traceback: the first cause is told without."""
    handlers = {
        handler
        for name, logger in logging.root.manager.loggerDict.items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger)
        for handler in logger.handlers
    }
    before = {handler: handler.level for handler in handlers}
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in before.items():
            handler.setLevel(level)


@contextlib.contextmanager
def one_message(context: click.Context, what: str, *, root: bool = False, beside: str = "") -> Iterator[None]:
    """Around what may raise anything: it becomes one message, unless somebody asked for the traceback.

    Args:
        context: The command.
        what: The subject of the message.
        root: Tell the first cause: torch wraps what a model raised in an account of its own steps.
        beside: What else may be the reason that it cannot be run: a line.

    Raises:
        RunError: It cannot be run; with ``beside`` behind it.
        Failure: It failed, with an error that is not one of ours.
    """
    hushed = contextlib.nullcontext() if loud() > 0 or context.obj["traceback"] else _torch_hushed()
    try:
        with hushed:
            yield
    except PythonopError as error:
        if isinstance(error, RunError) and beside and not context.obj["traceback"]:
            raise RunError(f"{error}\n{beside}", faq=error.faq) from error
        raise
    except Exception as error:
        if context.obj["traceback"]:
            raise
        cause = list(causes(error))[-1] if root else error
        line = f"\n{beside}" if beside else ""
        if isinstance(cause, OSError) and not cause.filename:
            line += f"\nis the disk of {clean(tempfile.gettempdir())} full? TMPDIR names another folder"
        raise Failure(f"{what} failed with {headline(cause)}{line}{_where()}") from error


@contextlib.contextmanager
def explained(context: click.Context) -> Iterator[None]:
    """Around an export: what torch prints belongs to the progress, and of what it raises the first cause is the news."""
    with contextlib.redirect_stdout(sys.stderr), one_message(context, "the export", root=True):
        yield


def checked(models: Sequence[tuple[ir.Model, Path]], wanted: bool, quiet: bool) -> list[str]:
    """See that the models that a command is about to write are of use.

    Args:
        models: Each with the file that it goes to.
        wanted: Whether they are to be checked.
        quiet: As `status` has it.

    Returns:
        What was not checked, and why: lines for people, none where everything was.

    Raises:
        ExportError: onnx.checker or onnxruntime refuses one.
    """
    if not wanted:
        return ["not checked, as asked: neither by onnx.checker nor by onnxruntime"]
    from exporter.runtime.usable import check_usable  # loads onnxruntime

    skipped = []
    for model, path in models:
        name = clean(str(path))
        with status(f"checking {name}", quiet):
            try:
                why = check_usable(model)
            except ExportError as error:
                raise ExportError(f"{name} is not written: {error}\n  way out: {_WITHOUT_CHECK}") from error
        if why:
            skipped.append(f"{name} passes onnx.checker, and was not opened in onnxruntime: {why}")
    return skipped


_WITHOUT_CHECK = "another type (float32, autocast to float16), opset or exporter (--no-dynamo), or --opaque of the module; --no-check writes it as it is, for a runtime that takes it"


def portable_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--portable and --portable-only; `portable_of` is what they say together."""
    return _portable(_portable_only(command))


def portable_of(case: exporter.Case, portable: bool, only: tuple[str, ...]) -> Any:
    """The ``portable=`` of an export: what the command line says, otherwise what the case says.

    Raises:
        Failure: The command line says both.
    """
    if portable and only:
        raise Failure("--portable means all Functions, --portable-only some: give one of them")
    return portable or only or case.portable


def opaque_of(case: exporter.Case, opaque: tuple[str, ...]) -> list[Any]:
    """The ``opaque=`` of an export: what the case says, and the command line."""
    return [*listed(case.opaque), *opaque]


def functions_of(case: exporter.Case, functions: tuple[str, ...]) -> list[Any]:
    """The ``functions=`` of an export, likewise."""
    return [*listed(case.functions), *functions]


def portable_facts(program: exporter.Program) -> list[dict[str, str]]:
    """What became of each call that was to be portable, for --json."""
    return [dataclasses.asdict(call) for call in program.portable]


def portable_lines(program: exporter.Program) -> list[str]:
    """The same in lines for people; none where nothing was to be portable."""
    made = Counter(call.function for call in program.portable if call.kind == "function")
    left = Counter((call.function, call.reason) for call in program.portable if call.kind == "PythonOp")
    if not program.portable:
        return []
    lines = [f"calls that became ONNX functions: {made.total()}, that could not: {left.total()}"]
    lines += [f"  {count} x {clean(name)}" for name, count in made.most_common()]
    return lines + [f"  {count} x {clean(name)} stays a PythonOp: {clean(reason, 300)}" for (name, reason), count in left.most_common()]


def run_setups(setups: tuple[str, ...]) -> None:
    """Call what --register names."""
    for setup in setups:
        _called(setup, "--register")
