"""Training steps of models with Functions that need no Python: ONNX functions in place of PythonOps."""

from __future__ import annotations

import copy

import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from symbolics.errors import ExportError
from symbolics.graph.values import is_python_op
from symbolics.graph.walk import walk
from tests.exporter.training.loop import batches_of, eager, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Bent(torch.autograd.Function):
    """A backward that is not the derivative of its forward: a link that is lost shows."""

    @staticmethod
    def forward(ctx, x):
        y = torch.exp(0.1 * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return -3 * g * y


class Bends(nn.Module):
    def forward(self, x):
        return Bent.apply(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Bends(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("portable", [True, ["Bent"]])
def test_trains_as_eager_without_anything_of_ours(portable, dynamo):
    model, batches = network(), batches_of(6)
    step = step_of(copy.deepcopy(model), batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, portable=portable, dynamo=dynamo)
    assert not any(is_python_op(node) for node in walk(step.model.graph))
    (call,) = step.portable
    assert (call.function, call.module, call.kind) == (f"{__name__}:Bent", "1", "function")
    session = onnxruntime.InferenceSession(ir.to_proto(step.model).SerializeToString(), providers=["CPUExecutionProvider"])
    names, layout, state, losses = [o.name for o in session.get_outputs()], step.layout, dict(step.initial), []
    for x, y in batches:
        found = dict(zip(names, session.run(None, {**state, layout.inputs[0]: x.numpy(), layout.targets[0]: y.numpy()}), strict=True))
        state.update({name: found[output] for output, name in layout.carried.items()})
        losses.append(float(found[layout.loss]))
    expected = eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len({round(loss, 9) for loss in losses}) == len(losses)


def test_a_function_that_cannot_be():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (2 if x.sum() > 0 else 3)

        @staticmethod
        def backward(ctx, g):
            return g

    class Look(nn.Module):
        def forward(self, x):
            return Looks.apply(x)

    batch = batches_of(1)[0]
    with pytest.raises(ExportError, match=r"Looks.*no ONNX function can stand for it"):
        step_of(nn.Sequential(nn.Linear(4, 3), Look()).double(), batch, portable=["*Looks"])
