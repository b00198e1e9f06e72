"""What we write in place of an operator computes a half type as torch's kernels do, in float32 inside: beside float64, where squares overflow or vanish."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import exporter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SCALES = (400.0, 3e-4)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TARGETS = (torch.arange(32).reshape(4, 8) % 3 == 0).to(torch.float16)
CALLS = {
    "std": lambda h: h.std(1),
    "std, divided by": lambda h: h / h.std(1, keepdim=True),
    "std, a correction of a half": lambda h: h.std(1, correction=0.5),
    "std_mean": lambda h: torch.std_mean(h, 1)[0],
    "norm, p = 3": lambda h: h.norm(p=3, dim=1),
    "vector_norm, p = 4": lambda h: torch.linalg.vector_norm(h, 4),
    "pairwise_distance, p = 3": lambda h: F.pairwise_distance(h, h.flip(1), p=3),
    "dist, p = 3": lambda h: torch.dist(h, h.flip(1), 3),
    "renorm, p = 3": lambda h: torch.renorm(h, 3, 0, 1.0),
    "batch norm, no statistics": lambda h: F.batch_norm(h, None, None, training=True),
    "batch norm, weights alone": lambda h: F.batch_norm(h, None, None, torch.ones(8).to(h), torch.zeros(8).to(h), training=True),
    "binary cross entropy": lambda h: F.binary_cross_entropy(torch.sigmoid(h), TARGETS.to(h.dtype)),
}


class Of(nn.Module):
    """Each call of an input of its own."""

    def __init__(self, calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *xs):
        return tuple(call(x) for call, x in zip(self.calls, xs, strict=True))


def _run(module, xs):
    xs = [x.detach().clone().requires_grad_() for x in xs]
    ys = module(*xs)
    draw = torch.Generator().manual_seed(1)
    sum((y.double() * torch.randn(y.shape, generator=draw)).sum() for y in ys).backward()
    return [value.detach() for value in ys], [x.grad for x in xs]


def _is_near(what, found, eager, exact):
    """As near to float64 as four times eager's own error, and one unit of the half type; where a half type has the number at all, and eager has."""
    there = exact.half().isfinite() & eager.isfinite()
    error, own, size = (
        (a - b)[there].abs().max().item() if there.any() else 0.0 for a, b in ((found, exact), (eager.double(), exact), (exact, 0))
    )
    assert found[there].isfinite().all() and error <= 4 * own + 1e-3 * size + 1e-7, (what, error, own, size)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_half_types_are_computed_in_float32_inside(dynamo):
    names = [f"{name}, of {scale}" for scale in SCALES for name in CALLS]
    calls = [call for _ in SCALES for call in CALLS.values()]
    xs = [(X * scale).half() for scale in SCALES for _ in CALLS]
    loaded = exporter.load(exporter.export(Of(calls), tuple(xs), dynamo=dynamo))
    found, eager, exact = _run(loaded, xs), _run(Of(calls), xs), _run(Of(calls), [x.double() for x in xs])
    for i, what in enumerate(names):
        for which, kind in enumerate(("value", "gradient")):
            assert found[which][i].dtype is torch.float16, what
            _is_near(f"{kind} of {what}", found[which][i].double(), eager[which][i], exact[which][i])


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm, no weights": lambda: nn.BatchNorm1d(8, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_half_types_and_their_statistics(norm, scale, dynamo):
    """The variance of a batch is no number of float16 at 400; a tenth of it, which the running variance takes, is."""
    model = norm().half()
    x = (torch.randn(64, 8, 5, generator=torch.Generator().manual_seed(3)) * scale).half()
    x = x[:, :, 0] if isinstance(model, nn.BatchNorm1d) else x
    loaded = exporter.load(exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo)).train()
    modules = (loaded, copy.deepcopy(model), copy.deepcopy(model).double())
    runs = [_run(lambda *xs, m=module: (m(*xs),), [x.to(dtype)]) for module, dtype in zip(modules, (torch.half, torch.half, torch.double))]
    for which, kind in enumerate(("value", "gradient")):
        _is_near(kind, *(run[which][0].double() for run in runs))
    for name, buffer in modules[1].named_buffers():
        if buffer.is_floating_point():
            _is_near(name, *(dict(module.named_buffers())[name].double() for module in modules))
    for name, _ in modules[1].named_parameters():
        _is_near(name, *(dict(module.named_parameters())[name].grad.double() for module in modules))


@pytest.mark.parametrize("count", [16, 70_000])
def test_a_step_counts_more_than_a_half_type_can(count):
    """Running variances of float16 follow the batch's unbiased ones, of 70,000 values too, more than float16's largest number."""
    model = nn.Sequential(nn.BatchNorm1d(2)).half()
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(4)).half() * 300
    eager = copy.deepcopy(model)
    eager(x)
    step = exporter.export_training_step(model, (x,), loss=lambda y: y.float().square().mean(), optimizer="sgd")
    trainer = exporter.Trainer(step)
    trainer.step({"input": x})
    found = trainer.state_dict()["0.running_var"]
    np.testing.assert_allclose(torch.as_tensor(found).float(), eager[0].running_var.float(), rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_gradient_of_a_layer_norm_on_onnx_reference(dtype, tmp_path):
    """Whose statistics are float32, whatever it normalizes."""
    import ml_dtypes

    model, x = nn.LayerNorm(8).to(dtype), X.to(dtype)
    graph = exporter.build_gradient_graph(exporter.export(model, (x,)))
    kind = np.float16 if dtype is torch.float16 else ml_dtypes.bfloat16
    feeds = {value.name: (x if value.name == "input" else torch.ones(4, 8)).float().numpy().astype(kind) for value in graph.graph.inputs}
    found = exporter.reference_evaluator(graph).run(None, feeds)
    y = model(x)
    np.testing.assert_allclose(found[0].astype(np.float32), y.detach().float(), rtol=2e-2, atol=2e-2)
    y.backward(torch.ones_like(y))
    gradients = dict(zip((value.name for value in graph.graph.outputs), found))
    np.testing.assert_allclose(gradients["bias_grad"].astype(np.float32), model.bias.grad.float(), rtol=2e-2)
    np.testing.assert_allclose(gradients["weight_grad"].astype(np.float32), model.weight.grad.float(), rtol=5e-2, atol=5e-2)
