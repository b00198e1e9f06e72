"""A loaded module in DDP and FSDP2, two processes on loopback: gradients equal those of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.exporter.module import functions as F
from tests.processes import python

pytestmark = pytest.mark.slow


def torchrun(*arguments):
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    return python("-m", "torch.distributed.run", *options, "-m", *arguments, timeout=240, GLOO_SOCKET_IFNAME="lo")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed") / "model.onnx"
    torch.manual_seed(0)
    exporter.export(F.Cubic(), (torch.randn(4, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).save(path)
    return path


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_equal_one_process(file, kind):
    done = torchrun("tests.exporter.module.distributed_worker", str(file), kind)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{kind}: equal on 2 processes" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_the_example(flags):
    done = torchrun("examples.ddp", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 processes: loss" in done.stdout
