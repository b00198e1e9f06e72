"""The semantics cases, as data: a Function, its arguments, and how the comparison with eager goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from symbolics.node.containers import fill
from tests.exporter.runtime.build import eager, forward, record, training
from tests.zoo import functions as F


def t(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape, dtype=torch.float64).mul(2).to(dtype)
    return x.requires_grad_(grad and dtype.is_floating_point and dtype.itemsize > 1)


@dataclass
class Case:
    cls: type
    args: tuple[Any, ...]
    absent: Sequence[int] = ()  # outputs whose gradient is not there
    note: str = ""
    fields: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.cls.__name__ + (f"-{self.note}" if self.note else "")


_SIMPLE = (F.SavesInput, F.SavesOutput, F.SavesIntermediate, F.SavesNothing, F.KeepsInputOnCtx, F.ReturnsInput, F.ReturnsView, F.Once)
_SIMPLE += (F.TrailingNone, F.NonDifferentiable, F.IntegerOutput, F.OddOutputs, F.ChangesInput, F.ChangesInputThroughNumpy, F.Copies)

CASES = [Case(cls, (t(2, 4),)) for cls in (*_SIMPLE, F.ChangesGradient, F.SetupContext)]
CASES += [Case(cls, (t(300, 400),), note="large") for cls in (*_SIMPLE, F.ChangesGradient)]
CASES += [
    Case(F.SetupContext, (t(2, 4), 5), note="given"),
    Case(F.TwoInputs, (t(3), t(3), 0.1)),
    Case(F.TwoInputs, (t(3), t(3, grad=False), 1e-300), note="one-flag"),
    Case(F.TwoInputs, (t(3, grad=False), t(3, grad=False)), note="no-flag"),
    Case(F.TwoInputs, (t(3), t(3)), absent=(1,), note="absent-1"),
    Case(F.NoneGradient, (t(3), t(3))),
    Case(F.Materializes, (t(2, 4),), absent=(1,), note="absent-1"),
    Case(F.Materializes, (t(2, 4),), absent=(0, 1), note="absent-all"),
    Case(F.DoesNotMaterialize, (t(2, 4),)),
    Case(F.DoesNotMaterialize, (t(2, 4),), absent=(0,), note="absent-0"),
    Case(F.DoesNotMaterialize, (t(2, 4),), absent=(1,), note="absent-1"),
    Case(F.Dirty, (t(2, 4),), fields={"inplace": True}),
    Case(F.Dirty, (t(2, 4, grad=False),), fields={"inplace": True}, note="no-flag"),
    Case(F.Arguments, (t(2), {"a": t(2, grad=False), "b": t(2, grad=False)}, F.Mode.DOWN, [5, 6], torch.float16, None, "x")),
    Case(F.MaybeAbsent, (t(2), None, t(2)), note="None-between"),
    Case(F.SavesInput, (t(2, 4, dtype=torch.float64),), note="float64"),
    Case(F.SavesInput, (t(2, 4, dtype=torch.float16),), note="float16"),
    Case(F.SavesInput, (t(2, 4, dtype=torch.bfloat16),), note="bfloat16"),
    Case(F.SavesInput, (t(),), note="0-d"),
    Case(F.SavesInput, (t(0, 4),), note="empty"),
    Case(F.SavesNothing, (torch.arange(6, dtype=torch.int32),), note="int32"),
    Case(F.SavesNothing, (torch.arange(6, dtype=torch.int64),), note="int64"),
    Case(F.SavesNothing, (torch.arange(6, dtype=torch.uint8),), note="uint8"),
    Case(F.Copies, (torch.tensor([True, False]),), note="bool"),
    Case(F.Copies, (t(4).detach().to(torch.float8_e4m3fn),), note="float8"),
    Case(F.Copies, (torch.arange(4).to(torch.uint16),), note="uint16"),
]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    if found.dtype.itemsize == 1 and found.dtype.is_floating_point:
        found, expected = found.float(), expected.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_case(case: Case, runner: Callable[[onnx.ModelProto], Any], times: int = 3) -> None:
    """Forward alone, and forward with backward, against eager; several runs; no context left."""
    outputs, seeds, grads = eager(case.cls, *case.args, absent=case.absent)
    call = record(case.cls, *case.args, **(case.fields or {}))
    tensors: list[torch.Tensor] = []
    for value in case.args:
        fill(value, lambda leaf: tensors.append(leaf.detach()) if isinstance(leaf, torch.Tensor) else None)
    before = [tensor.clone() for tensor in tensors]

    alone = runner(forward(call))
    for _ in range(times):
        for found, expected in zip(alone.run(*tensors), outputs, strict=True):
            same(found, expected)
    assert len(alone.store) == 0

    if any(call.input_requires_grads):
        both = runner(training(call, absent=case.absent))
        for _ in range(times):
            found = both.run(*tensors, *seeds)
            for value, expected in zip(found, [*outputs, *[g for g in grads if g is not None]], strict=True):
                same(value, expected)
        assert len(both.store) == 0
    for tensor, copy in zip(tensors, before, strict=True):
        same(tensor, copy)
