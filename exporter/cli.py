"""The pythonop command. What a program reads goes to stdout, what a person reads while waiting to stderr.

Exit codes: 0 done, 1 the answer is no (inspect, doctor: a node is damaged, a data file is not there; verify and diff: something differs), 2 the request could not be
carried out, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import sys
from traceback import format_exc, format_exception
from typing import Any

import click

import exporter
from exporter.errors import full
from symbolics.text import printable

__all__ = ["COMMANDS", "main"]

#: command -> what `pythonop --help` says of it, the first sentence of the command's own help: a command is imported when it is called.
COMMANDS = {
    "diff": "Say what differs between two ONNX files: inputs, operators, nodes, weights, PythonOps, gradients, metadata.",
    "doctor": "Say which versions are installed, and try here what a file goes through: export, gradient, runtimes.",
    "draw": "Draw the graph of an ONNX FILE by modules: its forward, its gradient beside it, PythonOps and where gradients stop in colour.",
    "export": "Export the model that TARGET makes; each call of an autograd Function stays one PythonOp.",
    "gradient": "Write the gradient graph of an ONNX FILE: any model, from any exporter.",
    "inspect": "Show what an ONNX FILE is, and its calls of autograd Functions.",
    "profile": "Say where the time of an ONNX FILE goes: by operator, by module, by node, PythonOps apart.",
    "quantize": "Write a fake-quantised ONNX FILE in integers, in the forms that onnxruntime's CPU runs in integer kernels.",
    "run": "Run an ONNX FILE once.",
    "step": "Write forward, loss, gradients and optimizer as one ONNX model.",
    "tangent": "Write the forward-mode derivative of an ONNX FILE: any model, from any exporter.",
    "trained": "Write what a training has learned as one ONNX model: the evaluation of a FOLDER of artifacts with a saved STATE.",
    "verify": "Compare the file of the model that TARGET makes, and its gradients, with eager PyTorch; with FILE, that ONNX file as it is.",
}


# What writing to standard output may say.
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT)


def _give_up_stdout() -> None:
    """What is still in its buffer cannot be written, and must not be tried again when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Commands(click.Group):
    """What ends a command without an answer is neither of the exit codes that are answers, 0 and 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in their order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command, imported."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"exporter.commands.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What --help says of them, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)  # 128 + SIGINT, as a shell says it
        except click.ClickException as error:
            if error.__cause__ is not None and ctx.obj is not None and ctx.obj["traceback"]:
                click.echo(printable("".join(format_exception(error.__cause__))), err=True, nl=False)
            raise
        except (click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
                _give_up_stdout()
                click.echo(f"error: cannot print the answer: {error.strerror}; send standard output elsewhere", err=True)
            else:  # a fault of ours, or --traceback
                click.echo(printable(format_exc()), err=True, nl=False)
            ctx.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(exporter.__version__, prog_name="pythonop")
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """PyTorch models with custom autograd Functions as ONNX.

    TARGET is package.module:factory: a function without arguments that returns (model, args) or an exporter.Case. The
    current directory can be imported from.
    """
    context.obj = {"traceback": traceback}
    if traceback:
        context.with_resource(full())
    # It tells of a damaged file with the file's own names, as they are: what is wrong is said by us.
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)
    # Console scripts do not have it, python -m does. Behind all else: a torch.py beside a stranger's file is not imported in torch's place.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


if __name__ == "__main__":
    main()
