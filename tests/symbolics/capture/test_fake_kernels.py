"""Fake kernels that say something else than their operators return."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import exporter
from symbolics.errors import ExportError
from tests.support import nodes


class Call(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator, self.weight = operator, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.operator(x * self.weight)


X = torch.arange(12.0).reshape(3, 4) - 5


@torch.library.custom_op("fake_kernels::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :2].clone(), x[:, 2:].clone()


@torch.library.custom_op("fake_kernels::parts", mutates_args=())
def parts(x: Tensor) -> list[Tensor]:
    return [row.clone() for row in x]


@torch.library.custom_op("fake_kernels::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


for operator in (halves, parts, positive):
    operator.register_autograd(lambda ctx, *g: torch.zeros(3, 4))


def _half(x, size=2, dtype=None):
    return x.new_empty(x.shape[0], size, dtype=dtype)


WRONG = {
    "a size": (halves, lambda x: (_half(x), _half(x, 3)), "output 1 is float32[3, 3], it is float32[3, 2]"),
    "a dtype": (halves, lambda x: (_half(x), _half(x, dtype=torch.float64)), "output 1 is float64[3, 2], it is float32[3, 2]"),
    "a rank": (halves, lambda x: (x.new_empty(6), _half(x)), "output 0 is float32[6], it is float32[3, 2]"),
    "a number of outputs": (parts, lambda x: [x[0]] * 4, "there are 4 outputs, there are 3"),
    "the rank of an open size": (
        positive,
        lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(), 1),
        "output 0 is float32[?, 1], it is float32[6]",
    ),
}


@pytest.mark.parametrize(("operator", "fake", "says"), WRONG.values(), ids=WRONG)
def test_it_is_named(operator, fake, says):
    operator.register_fake(fake)
    model = Call(lambda x: sum(part.sum() for part in operator(x)))
    with pytest.raises(
        ExportError, match=rf"fake_kernels::\w+.default, called in module <root> at {__name__}.*{re.escape(says)}.*\n.*\n.*register_fake"
    ) as told:
        exporter.export(model, (X,), dynamo=True)
    assert len(str(told.value).splitlines()) <= 6
    program = exporter.export(model, (X,), dynamo=False)  # does not ask fake kernels
    torch.testing.assert_close(exporter.load(program, allow=["fake_kernels::*"])(X), model(X))


RIGHT = {
    "as it is": (halves, lambda x: (_half(x), _half(x))),
    "an open size": (positive, lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size())),
}


@pytest.mark.parametrize(("operator", "fake"), RIGHT.values(), ids=RIGHT)
def test_what_is_so_passes(operator, fake):
    operator.register_fake(fake)
    model = Call(lambda x: sum(part.sum() for part in operator(x)) if operator is halves else operator(x).sum())
    program = exporter.export(model, (X,), dynamo=True)
    assert len(nodes(program.model, "PythonOp")) == 1


def test_without_the_check_against_eager_nothing_is_compared():
    halves.register_fake(WRONG["a size"][1])
    assert exporter.export(Call(lambda x: halves(x)[0]), (X,), dynamo=True, eager_check=False)
