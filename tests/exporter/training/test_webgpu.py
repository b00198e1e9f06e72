"""Steps that are written for WebGPU train on onnxruntime-web's own WebGPU in Chromium, no node of theirs on the CPU: beside Python's onnxruntime."""

from __future__ import annotations

import base64
import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from examples.web import model as page_model
from tests.browser import WEBGPU, chromium, told_by
from tests.exporter.training.javascript import package, spiking_task
from tests.exporter.training.loop import run
from tests.providers.sessions import STRICT, in_chromium, placed
from tests.support import missing

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

STEPS = 20


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, bias=False, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x, mask):
        y = self.first(x)
        x = x + self.drop(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])
        return x + self.drop(self.outer(F.gelu(self.inner(self.second(x)))))


class GPT(nn.Module):
    """Two blocks with dropout between embeddings and tied logits."""

    def __init__(self, words=50, length=16, width=32):
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(words, width), nn.Embedding(length, width), nn.Dropout(0.1)
        self.blocks, self.last = nn.ModuleList(_Block(width, 4) for _ in range(2)), nn.LayerNorm(width)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, x):
        y = self.drop(self.words(x) + self.places(torch.arange(x.shape[1])))
        for block in self.blocks:
            y = block(y, self.mask)
        return self.last(y) @ self.words.weight.T


def _of_words(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _mlp():
    torch.manual_seed(0)
    batches = [(torch.randn(32, 8), torch.randint(0, 3, (32,))) for _ in range(STEPS)]
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3)).train(), batches, F.cross_entropy, {}


def _spiking():
    model, batches = spiking_task(STEPS)
    return model, batches, F.cross_entropy, {"portable": True}


def _gpt():
    torch.manual_seed(0)
    return GPT().train(), [tuple(torch.randint(0, 50, (2, 4, 16))) for _ in range(STEPS)], _of_words, {}


class _Noisy(nn.Sequential):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x)) * torch.rand(())


def _noisy():
    torch.manual_seed(0)
    batches = [(torch.randn(32, 8), torch.randint(0, 3, (32,))) for _ in range(STEPS)]
    return _Noisy(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3)).train(), batches, F.cross_entropy, {}


def _lenet():
    """Six channels in the middle, of which the kernel of onnxruntime-web 1.30 gives wrong numbers."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, 3, 12, 12), torch.randint(0, 3, (6,))) for _ in range(STEPS)]
    body = nn.Sequential(nn.Conv2d(3, 6, 5), nn.Tanh(), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.Flatten(), nn.Linear(256, 3))
    return body.train(), batches, F.cross_entropy, {}


@pytest.fixture(scope="module")
def ask():
    chromium()
    package("onnxruntime-web")
    found = told_by(
        "<script>navigator.gpu?.requestAdapter().then((adapter) => tell(Boolean(adapter))) ?? tell(false)</script>", {}, flags=WEBGPU
    )
    if not found:
        missing("webgpu", "this Chromium has no adapter, not even SwiftShader")
    with contextlib.ExitStack() as kept:
        yield in_chromium(kept)


def _opened(ask, step, options):
    answer = ask(
        {
            "model": base64.b64encode(step.model_proto.SerializeToString()).decode(),
            "options": {"logSeverityLevel": 0, **options},
            "placements": True,
        }
    )
    return placed(answer["lines"])


def _described(array):
    array = np.asarray(array)
    return {"type": array.dtype.name, "dims": array.shape, "data": base64.b64encode(np.ascontiguousarray(array)).decode()}


def _trained(ask, step, batches):
    """The losses, and the state behind them."""
    kinds = {value.name: value.dtype.numpy() for value in step.model.graph.inputs}
    names, state, losses = (*step.layout.inputs, *step.layout.targets), dict(step.initial), []
    for batch in batches:
        feeds = state | {name: value.numpy().astype(kinds[name]) for name, value in zip(names, batch, strict=True)}
        results = {
            name: np.frombuffer(base64.b64decode(value["data"]), value["type"]).reshape(value["dims"])
            for name, value in ask({"feeds": {name: _described(value) for name, value in feeds.items()}})["results"].items()
        }
        state |= {name: results[output] for output, name in step.layout.carried.items()}
        losses.append(float(results["loss"]))
    return losses, state


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("task", [_mlp, _spiking, _gpt, _noisy, _lenet])
def test_a_step_trains_on_webgpu_alone(task, dynamo, ask):
    model, batches, loss, options = task()
    near = 2e-4 if task is _lenet else 2e-5  # of a convolution net, AdamW divides more of rounding
    step = exporter.export_training_step(
        model, batches[0][:1], loss=loss, targets=batches[0][1:], optimizer="adamw", hyperparameters={"lr": 0.003}, dynamo=dynamo, **options
    )
    written = step.written_for("webgpu")
    assert list(_opened(ask, written, STRICT)) == ["WebGpuExecutionProvider"]
    losses, state = _trained(ask, written, batches)
    expected, after = run(step, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] != losses[0]
    assert state["state.step"] == STEPS
    for name in step.layout.parameters.values():
        np.testing.assert_allclose(state[name], after[name], rtol=1e-3, atol=near * np.abs(after[name]).max(), err_msg=name)


def test_open_sizes_and_a_step_as_it_is(ask):
    """Any number of rows goes through one file; what was not written for WebGPU has nodes on the CPU, so that the test above can fail."""
    model, batches, loss, _ = _mlp()
    step = exporter.export_training_step(
        model, batches[0][:1], loss=loss, targets=batches[0][1:], optimizer="adamw", dynamic_shapes=({0: "batch"},), dynamo=False
    )
    written = step.written_for("webgpu")
    assert list(_opened(ask, written, STRICT)) == ["WebGpuExecutionProvider"]
    sizes = [tuple(value[: 5 + at] for value in batch) for at, batch in enumerate(batches[:4])]
    np.testing.assert_allclose(_trained(ask, written, sizes)[0], run(step, sizes)[0], rtol=1e-5)

    # That of the page, whose batch is open, too.
    case = page_model.case()
    step_of_page = exporter.export_training_step(
        case.model, case.args, loss=case.loss, targets=case.targets, dynamic_shapes=case.dynamic_shapes, portable=True
    )
    assert list(_opened(ask, step_of_page.written_for("webgpu"), STRICT)) == ["WebGpuExecutionProvider"]

    assert _opened(ask, step, {})["CPUExecutionProvider"]["LogSoftmax"] == 1
    with pytest.raises(RuntimeError, match="explicitly disabled"):
        _opened(ask, step, STRICT)
