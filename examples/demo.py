"""The main job, from end to end: two models of transformers become ONNX files that another process runs.

BLOOM (its GeLUFunction) and I-BERT in quant mode (94 Function calls in two layers), from a config with random weights, are
exported by both of torch's exporters, checked by onnx.checker, saved, reopened in a fresh process, run there on
onnx.reference, and compared with eager PyTorch. Then BLOOM and a spiking network of snntorch are trained for 200 steps, in
eager and from their files: training.png has the curves. It ends with the report of `exporter.verify` on BLOOM, report.html.
The exit status is 1 where anything differs.

    python -m examples.demo [--output demo-output] [--only bloom]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
EXPORTERS = {True: "torch.export", False: "TorchScript"}  # by dynamo=
STAGES = ("counting eager's calls", "exporting", "checking and saving", "running in a fresh process", "comparing")


@dataclass
class Case:
    """A model, its example arguments, and the Functions that the fresh process has to allow."""

    model: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    allow: list[str]


def _last(name: str, model: Any) -> Any:
    """The model with one output, so that nothing but tensors is compared."""
    import torch

    class OneOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return getattr(self.model(ids, attention_mask=mask), name)

    return OneOutput()


def tokens(vocabulary: int, batch: int = 2, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask."""
    import torch

    ids = torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch))
    return ids, torch.ones_like(ids)


def bloom() -> Case:
    """BLOOM in training mode, where its GeLU is an autograd Function."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=96,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation="eager",
    )
    return Case(_last("logits", BloomForCausalLM(config)).train(), tokens(96), ["transformers.models.bloom.*"])


def ibert(warm: bool = True) -> Case:
    """I-BERT in quant mode: every layer calls quantisation Functions, with None, int, bool and Parameter arguments."""
    import torch
    from transformers import IBertConfig, IBertModel

    torch.manual_seed(0)
    config = IBertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        quant_mode=True,
    )
    model = IBertModel(config, add_pooling_layer=False).train()
    with torch.no_grad():  # the ranges of its activations are running statistics: two forwards fill them
        for batch in (2, 3) if warm else ():
            model(*tokens(64, batch))
    return Case(_last("last_hidden_state", model).eval(), tokens(64), ["transformers.models.ibert.*"])


CASES: dict[str, tuple[str, Callable[[], Case]]] = {"bloom": ("BLOOM", bloom), "ibert": ("I-BERT, quant mode", ibert)}


# --------------------------------------------------------------------------------------------------------- one row


@dataclass
class Row:
    """What the table says about one model and one exporter."""

    model: str
    exporter: str
    eager_calls: int = 0
    python_ops: int = 0
    nodes: int = 0
    size: int = 0
    error: float = float("nan")
    seconds: float = 0.0
    problem: str = ""


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The names of the Functions that are called in the block, counted by us and not by the exporter: on every torch, a call ends in C."""
    import torch

    names: list[str] = []

    def listen(_frame: Any, event: str, called: Any) -> None:
        cls = getattr(called, "__self__", None)
        if event == "c_call" and called.__name__ == "apply" and isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
            names.append(cls.__qualname__)

    sys.setprofile(listen)
    try:
        yield names
    finally:
        sys.setprofile(None)


