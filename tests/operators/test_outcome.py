"""Each word has a call that ends in it; a call that kills its process loses itself alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import tensor

from symbolics.capture.recorder import active_recorder
from tests.operators import outcome, samples, sweep
from tests.processes import python


class _Twice(torch.autograd.Function):
    """A Function whose backward is no derivative of its forward: nobody allows it when the file is loaded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


def _found(call: samples.Call, kinds: dict[str, list[torch.Tensor]], name: str = "mine") -> list[outcome.Outcome]:
    group = samples.Group(call, kinds)
    return [found for _, found in outcome.outcomes(name, group, dynamo=False) if isinstance(found, outcome.Outcome)]


def _words(function: Callable[..., Any], *tensors: torch.Tensor) -> list[str]:
    call = samples.Call.of(function, tensors, {})
    kinds = {"one": call.tensors, "two": [t + 1 if t.is_floating_point() else t for t in call.tensors]}
    return [found.word for found in _found(call, kinds)]


def test_what_works():
    assert _words(torch.exp, tensor([1.0, 2.0])) == ["works", "works"]


def test_what_is_not_the_same_twice():
    assert _words(torch.rand_like, tensor([1.0, 2.0])) == ["random", "random"]


def test_what_we_refuse():
    assert _words(_Twice.apply, tensor([1.0, 2.0])) == ["refused"]


def test_what_torch_cannot_export():
    assert _words(torch.special.bessel_j0, tensor([1.0, 2.0])) == ["torch.onnx fails"]


def test_what_becomes_an_opaque_node():
    """Missing; named, where a translation makes a file that does not run; neither."""
    zero, first = tensor(2.0), tensor(0)
    for function, *tensors, word, why in (
        (torch.special.bessel_j0, zero, "works", "aten::special_bessel_j0.default"),
        (lambda x, index: x.gather(0, index), zero, first, "works", "named: aten::gather.default"),
        (lambda x: torch.view_as_real(torch.fft.fft(x)), torch.ones(3), "refused", "ExportError: aten::fft_fft.default"),
    ):
        call = samples.Call.of(function, tensors, {})
        *_, (_, found) = outcome.opaque_outcomes("mine", samples.Group(call, {"one": call.tensors}), dynamo=False)
        assert isinstance(found, outcome.Outcome) and (found.word, found.why[: len(why)]) == (word, why)


def test_what_eager_refuses_has_no_word():
    assert _words(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(2, 3)) == []


def test_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    """A file that gives another number, and one whose gradients are lost."""
    load = outcome.exporter.load

    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
        def changing(path: Any) -> Any:
            module = load(path)
            return lambda x: change(module(x))

        return changing

    monkeypatch.setattr(outcome.exporter, "load", changed(lambda y: y * 1.001))
    assert _words(torch.exp, tensor([1.0, 2.0])) == ["wrong", "wrong"]
    monkeypatch.setattr(outcome.exporter, "load", changed(torch.Tensor.detach))
    assert _words(torch.exp, tensor([1.0, 2.0])) == ["wrong", "wrong"]
    monkeypatch.setattr(outcome.exporter, "load", lambda path: lambda x: 1 / 0)
    assert _words(torch.exp, tensor([1.0, 2.0])) == ["crash", "crash"]


def test_a_second_choice_at_a_kink(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outcome.exporter, "load", lambda path: lambda x: torch.where(x >= 0, x, x * 0))
    assert _words(torch.relu, tensor([0.0, 2.0])) == ["kink", "works"]


@pytest.mark.parametrize(("name", "off", "word"), [("sigmoid", 2e-7, "inexact"), ("sigmoid", 4e-7, "wrong"), ("exp", 2e-7, "wrong")])
def test_what_a_kernel_does_not_promise(monkeypatch: pytest.MonkeyPatch, name: str, off: float, word: str):
    function = getattr(torch, name)
    monkeypatch.setattr(outcome.exporter, "load", lambda path: lambda x: function(x) + off)
    call = samples.Call.of(function, (tensor([-14.0, -15.0]),), {})
    assert [found.word for found in _found(call, {"one": call.tensors}, name)] == [word]


@pytest.mark.parametrize(("counts", "word"), [([2, 1, 1], "works"), ([1, 2, 1], "wrong")])
def test_an_order_that_nobody_promises(monkeypatch: pytest.MonkeyPatch, counts: list[int], word: str):
    """Values in another order than eager's, with the places and the counts that belong to them."""
    results = tensor([3.0, 1.0, 2.0]), tensor([0, 1, 2, 0]), tensor(counts)
    monkeypatch.setattr(outcome.exporter, "load", lambda path: lambda x: results)
    call = samples.Call.of(torch.unique, (tensor([3.0, 1.0, 2.0, 3.0]),), {"sorted": False, "return_inverse": True, "return_counts": True})
    assert [found.word for found in _found(call, {"one": call.tensors})] == [word]


def test_a_slope_that_is_drawn():
    """rrelu of 0 is 0, whatever its slope is."""
    call = samples.Call.of(lambda x: torch.nn.functional.rrelu(x, training=True), (torch.zeros(2),), {})
    assert [found.word for found in _found(call, {"one": call.tensors})] == ["random"]


def _fails_here_and_dies_alone(x: torch.Tensor) -> torch.Tensor:
    if torch.jit.is_tracing():
        if active_recorder() is None:
            os.kill(os.getpid(), signal.SIGFPE)
        raise ValueError("not under the hook")
    return x * 2


def test_a_torch_that_dies_takes_none_of_ours_with_it():
    call = samples.Call.of(_fails_here_and_dies_alone, (torch.ones(2),), {})
    (found,) = _found(call, {"one": call.tensors})
    assert (found.word, found.why) == ("torch.onnx fails", "the process died of SIGFPE")


def dies(x: torch.Tensor) -> torch.Tensor:
    """A call that ends the process under export alone."""
    if torch.jit.is_tracing():
        os.kill(os.getpid(), signal.SIGFPE)
    return x * 2


def dies_in_eager(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGFPE)
    return x


_SCRIPT = """
from tests.operators import named, sweep, test_outcome
import torch
from pathlib import Path
ones = lambda: [torch.ones(2)]
named.CASES = {"mine": {"before": (torch.exp, ones), "dies": (test_outcome.dies, ones), "eager dies": (test_outcome.dies_in_eager, ones), "behind": (torch.exp, ones)}}
sweep.EXPORTERS = {"torchscript": False}
sweep.sweep(["mine"], -1, Path("RECORD"), jobs=1)
"""


def test_a_process_that_dies_loses_one_call(tmp_path: Path):
    """And where eager dies of it, there is nothing to compare with."""
    record = tmp_path / "record.jsonl"
    done = python("-W", "ignore", "-c", _SCRIPT.replace("RECORD", str(record)))
    assert done.returncode == 0, done.stderr
    kinds = sweep.lines(record)["mine", "torchscript"].kinds
    assert {kind: word for kind, (word, *_) in kinds.items()} == {"before": "works", "dies": "crash", "behind": "works"}
    assert kinds["dies"][2] == "the process died of SIGFPE"
