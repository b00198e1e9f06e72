"""Train a saved file on several processes: DistributedDataParallel or FSDP2 around a loaded module.

    torchrun --nproc-per-node 2 -m examples.ddp model.onnx --allow 'mypkg.ops:*'
    torchrun --nproc-per-node 2 -m examples.ddp --fsdp

Without a file it trains a small model of its own. Each process reads its share of the batch; the gradients are those of the
whole. gloo on the CPU, so it runs anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import exporter


class Softsign(torch.autograd.Function):
    """x / (1 + |x|), with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        y = x / (1 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y.abs()) ** 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.second(Softsign.apply(self.first(x)))


def make_file(path: Path) -> None:
    torch.manual_seed(0)
    exporter.export(Net(), (torch.randn(4, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).save(path)


def data(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, the same in every process."""
    x = torch.randn(batch, 8, generator=torch.Generator().manual_seed(1))
    return x, x.square().sum(1, keepdim=True)


def wrap(module: nn.Module, fsdp: bool) -> nn.Module:
    """The loaded module for training on all processes."""
    if not fsdp:
        return DistributedDataParallel(module)
    # One group of parameters: the forward of a file is one call, so all of them are gathered for it.
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def train(options: argparse.Namespace) -> list[float]:
    """The mean loss of all processes at each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            path = Path(folder, f"model-{rank}.onnx")
            make_file(path)
        module = wrap(exporter.load(path, allow=options.allow or [Softsign]), options.fsdp)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    x, y = data(16 * world)
    mine = slice(16 * rank, 16 * (rank + 1))
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def leave(code: int) -> NoReturn:
    """Ends the process without Python's own ending.

    torch keeps the group of fully_shard beyond destroy_process_group. A thread of gloo that frees a tensor of Python's while
    Python ends would abort the process: "terminate called without an active exception".
    """
    sys.stdout.flush()
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        # In a function of its own: a DistributedDataParallel that is freed after its process group may never return.
        losses = train(options)
        if dist.get_rank() == 0:
            print(f"{'FSDP2' if options.fsdp else 'DDP'} on {dist.get_world_size()} processes: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return int(not losses[-1] < losses[0])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    leave(main())
