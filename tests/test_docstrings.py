"""The examples in the docstrings of the public names run as they stand there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys

import onnx_ir
import onnxruntime
import pytest
import torch

import exporter
from exporter.files import trust
from symbolics.gradients import registry
from tests import api_page

#: What the examples take as given: a package with a Function, which files name.
OPS = """
import torch

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return Halve.apply(self.linear(x))

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))

class Lsq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s, low, high):
        return torch.clamp(torch.round(x / s), low, high) * s

class Pact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, k):
        scale = alpha / (2**k - 1)
        return torch.round(torch.clamp(x, min=0).minimum(alpha) / scale) * scale

class Dorefa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        return torch.round(x * (2**k - 1)) / (2**k - 1)
"""

#: Whose examples have no ``allow``: their model calls no Function.
TRAINED = ("Trainer", "export_evaluation", "export_training_step", "write_artifacts", "trained")

_PARSER = doctest.DocTestParser()
EXAMPLES = {
    name: examples for name in api_page.public() if (examples := _PARSER.get_examples(inspect.getdoc(api_page._thing(name)) or "", name))
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The names that examples use, in a folder with the files that they use."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "mypkg").mkdir()
    (folder / "mypkg" / "ops.py").write_text(OPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        ops = importlib.import_module("mypkg.ops")
        model, plain, x, y = ops.Model(), ops.Plain(), torch.randn(8, 4), torch.randn(8, 3)
        options = {"loss": torch.nn.functional.mse_loss, "targets": (y,)}
        program = exporter.export(model, (x,))
        program.save("model.onnx")
        step, evaluation = exporter.export_training_step(plain, (x,), **options), exporter.export_evaluation(plain, (x,), **options)
        exporter.write_artifacts(step, evaluation, "artifacts")
        exporter.Trainer.load("artifacts").save("after.state")
        yield {
            "exporter": exporter,
            "torch": torch,
            "onnxruntime": onnxruntime,
            "onnx_ir": onnx_ir,
            **{name: getattr(ops, name) for name in ("Lsq", "Pact", "Dorefa")},
            "model": model,
            "plain": plain,
            "x": x,
            "y": y,
            "program": program,
            "step": step,
            "evaluation": evaluation,
            "linear_program": exporter.export(torch.nn.Linear(64, 32), (torch.randn(1, 64),)),
        }
    del sys.modules["mypkg.ops"], sys.modules["mypkg"]


@pytest.fixture
def given(made, monkeypatch):
    """Them, for one example; what it registers is forgotten."""
    monkeypatch.setattr(trust, "_objects", dict(trust._objects))
    monkeypatch.setattr(trust, "_names", dict(trust._names))
    before = dict(registry.RULES)
    yield dict(made)
    registry.RULES.clear()
    registry.RULES.update(before)
    exporter.uninstall()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, given):
    if name in TRAINED:
        given["model"] = given["plain"]
    said: list[str] = []
    test = doctest.DocTest(EXAMPLES[name], given, name, None, None, None)
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not said, "".join(said)


def test_what_people_call_first_has_an_example():
    assert {"export", "hook", "load", "verify", "Trainer", "quantize", "inference_session", "build_gradient_graph"} <= set(EXAMPLES)


def test_an_example_that_fails_is_told():
    said: list[str] = []
    test = doctest.DocTest(_PARSER.get_examples(">>> 1 + 1\n3\n"), {}, "wrong", None, None, None)
    doctest.DocTestRunner().run(test, out=said.append)
    assert said
