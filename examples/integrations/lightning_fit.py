"""Lightning's Trainer around a loaded file: clipped and accumulated gradients, a checkpoint that another Trainer goes on from.

python -m examples.integrations.lightning_fit
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import exporter
from examples.integrations.net import Net, Softsign, compare, points, save

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    """The LightningModule of any classifier: what it trains may be a file."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(models: list[torch.nn.Module], folder: Path) -> list[float]:
    """Four epochs of the first model; four more of the second one, from the checkpoint of the first."""
    checkpoint, losses = None, []
    for model in models:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=8 if checkpoint else 4,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        fitted = Classifier(model)
        trainer.fit(fitted, DataLoader(TensorDataset(*points()), batch_size=16), ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(checkpoint := folder / "last.ckpt")
        losses += fitted.losses
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(path := Path(folder, "model.onnx"))
        file = train([exporter.load(path, allow=[Softsign]) for _ in range(2)], Path(folder))
        eager = train([Net(), Net()], Path(folder))
    print(f"Lightning: {compare(file, eager)}")


if __name__ == "__main__":
    main()
