"""pythonop verify."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import click
from rich.console import Console

from exporter.commands.shared import Failure, load_target, reported, run_setups, setup_option, status, writable
from symbolics.errors import PythonopError

__all__ = ["verify"]


@click.command()
@click.argument("target")
@click.option("--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the report as one self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--bisect", is_flag=True, help="Where something differs, find the first node that departs.")
@click.option(
    "--setup", metavar="PKG.MOD:FUNCTION", help="Called first in the fresh process; it calls exporter.register(). Default: TARGET."
)
@click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that the fresh process may take.")
@setup_option
@click.pass_context
def verify(
    context: click.Context,
    target: str,
    dynamo: bool,
    html: Path | None,
    as_json: bool,
    bisect: bool,
    setup: str | None,
    opset: int | None,
    timeout: float,
    setups: tuple[str, ...],
) -> None:
    """Compare the file of the model that TARGET makes, and its gradients, with eager PyTorch.

    The file is run by onnxruntime in a fresh process. The exit status is 0 where all tensors are equal within what their
    type can do, 1 where one differs, 2 where the comparison could not be made.
    """
    from exporter.verification.verify import verify as run

    if html is not None:
        writable(html)
    with reported(context):
        with status(f"importing {target}", as_json):
            run_setups(setups)
            case = load_target(target)
        with status(f"verifying {type(case.model).__name__}", as_json), contextlib.redirect_stdout(sys.stderr):
            try:
                report = run(case, dynamo=dynamo, setup=setup or target, opset_version=opset, bisect=bisect, timeout=timeout)
            except PythonopError:
                raise
            except Exception as error:
                if context.obj["traceback"]:
                    raise
                raise Failure(f"the comparison failed with {type(error).__name__}: {str(error).strip()[:1000]}") from error
        report.facts["model"] = f"{type(case.model).__name__} ({target})"
        if html is not None:
            report.to_html(html)
        if as_json:
            click.echo(json.dumps(report.as_json()))
        else:
            console = Console(highlight=False)
            console.print(report.render())
            if html is not None:
                console.print(f"wrote {html}", markup=False)
        if not report.ok:
            context.exit(1)
