"""Fixtures for all tests."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from exporter.runtime.accelerate import switched_off
from tests import long, torchlib, usable
from tests.processes import Forks, FreshProcess
from tests.support import NEEDS

#: Tests of the accelerator alone.
collect_ignore = ["exporter/cpu"] if switched_off() else []

torch.set_num_threads(1)
torchlib.built_once()
made = usable.watch()

# Another one (PYTHONOP_SEED=1 make test) finds tests whose tolerance holds for one draw of numbers alone.
BEGIN = time.monotonic()
SEED = int(os.environ.get("PYTHONOP_SEED") or 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="begin no test later than so many minutes after the start: for a machine whose speed nobody knows"
    )
    parser.addoption("--turn", type=int, default=0, help="which files come first: another number, another order")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file draws where it is imported depends on no file before it."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is long by tests/long.py."""
    for item in long.long_ones(items):
        item.add_marker(pytest.mark.long)
    if turn := config.getoption("turn"):
        items[:] = long.turned(items, turn)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nothing begins after --minutes."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGIN > 60 * minutes:
        pytest.skip(f"not run: it was not its turn within --minutes {minutes:g}")


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcess]:
    process = FreshProcess(tmp_path_factory.mktemp("fresh"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def _forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    process = Forks(tmp_path_factory.mktemp("forks"))
    yield process
    process.close()


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of what an accelerator does, which is there also where all tests run without (PYTHONOP_ACCELERATE=0)."""
    monkeypatch.delenv("PYTHONOP_ACCELERATE", raising=False)


@pytest.fixture
def quick_verify(_forks: Forks) -> Iterator[None]:
    """verify()'s process is a fork of one that has imported torch: new to the model all the same, and there at once."""
    with _forks.instead_of("exporter.verification.worker"):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)
    # What torch says about its own exporters is not ours to answer for; our warnings are tested where they belong.
    warnings.filterwarnings("ignore", message=".*TorchScript-based ONNX export.*")
    warnings.filterwarnings("ignore", message=".*in training mode.*")
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)


@pytest.fixture(autouse=True)
def _usable(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test exports, differentiates and trains is valid ONNX and opens in onnxruntime."""
    made.looks = request.node.get_closest_marker("unusable") is None
    yield
    if wrong := made.take():
        pytest.fail("it made what is of no use, and has no marker `unusable` that says why:\n" + "\n".join(wrong), pytrace=False)


@pytest.fixture(params=[True, False], ids=["dynamo", "torchscript"])
def dynamo(request: pytest.FixtureRequest) -> bool:
    return request.param


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Features go unseen where a tool is missing, and blocks of pages that nobody runs: say so last, below the summary's single lines."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    told = [value for report in reports for name, value in report.user_properties if name == "page"]
    for text, *_ in sorted(told):
        terminalreporter.write_line(text)
    if told:
        run, left = sum(each[1] for each in told), sum(each[2] for each in told)
        terminalreporter.write_line(
            f"{len(told)} pages: {run} blocks run, {left} not run or not compared; {' | '.join(sorted({each[3] for each in told}))}"
        )
    reasons = [str(getattr(report, "wasxfail", "")) for report in terminalreporter.stats.get("xfailed", [])]
    tools = Counter(reason.split("missing ", 1)[1].split(":")[0] for reason in reasons if "missing " in reason)
    if tools:
        counted = ", ".join(f"{tool} ({count} tests)" for tool, count in tools.items())
        terminalreporter.write_line(f"Not tested on this machine, for want of: {counted}. {NEEDS}={','.join(tools)} makes them failures.")
