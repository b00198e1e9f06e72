"""Changes in place of activations through views: eager's memory is one, a trace has a value for each tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError
from tests.symbolics.capture import functions as f
from tests.trains import assert_step_alike

ROWS = torch.export.Dim("rows", min=3, max=9)


def written(change):
    """A body that changes a tensor in place and returns it."""

    def body(h):
        change(h)
        return h

    return body


def whole_after_a_view(h):
    row, turned = h[0], h.t()
    h.mul_(3)
    return h + row + turned[:, :1].t()


def views_of_one_memory(h):
    low, high = h[1:], h[:-1]
    low.mul_(2)
    return high * 3 + low


def into_zeros(h):
    z = torch.zeros_like(h)
    z[1:].add_(h[1:])
    z.view(-1)[:3] = h[0]
    z[:, 1].copy_(h[:, 2])
    return z * h


def unseen_by_autograd(h):
    with torch.no_grad():
        h[1:].mul_(2)
    return h * h


def parts_without_gradients(h):
    z = torch.ones(4, 3)
    with torch.no_grad():
        first, second = z.split(2)
        first.add_(1)
        second.chunk(3, 1)[1].mul_(5)
        z.unbind(1)[2].sub_(2)
    return z * h


def by_out(h):
    z = torch.ones_like(h)
    with torch.no_grad():
        torch.mul(h.detach()[:2], 2, out=z[1:3])
    return z * h


def of_what_a_function_changes(h):
    flat = h.view(-1)
    changed = f.AddInPlace.apply(h, 2.0)
    flat.mul_(2)
    changed[0].mul_(3)
    return h * flat[0]


BODIES = {
    "a slice": written(lambda h: h[1:].mul_(2)),
    "a view": written(lambda h: h.view(-1).mul_(2)),
    "the transposed": written(lambda h: h.t()[1:].mul_(2)),
    "a part of a part": written(lambda h: h[1:][:, 0].zero_()),
    "a row": written(lambda h: h.select(0, 1).fill_(2.0)),
    "a few elements": written(lambda h: h.flatten()[2:5].mul_(2)),
    "with more dimensions": written(lambda h: h[..., None].squeeze(-1).mul_(2)),
    "an index that adds a dimension": written(lambda h: h.__setitem__((slice(None), None), h[:, None] * 2)),
    "permuted": written(lambda h: h.view(h.shape[0], 3, 1).permute(1, 2, 0)[1:].mul_(2)),
    "by movedim and narrow": written(lambda h: h.movedim(0, 1).narrow(0, 1, 2).exp_()),
    "by a mask": written(lambda h: h[1:].masked_fill_(h[1:] > 0, 0.5)),
    "by relu": written(lambda h: torch.nn.functional.relu(h[1:], inplace=True)),
    "the whole, of which there are views": whole_after_a_view,
    "views of one memory": views_of_one_memory,
    "into zeros": into_zeros,
    "unseen by autograd": unseen_by_autograd,
    "parts without gradients": parts_without_gradients,
    "by out=": by_out,
    "of what a Function changes": of_what_a_function_changes,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.body = nn.Linear(3, 3), body

    def forward(self, x):
        return self.body(f.Scale.apply(self.first(x), torch.ones(3)))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_change_reaches_what_shares_the_memory(body, dynamo):
    torch.manual_seed(0)
    model, x = Model(body), torch.randn(4, 3)
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert_step_alike(exporter.load(program, allow=["tests.symbolics.capture.functions:*"]), model, (torch.randn(4, 3),))


@pytest.mark.parametrize(
    "kind", ["a slice", "permuted", "by movedim and narrow", "the whole, of which there are views", "unseen by autograd"]
)
def test_sizes_stay_dynamic(kind, dynamo):
    torch.manual_seed(0)
    model = Model(BODIES[kind])
    program = exporter.export(model, (torch.randn(4, 3),), dynamo=dynamo, dynamic_shapes=({0: ROWS},))
    assert_step_alike(exporter.load(program, allow=["tests.symbolics.capture.functions:*"]), model, (torch.randn(6, 3),))


@pytest.mark.parametrize(
    ("change", "name"),
    # A diagonal is an If of the trace: eager's judge looks into bodies.
    [(lambda h: h.diagonal().mul_(2), "diagonal"), (lambda h: h.as_strided((2, 2), (3, 1)).mul_(2), "as_strided")],
)
def test_places_of_any_kind(change, name):
    torch.manual_seed(0)
    model, x = Model(written(change)), torch.randn(4, 3)
    program = exporter.export(model, (x,), dynamo=False)
    assert_step_alike(exporter.load(program, allow=["tests.symbolics.capture.functions:*"]), model, (torch.randn(4, 3),))
    with pytest.raises(ExportError, match=rf"^mul_, called in module <root> at tests\S+:\d+: .* {name}\(\) .*write into the tensor itself"):
        exporter.export(model, (x,), dynamo=False, dynamic_shapes=({0: ROWS},))


def test_parts_of_a_dynamic_size():
    with pytest.raises(ExportError, match=r"add_.* split\(\) .*write into the tensor itself"):
        exporter.export(Model(parts_of_the_batch), (torch.randn(4, 3),), dynamo=False, dynamic_shapes=({0: ROWS},))


def parts_of_the_batch(x):
    z = torch.zeros_like(x)
    with torch.no_grad():
        z.split(2)[0].add_(1)
    return z * x
