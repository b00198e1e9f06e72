"""The pythonop command. What a program reads goes to stdout, what a person reads while waiting to stderr.

Exit codes: 0 done, 1 the answer is no (inspect: a node is damaged), 2 the request could not be carried out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import exporter
from exporter.inspect import clean, inspect_file, render
from symbolics.dialects import DIALECTS
from symbolics.errors import PythonopError, PythonopWarning

__all__ = ["load_target", "main"]


class _Failure(click.ClickException):
    """Ends a command with exit code 2 and one message."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message, without control characters that a file may have put into it."""
        text = "\n".join(clean(line, 2000) for line in self.message.splitlines())
        Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), text))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(exporter.__version__, prog_name="pythonop")
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """PyTorch models with custom autograd Functions as ONNX.

    TARGET is package.module:factory: a function without arguments that returns (model, args) or an exporter.Case. The
    current directory can be imported from.
    """
    context.obj = {"traceback": traceback}
    # Console scripts do not have it, python -m does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def _reported(context: click.Context) -> Iterator[None]:
    """Our errors become messages; warnings of ours become lines on stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    show = warnings.showwarning

    def show_ours(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, PythonopWarning):
            console.print(Text.assemble(("warning: ", "yellow"), clean(str(message), 2000)))
        else:
            show(message, category, *rest, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PythonopWarning)
        warnings.showwarning = show_ours
        try:
            yield
        except PythonopError as error:
            if context.obj["traceback"]:
                raise
            raise _Failure(str(error)) from error


def _status(text: str, quiet: bool) -> contextlib.AbstractContextManager[Any]:
    """A line that says what is going on, where somebody can see it."""
    console = Console(stderr=True)
    return contextlib.nullcontext() if quiet else console.status(Text(clean(text)))


# ------------------------------------------------------------------------------------------------------------ targets


def _named(text: str, what: str) -> Any:
    """The object that package.module:name names.

    Raises:
        _Failure: It cannot be imported, or there is no such name.
    """
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise _Failure(f"{what} {text!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise _Failure(f"{what} {text}: cannot import {module}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise _Failure(f"{what} {text}: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise _Failure(f"{what} {text}: it is a {type(found).__name__}, not a function")
    return found


def _called(function: Any, text: str, what: str) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _Failure(f"{what} {text}: it raised {type(error).__name__}: {error}") from error


def load_target(text: str) -> exporter.Case:
    """The case that TARGET names.

    Raises:
        click.ClickException: It cannot be imported, raises, or returns something else.
    """
    import torch

    from exporter.case import Case

    made = _called(_named(text, "TARGET"), text, "TARGET")
    if isinstance(made, tuple) and len(made) == 2:
        made = Case(*made)
    if not isinstance(made, Case) or not isinstance(made.model, torch.nn.Module):
        inside = f" of {type(made.model).__name__}" if isinstance(made, Case) else ""
        raise _Failure(f"TARGET {text}: it returned a {type(made).__name__}{inside}, not (torch.nn.Module, args) or an exporter.Case")
    return made


def _writable(path: Path) -> None:
    """Refuse before the long work what would fail after it.

    Raises:
        _Failure: The path cannot be written.
    """
    folder = path.parent
    if path.is_dir():
        raise _Failure(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise _Failure(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _Failure(f"cannot write {path}: no permission to write into {folder}")


# ----------------------------------------------------------------------------------------------------------- commands


@main.command()
@click.argument("target")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The ONNX file to write.")
@click.option("--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript.")
@click.option("--inline", multiple=True, metavar="PATTERN", help="Functions to inline: module:qualname or a glob over it. May be repeated.")
@click.option("--register", "setups", multiple=True, metavar="PKG.MOD:FUNCTION", help="Call this before anything else; it calls exporter.register(). May be repeated.")
@click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
@click.option("--schema", type=click.Choice(list(DIALECTS)), help="Write the PythonOp dialect of another reader; what it loses is a warning.")
@click.option("--external-data", is_flag=True, help="Keep the tensors in OUTPUT.data beside the file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.pass_context
def export(
    context: click.Context,
    target: str,
    output: Path,
    dynamo: bool,
    inline: tuple[str, ...],
    setups: tuple[str, ...],
    opset: int | None,
    schema: str | None,
    external_data: bool,
    as_json: bool,
) -> None:
    """Export the model that TARGET makes; each call of an autograd Function stays one PythonOp."""
    _writable(output)
    with _reported(context):
        with _status(f"importing {target}", as_json):
            for setup in setups:
                _called(_named(setup, "--register"), setup, "--register")
            case = load_target(target)
        with _status(f"exporting {type(case.model).__name__}", as_json):
            program = _export(context, case, dynamo=dynamo, opset_version=opset, inline=(*case.inline, *inline))
        with _status(f"writing {output}", as_json):
            program.save(output, schema=schema, external_data=external_data or None)
            report = inspect_file(output)
        counts = Counter(row.function for row in report.rows)
        facts = {
            "file": str(output),
            "bytes": output.stat().st_size,
            "schema": schema,
            "calls": len(report.rows),
            "functions": dict(counts),
            "inlined": program.inlined,
            "stop_gradients": report.stop_gradients,
            "parameters": report.parameters,
            "trainable": report.trainable,
        }
        if as_json:
            click.echo(json.dumps(facts))
            return
        console = Console(highlight=False, soft_wrap=True)
        console.print(Text(f"wrote {clean(str(output))} ({facts['bytes']:,} bytes)"))
        console.print(Text(f"{len(report.rows)} PythonOp, {report.stop_gradients} stop-gradient marks, {report.trainable} of {report.parameters} parameters trainable"))
        for name, count in counts.most_common():
            console.print(Text(f"  {count} x {clean(name)}"))


def _export(context: click.Context, case: exporter.Case, **options: Any) -> exporter.Program:
    # What torch prints on the way belongs to the progress, not to the answer.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return exporter.export(case.model, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes, **options)
        except PythonopError:
            raise
        except Exception as error:
            if context.obj["traceback"]:
                raise
            # torch wraps what a model raised in an account of its own steps: the first cause is the news.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            first = str(cause).strip().splitlines() or [""]
            raise _Failure(f"the export failed with {type(cause).__name__}: {first[0]}\n`pythonop --traceback export ...` shows where") from error


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.pass_context
def inspect(context: click.Context, file: Path, as_json: bool) -> None:
    """Show the PythonOps of an ONNX FILE. Nothing of the file is run or imported, and torch is not needed."""
    with _reported(context):
        report = inspect_file(file)
        if as_json:
            click.echo(json.dumps(report.as_json()))
        else:
            Console(highlight=False).print(render(report, str(file)))
        damaged = sum(row.error is not None for row in report.rows)
        if damaged:
            if as_json is False:
                click.echo(f"{damaged} of {len(report.rows)} PythonOps cannot be read", err=True)
            context.exit(1)


if __name__ == "__main__":
    main()
