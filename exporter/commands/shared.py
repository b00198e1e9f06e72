"""What the commands share: messages, progress, TARGETs, paths."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import exporter
from symbolics.errors import PythonopError, PythonopWarning
from symbolics.text import clean

__all__ = [
    "Failure",
    "dynamo_option",
    "eager_check_option",
    "explained",
    "external_data_option",
    "inline_option",
    "json_option",
    "load_target",
    "one_message",
    "opset_option",
    "portable_facts",
    "portable_lines",
    "portable_of",
    "portable_options",
    "reported",
    "run_setups",
    "setup_option",
    "status",
    "tell",
]


# Options that several commands have.
dynamo_option = click.option(
    "--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript."
)
inline_option = click.option(
    "--inline", multiple=True, metavar="PATTERN", help="Functions to inline: module:qualname or a glob over it. May be repeated."
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
opset_option = click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
external_data_option = click.option("--external-data", is_flag=True, help="Keep the tensors in a file beside OUTPUT, which names it.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")


class Failure(click.ClickException):
    """Ends a command with exit code 2 and one message."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message, without control characters that a file may have put into it."""
        text = "\n".join(clean(line, 2000) for line in self.message.splitlines())
        Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), text))


@contextlib.contextmanager
def reported(context: click.Context) -> Iterator[None]:
    """Our errors become messages; warnings of ours become lines on stderr, each once: a command may export twice."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    show = warnings.showwarning
    told: set[str] = set()

    def show_ours(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if not issubclass(category, PythonopWarning):
            show(message, category, *rest, **options)
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
            raise Failure(str(error)) from error


def status(text: str, quiet: bool) -> contextlib.AbstractContextManager[Any]:
    """A line that says what is going on, where somebody can see it."""
    console = Console(stderr=True)
    return contextlib.nullcontext() if quiet else console.status(Text(clean(text)))


def tell(facts: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print what a command has done: the facts for a program, or the lines for a person."""
    if as_json:
        click.echo(json.dumps(facts))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(line))


def _called(text: str, what: str) -> Any:
    """What the function that package.module:name names returns.

    Raises:
        Failure: It cannot be imported, there is no such name, or it raised.
    """
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise Failure(f"{what} {text!r} is not of the form package.module:name")
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise Failure(f"{what} {text}: cannot import {module}: {type(error).__name__}: {error}") from error
    try:
        function = pkgutil.resolve_name(text)
    except AttributeError as error:
        raise Failure(f"{what} {text}: {module} has no {name}") from error
    if not callable(function):
        raise Failure(f"{what} {text}: it is no function, but of type {type(function).__name__}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Failure(f"{what} {text}: it raised {type(error).__name__}: {error}") from error


def load_target(text: str) -> exporter.Case:
    """The case that TARGET names.

    Raises:
        click.ClickException: It cannot be imported, raises, or returns something else.
    """
    import torch

    from exporter.forward.case import Case

    made = _called(text, "TARGET")
    if isinstance(made, tuple) and len(made) == 2:
        made = Case(*made)
    if not isinstance(made, Case) or not isinstance(made.model, torch.nn.Module):
        inside = f" of {type(made.model).__name__}" if isinstance(made, Case) else ""
        raise Failure(
            f"TARGET {text}: it returned something of type {type(made).__name__}{inside}, not (torch.nn.Module, args) or an exporter.Case"
        )
    return made


@contextlib.contextmanager
def one_message(context: click.Context, what: str, *, root: bool = False) -> Iterator[None]:
    """Around what may raise anything: it becomes one message, unless somebody asked for the traceback.

    Args:
        context: The command.
        what: The subject of the message.
        root: Tell the first cause: torch wraps what a model raised in an account of its own steps.

    Raises:
        Failure: It failed, with an error that is not one of ours.
    """
    try:
        yield
    except PythonopError:
        raise
    except Exception as error:
        if context.obj["traceback"]:
            raise
        cause: BaseException = error
        while root and cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(cause).strip()[:1000]
        if root:
            text = f"{text.partition(chr(10))[0]}\n`pythonop --traceback {context.info_name} ...` shows where"
        raise Failure(f"{what} failed with {type(cause).__name__}: {text}") from error


@contextlib.contextmanager
def explained(context: click.Context) -> Iterator[None]:
    """Around an export: what torch prints belongs to the progress, and of what it raises the first cause is the news."""
    with contextlib.redirect_stdout(sys.stderr), one_message(context, "the export", root=True):
        yield


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
