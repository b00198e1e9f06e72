"""Shared by the tests: what is in a model, and what eager calls."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import onnx_ir as ir
import pytest
import torch

NEEDS = "PYTHONOP_NEEDS"


@contextlib.contextmanager
def counted_applies() -> Iterator[list[type]]:
    """Eager's calls of Function.apply (torch's own left out), counted without our code."""
    seen: list[type] = []
    depth = 0

    def listen(_frame: Any, event: str, called: Any) -> None:
        nonlocal depth
        if event not in ("c_call", "c_return", "c_exception") or getattr(called, "__name__", "") != "apply":
            return
        cls = getattr(called, "__self__", None)
        if not isinstance(cls, type) or not issubclass(cls, torch.autograd.Function):
            return
        if event != "c_call":
            depth -= 1
            return
        if depth == 0 and cls.__module__.split(".")[0] != "torch":
            seen.append(cls)
        depth += 1

    before = sys.getprofile()
    sys.setprofile(listen)  # on every torch, apply ends in a method of C
    try:
        yield seen
    finally:
        sys.setprofile(before)


class Calls(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def nodes(model: ir.Model, op_type: str | None = None) -> list[ir.Node]:
    """The nodes of a model, subgraphs included."""
    return [n for n in ir.traversal.RecursiveGraphIterator(model.graph) if op_type is None or n.op_type == op_type]


def _loop() -> float:
    """Seconds of processor for a loop that takes 0.02 on the machine that the limits were written on."""
    begin = time.process_time()
    sum(map(abs, range(700_000)))
    return time.process_time() - begin


@contextlib.contextmanager
def processor_time(most: float) -> Iterator[None]:
    """Fail where the body takes more seconds of processor than that, on a machine of ordinary speed.

    A slow or a busy machine is given as much more as a loop takes on it before and after. What earlier tests left to the garbage
    collector is not looked through again in the body.
    """
    gc.collect()
    gc.freeze()
    try:
        slow = _loop()
        begin = time.process_time()
        yield
        taken = time.process_time() - begin
        slow = max(slow, _loop(), 0.02) / 0.02
    finally:
        gc.unfreeze()
    assert taken < most * slow, f"{taken:.2f} s of processor, at most {most} times {slow:.2f}"


def missing(tool: str, reason: str) -> NoReturn:
    """Leave a test that this machine has no tool for: an xfail, and the end of the run counts them by tool.

    Where the variable PYTHONOP_NEEDS names the tool (a list with commas, or ``all``), it is a failure.
    """
    if {tool, "all"} & set(os.environ.get(NEEDS, "").split(",")):
        pytest.fail(f"{NEEDS} names {tool}: {reason}")
    pytest.xfail(f"missing {tool}: {reason}")


def process_group_of_one() -> None:
    """torch.distributed with this process alone; it stays, for whoever comes next in this process."""
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
