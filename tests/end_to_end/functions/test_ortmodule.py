"""What the older implementation of this feature accepted, and what it got wrong: each trained for ten steps beside eager.

The file is loaded as a torch.nn.Module, and the same optimizer trains it and the eager model on the same batches. After
each step outputs, the input's gradient, all parameters' gradients and the parameters are equal.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.library import available
from symbolics.node.attributes import read_attributes, values_of
from tests.end_to_end.functions import ortmodule
from tests.end_to_end.functions.case import Model
from tests.support import nodes, process_group_of_one
from tests.trains import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(available() is not None, reason=f"exporter.load needs onnxruntime and the native library: {available()}"),
]

ALLOW = ["tests.end_to_end.functions.*:*"]
STEPS = 10


def model_of(body) -> Model:
    torch.manual_seed(3)
    return Model(body, {"linear": nn.Linear(4, 4)})


def loaded(model, dynamo, tmp_path):
    torch.manual_seed(1)
    program = exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo)
    program.save(tmp_path / "model.onnx")
    return program, exporter.load(tmp_path / "model.onnx", allow=ALLOW)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def train(eager, module, *, batches=1):
    """Ten steps of both, compared after each; ``batches`` forwards before each backward."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (eager, module)]
    for step in range(STEPS):
        results = []
        for model, optimizer in zip((eager, module), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            xs = [torch.randn(3, 4, requires_grad=True) for _ in range(batches)]
            torch.manual_seed(100 + step)
            outputs = [model(x * 1) for x in xs]
            sum((y * torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape)).sum() for y in outputs).backward()
            results.append((outputs, [x.grad for x in xs], gradients(model)))
            optimizer.step()
        (want, want_x, want_grads), (got, got_x, got_grads) = results
        assert want_grads.keys() == got_grads.keys()
        for what, a, b in [
            ("output", want, got),
            ("gradient of the input", want_x, got_x),
            ("gradients", [*want_grads.values()], [*got_grads.values()]),
        ]:
            for one, two in zip(a, b, strict=True):
                one, two = (torch.zeros(3, 4) if t is None else t.detach() for t in (one, two))
                assert_close(two, one, 1e-4, msg=lambda m, what=what, step=step: f"step {step}, {what}: {m}")
    for (name, one), two in zip(eager.named_parameters(), module.parameters(), strict=True):
        assert_close(two, one, 1e-4, msg=lambda m, name=name: f"{name} after {STEPS} steps: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ortmodule.ACCEPTED, *ortmodule.WRONG])
def test_ten_steps(name, dynamo, tmp_path):
    process_group_of_one()
    model = model_of({**ortmodule.ACCEPTED, **ortmodule.WRONG}[name])
    _, module = loaded(model, dynamo, tmp_path)
    train(model, module)


@pytest.mark.slow
def test_two_forwards_before_a_backward(dynamo, tmp_path):
    model = model_of(ortmodule.ACCEPTED["tensor and Parameter"])
    train(model, loaded(model, dynamo, tmp_path)[1], batches=2)


def test_undeclared_change_returned_as_is_is_refused_or_equal(dynamo, tmp_path):
    """Eager hands out the changed input itself; whoever reads the input again reads the change."""
    model = model_of(lambda m, x: ortmodule.UndeclaredAsIs.apply(m.linear(x)) * m.weight)
    train(model, loaded(model, dynamo, tmp_path)[1])

    def reads_again(m, x):
        h = m.linear(x)
        return ortmodule.UndeclaredAsIs.apply(h) + h

    with pytest.raises(exporter.ExportError, match=r"UndeclaredAsIs.*mark_dirty"):
        exporter.export(model_of(reads_again), (torch.randn(3, 4),), dynamo=dynamo)


@pytest.mark.slow
def test_evaluation(dynamo, tmp_path):
    model = model_of(lambda m, x: ortmodule.TensorAndParameter.apply(torch.dropout(m.linear(x), 0.5, m.training), m.weight)).eval()
    _, module = loaded(model, dynamo, tmp_path)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(3, 4)
        with torch.no_grad():
            torch.testing.assert_close(module(x), model(x))


def test_training_mode(dynamo, tmp_path):
    model = model_of(ortmodule.ACCEPTED["tensor and Parameter"])
    for training in (True, False):
        program, _ = loaded(model.train(training), dynamo, tmp_path)
        (node,) = nodes(program.model, "PythonOp")
        assert read_attributes(values_of(node)).training is training


def test_distributed_data_parallel(dynamo, tmp_path):
    process_group_of_one()
    model = model_of(ortmodule.WRONG["ProcessGroup"])
    _, module = loaded(copy.deepcopy(model), dynamo, tmp_path)
    wrap = torch.nn.parallel.DistributedDataParallel
    train(wrap(model), wrap(module))
