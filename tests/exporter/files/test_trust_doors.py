"""allow= is one language: what it refuses is refused by everything that takes it."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main

WIDE = ["mypkg*", "m*:Fn", "q*:*", "[a-z]x:*", "?s:*", "my*pkg.ops:Fn"]
IN_FULL = r"a wildcard in a package's name means other packages, too: write the package's name in full: 'mypkg\.\*' or 'mypkg:\*'"


def net():
    return nn.Linear(2, 1), (torch.ones(3, 2),)


def mean_squared(y, target):
    return ((y - target) ** 2).mean()


@pytest.fixture(scope="module")
def program():
    return exporter.export(*net(), dynamo=False)


@pytest.fixture(scope="module")
def step():
    return exporter.export_training_step(*net(), targets=(torch.ones(3, 1),), loss=mean_squared, optimizer="sgd", dynamo=False)


DOORS = {
    "load": lambda program, step, allow: exporter.load(program, allow=allow),
    "inference_session": lambda program, step, allow: exporter.inference_session(program, allow=allow),
    "session_options": lambda program, step, allow: exporter.session_options(allow=allow),
    "reference_evaluator": lambda program, step, allow: exporter.reference_evaluator(program, allow=allow),
    "check_gradients": lambda program, step, allow: exporter.check_gradients(program, allow=allow),
    "Trainer": lambda program, step, allow: exporter.Trainer(step, allow=allow),
    "verify": lambda program, step, allow: exporter.verify(*net(), dynamo=False, allow=allow),
    "assert_roundtrip": lambda program, step, allow: exporter.testing.assert_roundtrip(*net(), dynamo=False, allow=allow),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_wildcard_in_the_name_of_a_package(door, program, step):
    for allow in WIDE:
        with pytest.raises(exporter.errors.ArgumentError, match=IN_FULL) as caught:
            DOORS[door](program, step, ["mypkg.ops:Fn", allow])
        assert f"allow={allow!r}" in str(caught.value)


@pytest.mark.parametrize("command", [["run"], ["profile"], ["doctor", "--run"], ["verify"]], ids=" ".join)
def test_on_the_command_line(command, program, tmp_path):
    program.save(tmp_path / "m.onnx")
    target = [f"{__name__}:net"] if command == ["verify"] else []
    done = CliRunner().invoke(main, [*command, str(tmp_path / "m.onnx"), *target, "--allow", "mypkg*:Fn"])
    assert done.exit_code == 2
    assert "allow='mypkg*:Fn': a wildcard in a package's name" in " ".join(done.stderr.split())
