"""The Trainer of transformers around a loaded file that takes labels and returns its loss: training, a resumed checkpoint, evaluation.

python -m examples.integrations.hf_trainer
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import exporter
from examples.integrations.net import Net, Softsign, compare, points, save


def train(models: list[torch.nn.Module], folder: Path) -> tuple[list[float], float]:
    """The loss of each step, and of the evaluation. The second model begins at the checkpoint in the middle."""
    rows = [{"x": x, "labels": y} for x, y in zip(*points(), strict=True)]
    losses = []
    for model in models:
        options = TrainingArguments(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=8, per_device_train_batch_size=16,
            learning_rate=0.02, logging_steps=1, save_steps=16, eval_strategy="epoch",
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=rows, eval_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-16") if losses else None)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    if losses[0] != losses[1]:
        raise SystemExit("the checkpoint did not go on to the same losses")
    accuracy = (trainer.predict(rows).predictions.argmax(1) == points()[1].numpy()).mean()
    return losses[0], float(accuracy)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(path := Path(folder, "model.onnx"), labels=True)
        file, accuracy = train([exporter.load(path, allow=[Softsign]) for _ in range(2)], Path(folder, "file"))
        eager, wanted = train([Net(), Net()], Path(folder, "eager"))
    print(f"Trainer: {compare(file, eager)}; {accuracy:.0%} and {wanted:.0%} right")


if __name__ == "__main__":
    main()
