"""Exports beside other threads: what torch keeps for the whole process says nothing of those."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import exporter

X = torch.ones(4, 3)


class Meanwhile(nn.Linear):
    """While it is captured, something is done in another thread."""

    def __init__(self, work, seconds):
        super().__init__(3, 2)
        self.work, self.seconds = work, seconds

    def forward(self, x):
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            thread = threading.Thread(target=self.work)
            thread.start()
            thread.join(self.seconds)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore")
def test_a_loaded_module_serves_while_another_thread_exports(dynamo):
    model = nn.Linear(3, 2)
    module = exporter.load(exporter.export(model, (X,)))

    found = []

    def served():
        result = module(X)
        result.sum().backward()
        found.append(result.detach())

    exporter.export(Meanwhile(served, 60), (X,), dynamo=dynamo)
    assert found
    torch.testing.assert_close(found[0], model(X).detach())
    assert module.weight.grad is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", [True, False], ids=["dynamo", "torchscript"])
def test_a_thread_that_exports_waits_for_the_one_that_does(other, dynamo):
    model, begun = nn.Linear(3, 2), []
    model.register_forward_pre_hook(lambda *_: begun.append(True))
    done = []

    def second():
        try:
            done.append(exporter.export(model, (X,), dynamo=other))
        except BaseException as error:
            done.append(error)

    exported = Meanwhile(second, 0.3)
    finish = Meanwhile.forward

    def forward(x):
        result = finish(exported, x)
        assert not begun, "two exports at once"
        return result

    exported.forward = forward
    assert len(exporter.export(exported, (X,), dynamo=dynamo, eager_check=False).model.graph) == 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(30)
    assert done and all(isinstance(each, exporter.Program) for each in done), done
