"""Assignments by index tensors: outputs and gradients beside eager's, also where the first axis is open."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import exporter
from tests.support import Calls

SHAPE = (4, 2, 8, 3)


def _informer(c, v):
    index = v[..., 0].topk(3)[1]
    c[torch.arange(v.shape[0])[:, None, None], torch.arange(2)[None, :, None], index, :] = v[:, :, :3] * 2


def _rows_and_columns(c, v):
    c[torch.arange(v.shape[0]), :, v[:, 0, :, 0].argmax(1)] = 0.0


def _apart(c, v):
    c[torch.tensor([0, 1]), :, torch.tensor([2, 3])] = v[:2, :, 0]


def _of_two_dimensions(c, v):
    c[:, :, torch.tensor([[0, 1], [2, 3]])] = v[:, :, :4].unflatten(2, (2, 2))


def _behind_an_ellipsis(c, v):
    c[..., [0, 2]] = v[..., [2, 0]]


def _a_row_for_a_mask(c, v):
    c[v[:, :, 0, 0] > 0] = v[0, 0]


def _a_value_for_a_mask(c, v):
    c[v[..., 0] > 0] = v[0, 0, 0]


def _a_mask_behind_an_axis(c, v):
    c[:, v[0, :, 0, 0] > -9] = 0.5


def _keys_of_other_kinds(c, v):
    c[np.array([0, 2])] = 0.5
    c[:, np.array([0, 1])] = v[:, [1, 0]]
    c[[torch.tensor([0, 1]), torch.tensor([1, 0])]] = 2.0


def _a_value_with_an_axis_too_many(c, v):
    c[:, :, torch.tensor([1, 3])] = v[None, :, :, :2]


def _what_torch_writes(c, v):
    c[[0, 2]] = v[[2, 0]]
    c[:, 1, [0, 1], :] = v[:, 0, [3, 4], :]
    c[v > 1] = 2.0
    c[v < -1] = v[v < -1] * 2


WAYS = [
    _informer, _rows_and_columns, _apart, _of_two_dimensions, _behind_an_ellipsis, _a_row_for_a_mask, _a_value_for_a_mask, _a_mask_behind_an_axis,
    _keys_of_other_kinds, _a_value_with_an_axis_too_many, _what_torch_writes,
]  # fmt: skip


def _assigned(way, x):
    c = x * 1.5
    way(c, x)
    return c


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("open_", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_as_in_eager(way, open_):
    generator = torch.Generator().manual_seed(0)
    shapes = (({0: "n"},),) if open_ else None
    model = Calls(lambda x: _assigned(way, x))
    program = exporter.export(model, (torch.randn(SHAPE, generator=generator),), dynamo=False, dynamic_shapes=shapes)
    module = exporter.load(program)
    for rows in (4, 6) if open_ else (4,):
        ours = torch.randn(rows, *SHAPE[1:], generator=generator).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        mine, its = module(ours), model(theirs)
        torch.testing.assert_close(mine, its)
        for result in (mine, its):
            result.sin().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
