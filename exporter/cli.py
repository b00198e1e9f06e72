"""The pythonop command. What a program reads goes to stdout, what a person reads while waiting to stderr.

Exit codes: 0 done, 1 the answer is no (inspect: a node is damaged), 2 the request could not be carried out.
"""

from __future__ import annotations

import os
import sys

import click

import exporter
from exporter.commands.export import export
from exporter.commands.gradient import gradient
from exporter.commands.inspect import inspect
from exporter.commands.run import run
from exporter.commands.step import step
from exporter.commands.verify import verify

__all__ = ["main"]


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


for _command in (export, gradient, inspect, run, step, verify):
    main.add_command(_command)

if __name__ == "__main__":
    main()