def in_a_fresh_process(path: Path, case: Case) -> list[np.ndarray]:
    """The outputs of the saved file, computed by another Python that knows the file and what it may trust."""
    inputs, outputs = path.with_suffix(".inputs.npz"), path.with_suffix(".outputs.npz")
    np.savez(inputs, *[arg.numpy() for arg in case.args])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    done = subprocess.run(
        [sys.executable, __file__, "--reopen", str(path), str(inputs), str(outputs), *case.allow],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the fresh process failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
    with np.load(outputs) as found:
        return [found[name] for name in found.files]


def reopen(path: str, inputs: str, outputs: str, *allow: str) -> None:
    """What the fresh process does: everything a user needs to run a file."""
    import exporter

    evaluator = exporter.reference_evaluator(path, allow=allow)
    with np.load(inputs) as given:
        feeds = dict(zip(evaluator.input_names, (given[name] for name in given.files), strict=True))
    np.savez(outputs, *evaluator.run(None, feeds))


def measure(key: str, dynamo: bool, folder: Path, stage: Callable[[str], None]) -> Row:
    """Export one model by one exporter and compare the file with eager PyTorch."""
    import onnx
    import torch
    from torch.utils import _pytree as pytree

    import exporter

    title, factory = CASES[key]
    row = Row(title, EXPORTERS[dynamo])
    path = folder / f"{key}-{'dynamo' if dynamo else 'torchscript'}.onnx"
    try:
        stage(STAGES[0])
        with counted_calls() as names:
            case = factory()
            names.clear()
            expected = case.model(*case.args)
            row.eager_calls = len(names)
        stage(STAGES[1])
        start = time.perf_counter()
        program = exporter.export(case.model, case.args, dynamo=dynamo)
        row.seconds = time.perf_counter() - start
        stage(STAGES[2])
        program.save(path)
        onnx.checker.check_model(path, full_check=True)
        file = onnx.load(path)
        row.python_ops = sum(node.op_type == "PythonOp" for node in file.graph.node)
        row.nodes, row.size = len(file.graph.node), path.stat().st_size
        stage(STAGES[3])
        found = in_a_fresh_process(path, case)
        stage(STAGES[4])
        wanted = [leaf.detach().numpy() for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
        row.error = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        if row.python_ops != row.eager_calls:
            row.problem = f"{row.python_ops} PythonOps for {row.eager_calls} calls"
        elif not row.error <= TOLERANCE:  # nan is a difference, too
            row.problem = f"differs from eager by more than {TOLERANCE:g}"
    except Exception as error:
        row.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    return row


# --------------------------------------------------------------------------------------------------------- the show


def table(rows: list[Row]) -> Any:
    """The rows as a table of rich."""
    from rich.table import Table

    out = Table(title="autograd Functions in ONNX files, run in a fresh process on onnx.reference", title_justify="left")
    for heading in ("model", "exporter"):
        out.add_column(heading)
    for heading in ("eager's calls", "PythonOps", "nodes", "file", "max error", "export"):
        out.add_column(heading, justify="right")
    out.add_column("result", overflow="fold")
    for row in rows:
        result = "[green]equal[/]" if not row.problem else f"[red]{row.problem}[/]"
        size, seconds = f"{row.size / 1024:.0f} KiB", f"{row.seconds:.1f} s"
        out.add_row(
            row.model, row.exporter, str(row.eager_calls), str(row.python_ops), str(row.nodes), size, f"{row.error:.1e}", seconds, result
        )
    return out


def trained(folder: Path) -> tuple[list[str], bool]:
    """Two networks trained from their files beside eager; the curves go into training.png.

    Returns:
        A line for each network, and whether all learned what eager did.
    """
    from examples import train

    lines, curves, ok = [], {}, True
    for key, (title, factory) in train.TASKS.items():
        eager, file, _ = train.both(factory(), folder / f"{key}-training.onnx")
        lines.append(
            f"{title}: {len(file.losses)} steps of AdamW from the file, loss {file.losses[0]:.3f} -> {file.losses[-1]:.3f}; in eager {eager.losses[-1]:.3f}"
        )
        curves[title] = (eager.losses, file.losses)
        ok &= train.agree(eager, file)
    train.draw(curves, folder / "training.png")
    return lines, ok


def reported(folder: Path) -> Any:
    """The report on BLOOM, in report.html."""
    import exporter

    case = bloom()
    report = exporter.verify(case.model, case.args)
    report.facts["model"] = "BLOOM"
    report.to_html(folder / "report.html")
    return report


def quiet() -> None:
    """Let pythonop's own warnings through, not what the exporters say about themselves."""
    import torch  # noqa: F401  (it sets the levels of its loggers when it is imported)

    import exporter

    for name in ("torch.onnx", "torch.export", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", category=exporter.PythonopWarning)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 where every file equals eager PyTorch."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--reopen"]:
        reopen(*argv[1:])
        return 0
    parser = argparse.ArgumentParser(
        description="Export BLOOM and I-BERT with their autograd Functions and compare the files with eager PyTorch."
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder of the files (default: demo-output)")
    parser.add_argument("--only", choices=sorted(CASES), action="append", help="one of the models")
    parser.add_argument("--exporter", choices=sorted(EXPORTERS.values()), help="one of the exporters")
    parser.add_argument("--no-training", action="store_true", help="stop after the table")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)

    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    quiet()
    # Wide enough for the table also where the output is no terminal.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    jobs = [(key, dynamo) for key in (options.only or CASES) for dynamo, name in EXPORTERS.items() if options.exporter in (None, name)]
    rows: list[Row] = []
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(jobs) * len(STAGES))
        for key, dynamo in jobs:
            done = len(rows) * len(STAGES)
            heading = f"{CASES[key][0]}, {EXPORTERS[dynamo]}"

            def stage(name: str, done: int = done, heading: str = heading) -> None:
                progress.update(task, description=f"{heading}: {name}", completed=done + STAGES.index(name))

            rows.append(measure(key, dynamo, options.output, stage))
            progress.update(task, completed=len(rows) * len(STAGES))
    console.print(table(rows))
    ok = not any(row.problem for row in rows)
    if not options.no_training:
        with console.status("training from files and in eager"):
            lines, learned = trained(options.output)
        console.print(*lines, sep="\n", markup=False)
        with console.status("verifying BLOOM in a fresh process"):
            report = reported(options.output)
        console.print(f"BLOOM: {report.summary()}", markup=False)
        ok &= learned and report.ok
        console.print(f"The curves: {options.output / 'training.png'}; the report: {options.output / 'report.html'}", markup=False)
    console.print(f"The files are in {options.output}/; `pythonop inspect FILE` lists their PythonOps.")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
