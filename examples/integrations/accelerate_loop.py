"""Accelerate's loop around a loaded file: accumulated and clipped gradients, a checkpoint from which it goes on to the same losses.

python -m examples.integrations.accelerate_loop
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import exporter
from examples.integrations.net import Net, Softsign, compare, points, save


def train(model: torch.nn.Module, folder: Path) -> list[float]:
    """The loss of each batch in 8 epochs; after 4 a checkpoint, from which the rest is made a second time."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(*points()), batch_size=16, num_workers=1))

    def epochs() -> list[float]:
        losses = []
        for _ in range(4):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    losses = epochs()
    accelerator.save_state(str(folder))
    rest = epochs()
    accelerator.load_state(str(folder))
    if epochs() != rest:
        raise SystemExit("the checkpoint did not go on to the same losses")
    return losses + rest


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(path := Path(folder, "model.onnx"))
        file = train(exporter.load(path, allow=[Softsign]), Path(folder, "file"))
        eager = train(Net(), Path(folder, "eager"))
    print(f"Accelerate: {compare(file, eager)}; the checkpoint goes on to the same losses")


if __name__ == "__main__":
    main()
