"""What each process of test_distributed.py does: torchrun -m tests.exporter.module.distributed_worker MODEL ddp|fsdp."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import exporter
from examples.ddp import leave, wrap

STEPS = 4


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def train(module, parameters, x_of):
    """Gradients of each step and the parameters behind the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = x_of(step)
        nn.functional.mse_loss(module(x), y).backward()
        gradients.append({name: full(p.grad).clone() for name, p in parameters()})
        optimizer.step()
    return gradients, {name: full(p).detach().clone() for name, p in parameters()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(path, kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(path, kind)
    if dist.get_rank() == 0:
        print(f"{kind}: equal on {dist.get_world_size()} processes")
    dist.barrier()
    dist.destroy_process_group()


def compare(path, kind):
    rank, world = dist.get_rank(), dist.get_world_size()
    allow = ["tests.exporter.module.functions", "tests.zoo.functions"]
    alone = exporter.load(path, allow=allow)
    expected, last = train(alone, alone.named_parameters, batch)

    module = exporter.load(path, allow=allow)
    inner = module
    wrapped = wrap(module, kind == "fsdp")
    if kind == "fsdp":
        assert sum(p.to_local().numel() for p in module.parameters()) < sum(p.numel() for p in alone.parameters())
    share = 8 // world

    def mine(step):
        x, y = batch(step)
        return x[rank * share : (rank + 1) * share], y[rank * share : (rank + 1) * share]

    found, final = train(wrapped, inner.named_parameters, mine)
    for step, (one, two) in enumerate(zip(found, expected, strict=True)):
        for name in two:
            torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6, msg=f"{name}, step {step}")
    for name in last:
        torch.testing.assert_close(final[name], last[name], rtol=1e-4, atol=1e-5, msg=name)
    assert len(module._onnx.plans.store) == 0


if __name__ == "__main__":
    main(*sys.argv[1:3])
    leave(0)
