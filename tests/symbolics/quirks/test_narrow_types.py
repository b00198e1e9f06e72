"""Small types, and tensors made of numbers, at the size of the example and at another one."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

import exporter

SMALL = (torch.uint8, torch.int8, torch.int16, torch.bool)


def _factories(x):
    n = x.shape[0]
    made = [f for dtype in (*SMALL, torch.float16) for f in (torch.eye(n, dtype=dtype), x.new_full((n,), 1, dtype=dtype))]
    made += [torch.arange(n, dtype=dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16)]
    return (
        x * 1,
        *made,
        torch.full((n,), True),
        torch.full((n,), False, dtype=torch.float32),
        x.new_full((n,), True),
        torch.full_like(x, -1, dtype=torch.uint8),
        torch.full_like(x, -7, dtype=torch.int8),
        torch.arange(0.5, n, 1.7, dtype=torch.int32),
        torch.arange(0, n, 1.5, dtype=torch.int64),
        torch.arange(0.5, 5, 0.7, dtype=torch.int32),
        torch.logspace(0, 2, 3, dtype=torch.uint8),
        torch.linspace(-1.0, 1.0, n),
        torch.linspace(0, n, 7, dtype=torch.float64),
        torch.linspace(3, 5, steps=n, dtype=torch.float64),
        torch.tensor([n]),
        torch.tensor([0, n, 3]),
        torch.tensor([[n, 1.5], [2, n]], dtype=torch.float64),
        torch.tensor([n, 0.5]),
        torch.tensor((n, n), dtype=torch.int32),
        torch.as_tensor([[n], [2]]),
    )


def _powers(x):
    """By tensors with and without axes, and by numbers; integers of negative powers are nothing that anybody computes."""
    whole, some = (x * 3).round().abs().long() + 1, x.abs() + 0.5
    bases = [whole, whole[0], some, x > 0, *(whole.to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32))]
    exponents = [
        torch.tensor(0.3),
        torch.tensor(0.3, dtype=torch.float64),
        some,
        some.double(),
        torch.tensor(2),
        whole % 3,
        x > 0,
        (whole % 3).to(torch.uint8),
    ]
    pairs = [(base, exponent) for base in bases for exponent in exponents if not base.dtype == exponent.dtype == torch.bool]
    return (
        x * 1,
        *(base**exponent for base, exponent in pairs),
        *(base**number for base in bases for number in (2, 0.5)),
        2**whole,
        1.5**whole,
    )


def _operators(x):
    whole = x * 3
    found = [x * 1, whole.long().softmax(0, dtype=torch.float32), torch.nn.functional.log_softmax(whole.int(), 0, dtype=torch.float64)]
    found += [whole.cumsum(0, dtype=torch.int8), (whole.abs() * 100).cumsum(0, dtype=torch.uint8)]
    for dtype in SMALL:
        y = whole.to(dtype)
        found += [y.sort()[0], y.masked_fill(x > 0, 1), y.nonzero(), y.cumsum(0)]
        if dtype is not torch.bool:
            found += [torch.tril(y.unsqueeze(0) * y.unsqueeze(1)), y @ y, y.topk(2)[0], y.argmax(), y.max(), y.min(0).values]
    return tuple(found)


class Made(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize("model", [_factories, _operators, _powers])
def test_equals_eager_at_two_sizes(model, dynamo):
    x, longer = torch.tensor([0.9, -1.2, 2.1, 0.1]), torch.tensor([0.7, 1.4, -2.5, 0.0, 3.1, -0.4, 1.1])
    program = exporter.export(Made(model), (x,), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("n") if dynamo else "n"},))
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for each in (x, longer):
        found = session.run(None, {session.get_inputs()[0].name: each.numpy()})
        for i, (mine, its) in enumerate(zip(found, model(each), strict=True)):
            assert mine.dtype == its.numpy().dtype, i
            np.testing.assert_allclose(mine, its.numpy(), rtol=1e-6, atol=1e-6, err_msg=str(i))
