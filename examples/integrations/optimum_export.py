"""optimum's command for a transformers model whose activation is a Function: the file runs anywhere, and trains by its own backward.

python -m examples.integrations.optimum_export
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from optimum.commands.optimum_cli import main as optimum_cli
from transformers import BertConfig, BertForSequenceClassification
from transformers.activations import ACT2FN

import exporter
from examples.integrations.net import Softsign


class Activation(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Softsign.apply(x)


def main() -> None:
    ACT2FN["softsign"] = Activation
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_act="softsign",
        pad_token_id=0,
    )
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 50, (4, 10))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        sys.argv = [
            "optimum-cli",
            "export",
            "onnx",
            "--model",
            folder,
            "--task",
            "text-classification",
            "--monolith",
            str(Path(folder, "out")),
        ]
        with exporter.hook(portable=True):  # optimum compares the file with the model on plain onnxruntime
            optimum_cli()
        module = exporter.load(Path(folder, "out", "model.onnx"))

    found, wanted = module(**given)["logits"], model(**given).logits
    weights = dict(model.named_parameters())
    for logits in (found, wanted):
        logits.square().sum().backward()
    gaps = {name: (p.grad - weights[name].grad).abs().max() for name, p in module.named_parameters() if p.grad is not None}
    print(f"optimum: logits differ by {(found - wanted).abs().max():.1e}, gradients of {len(gaps)} parameters by {max(gaps.values()):.1e}")


if __name__ == "__main__":
    main()
