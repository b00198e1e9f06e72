"""allow= is one language: what it refuses is refused by everything that takes it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main
from exporter.files.trust import Gate, unregister
from symbolics.errors import TrustError
from tests.exporter.runtime.build import forward, record
from tests.zoo import functions as F

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


MOVED = """
import torch, exporter


class New(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
"""


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """Writes the module of the old name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moved_new.py").write_text(MOVED)

    def write(text):
        (tmp_path / "moved_old.py").write_text(text)
        importlib.invalidate_caches()
        return Gate(["moved_old:New"])

    yield write
    unregister("moved_old:New")
    for name in ("moved_new", "moved_old"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "text",
    [
        "import moved_new\nclass New(moved_new.New): pass",
        "import exporter\nfrom moved_new import New\nexporter.register(New, 'moved_old:New')",
    ],
    ids=["subclass", "registered by the module itself"],
)
def test_a_function_that_has_moved(text, moved):
    found = moved(text)("function", "moved_old:New")
    assert issubclass(found, torch.autograd.Function)


def test_an_alias_of_a_function_says_what_to_write(moved):
    with pytest.raises(
        exporter.TrustError, match=r"class New\(moved_new\.New\): pass' into moved_old, or call exporter\.register\(cls, 'moved_old:New'\)"
    ):
        moved("from moved_new import New")("function", "moved_old:New")


@pytest.mark.parametrize("kind", ["function", "callable", "dataclass"])
def test_a_letter_that_looks_like_another_is_marked(kind):
    """An allow= that is copied from a message, and a reviewer who reads it: the Cyrillic o in the second name is none of ASCII."""
    with pytest.raises(TrustError) as caught:
        Gate(["mypkg.ops:*"])(kind, "mypkg.\u043eps:Fn")
    text = str(caught.value)
    assert text.isascii()
    assert r"pass allow=['mypkg.\u043eps:Fn']" in text and "no ASCII letter" in text
    with pytest.raises(TrustError) as caught:
        Gate(["mypkg:*"])(kind, "mypkg.ops:Fn")
    assert "ASCII" not in str(caught.value)


def test_an_operator_that_looks_like_another_is_marked():
    with pytest.raises(TrustError, match=r"allow=\['mylib::\\u043ep'\].*no ASCII letter"):
        Gate([]).check_operator("mylib::\u043ep.default", "")


def test_commands_mark_it_too(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_looks_like("mypkg.\u043eps:Fn").SerializeToString())
    for command in ("inspect", "doctor"):
        result = CliRunner().invoke(main, [command, str(path)], terminal_width=200)
        assert "\u043e" not in result.output and r"\u043eps:Fn" in result.output, result.output
        assert "no ASCII letter" in " ".join(result.output.split())
    result = CliRunner().invoke(main, ["run", str(path)])
    assert r"--allow $'mypkg.\u043eps:Fn'" in result.output


def _looks_like(name):
    model = forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True)))
    next(each for each in model.graph.node[0].attribute if each.name == "name").s = name.encode()
    return model


def test_what_is_not_allowed_is_said_first():
    """Also of a name that no entry would help, for it leads to something else."""
    with pytest.raises(TrustError, match=r"^os:system is not allowed by 'mypkg:\*', and no entry would help: .*which it is not"):
        Gate(["mypkg:*"])("function", "os:system")
    with pytest.raises(TrustError, match=f"^{__name__}:net is not allowed, and no entry would help"):
        Gate([])("function", f"{__name__}:net")
