"""The pythonop command. What a program reads goes to stdout, what a person reads while waiting to stderr.

Exit codes: 0 done, 1 the answer is no (inspect: a node is damaged; verify and diff: something differs), 2 the request could not be
carried out, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from traceback import print_exc, print_exception
from typing import Any

import click

import exporter
from exporter.commands.diff import diff
from exporter.commands.doctor import doctor
from exporter.commands.draw import draw
from exporter.commands.export import export
from exporter.commands.gradient import gradient
from exporter.commands.inspect import inspect
from exporter.commands.profile import profile
from exporter.commands.run import run
from exporter.commands.step import step
from exporter.commands.tangent import tangent
from exporter.commands.verify import verify
from exporter.errors import full

__all__ = ["main"]


# What writing to standard output may say.
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT)


def _give_up_stdout() -> None:
    """What is still in its buffer cannot be written, and must not be tried again when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Commands(click.Group):
    """What ends a command without an answer is neither of the exit codes that are answers, 0 and 1."""

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
                print_exception(error.__cause__)
            raise
        except (click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
                _give_up_stdout()
                click.echo(f"error: cannot print the answer: {error.strerror}; send standard output elsewhere", err=True)
            else:  # a fault of ours, or --traceback
                print_exc()
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
    # Console scripts do not have it, python -m does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


for _command in (diff, doctor, draw, export, gradient, inspect, profile, run, step, tangent, verify):
    main.add_command(_command)

if __name__ == "__main__":
    main()
