"""--input, --dynamic, -q and -v: what several commands have."""

from __future__ import annotations

import json
import logging
import warnings

import onnx
import pytest
import torch
from rich.console import Console
from torch import nn

import exporter
from exporter.commands import shared
from exporter.commands.inputs import load_case
from tests.exporter.commands.test_cli import TARGETS


class Two(nn.Module):
    """Containers, and a keyword."""

    def forward(self, xs, *, mask=None):
        return xs[0] @ xs[1]["w"] + mask


def containers():
    return exporter.Case(Two(), ([torch.ones(4, 3), {"w": torch.ones(3, 2)}],), {"mask": torch.ones(4, 2)})


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 3)

    def forward(self, ids, scale, *, on=None):
        return self.table(ids) * scale * on


instance = Embeds()
HERE = __name__


def shapes(path):
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx.load(path).graph.input}


@pytest.mark.parametrize("target", ["torch.nn:Tanh", f"{HERE}:Embeds", f"{HERE}:instance"])
def test_a_module_without_example_arguments(run, path, target, dynamo):
    inputs = ["--input", "float32[2,3]"]
    if target.startswith(HERE):
        inputs = ["--input", "int64[2,5]", "--input", "on=bool[]", "--input", "scale=float32[1]"]
    result = run("export", target, "-o", path, *inputs, "--dynamo" if dynamo else "--no-dynamo")
    assert result.exit_code == 0, result.output
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.load(path).graph.input}
    if target.startswith(HERE):
        assert shapes(path) == {"ids": [2, 5], "scale": [1], "on": []}
        assert kinds == {"ids": onnx.TensorProto.INT64, "scale": onnx.TensorProto.FLOAT, "on": onnx.TensorProto.BOOL}
    else:
        assert shapes(path) == {"input": [2, 3]}


def test_examples_are_the_same_at_every_call():
    one, other = (load_case(f"{TARGETS}:pair", ("x=float32[2,3]",), ()) for _ in range(2))
    torch.testing.assert_close(one.kwargs["x"], other.kwargs["x"])
    assert one.kwargs["x"].std() > 0


def test_dynamic(run, path, dynamo):
    exporter_of_torch = "--dynamo" if dynamo else "--no-dynamo"
    assert run("export", f"{TARGETS}:pair", "-o", path, "--dynamic", "x:0=rows", exporter_of_torch).exit_code == 0
    assert shapes(path) == {"x": ["rows", 3]}
    # It takes the place of what the Case says.
    assert run("export", f"{TARGETS}:case", "-o", path, "--dynamic", "x:-2=n", exporter_of_torch).exit_code == 0
    assert shapes(path) == {"x": ["n", 3]}


def test_dynamic_inside_containers(run, path, dynamo):
    options = ["--dynamic", "xs_0:0=n", "--dynamic", "mask:0=n", "--dynamo" if dynamo else "--no-dynamo"]
    result = run("export", f"{HERE}:containers", "-o", path, *options)
    assert result.exit_code == 0, result.output
    assert shapes(path) == {"xs_0": ["n", 3], "xs_1_w": [3, 2], "mask": ["n", 2]}


def test_dynamic_in_a_step(run, path):
    result = run("step", f"{TARGETS}:trainable", "-o", path, "--dynamic", "input:0=b")
    assert result.exit_code == 0, result.output
    assert shapes(path)["input"] == ["b", 3]


def test_verify_with_inputs(run):
    result = run("verify", "torch.nn:Tanh", "--input", "input=float32[2,3]", "--dynamic", "input:0=b", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]


# ------------------------------------------------------------------------------------------------------------- -q, -v


class Taken(torch.nn.Module):
    def forward(self, x):
        return x * x.detach().abs().max().item()


def takes():
    return Taken(), (torch.randn(2, 3),)


def warns():
    warnings.warn("of another package", UserWarning, stacklevel=1)
    warnings.warn("of another package, too", DeprecationWarning, stacklevel=1)
    return nn.Linear(3, 2), (torch.ones(2, 3),)


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0


class Forward(torch.nn.Module):
    def forward(self, x):
        return WithoutBackward.apply(x)


def has_no_backward():
    return Forward(), (torch.randn(2, 3),)


def test_a_quiet_verify_says_what_equal_numbers_do_not(run):
    result = run("verify", f"{HERE}:has_no_backward", "-q")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("Outputs alone: ")


@pytest.fixture
def _all_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


@pytest.mark.usefixtures("_all_warnings")
def test_warnings_of_others_are_a_number(run, path):
    result = run("export", f"{HERE}:warns", "-o", path)
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(said) == 1
    assert "warnings of other packages: -v shows" in said[0]
    assert "of another package, too" not in result.stderr
    assert run("export", f"{HERE}:warns", "-o", path, "-q").output == ""
    loud = run("export", f"{HERE}:warns", "-o", path, "-v")
    assert "of another package, too" in loud.stderr
    assert "-v shows" not in loud.stderr


@pytest.mark.usefixtures("_all_warnings")
def test_values_that_a_trace_keeps_are_said(run, path):
    result = run("export", f"{HERE}:takes", "-o", path, "--no-dynamo")
    assert result.exit_code == 0 and "warning: .item() takes the value of a tensor out of torch at test_options.py:" in result.stderr


def test_verbose_says_the_stages(run, path):
    result = run("export", f"{TARGETS}:pair", "-o", path, "-v", "--json")
    assert json.loads(result.stdout)["calls"] == 2
    stages = [line.rpartition(":")[0] for line in result.stderr.splitlines() if line.endswith(" s")]
    assert stages == [f"importing {TARGETS}:pair", "exporting Model", f"checking {path}", f"writing {path}"]
    assert "[torch.onnx]" in result.stderr


class _Terminal:
    """A stderr that is a terminal."""

    def __init__(self, monkeypatch):
        self.console = Console(force_terminal=True, record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
        monkeypatch.setattr(shared, "Console", lambda **_: self.console)

    @property
    def text(self):
        return self.console.export_text()


def test_a_long_stage_stays_on_a_terminal(monkeypatch):
    terminal, now = _Terminal(monkeypatch), iter((0.0, 3.0, 3.0, 3.5))
    monkeypatch.setattr(shared.time, "perf_counter", lambda: next(now))
    with shared.status("the long part", False):
        logging.getLogger("pythonop").info("the short part")
    said = terminal.text
    assert "the long part: 3.0 s" in said
    assert "the short part: " not in said


def test_stages_of_a_library_call_are_silent_without_a_command(capfd):
    logging.getLogger("pythonop").info("nobody asked")
    assert capfd.readouterr() == ("", "")
