"""The blocks of docs/integrations.md. As a program it runs those of one section::

python -m tests.end_to_end.integrations.page SECTION FOLDER
"""

from __future__ import annotations

import os
import re
import sys

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text()
#: The packages of each section of the page.
SECTIONS = {
    "Accelerate": "accelerate",
    "Lightning": "pytorch_lightning",
    "Trainer of transformers": "accelerate",  # which transformers' Trainer asks for
    "PEFT": "peft",
    "optimum": "optimum",
    "torch.onnx.export": "torch",
    "TensorBoard": "tensorboard",
    "safetensors": "safetensors",
}
#: What the page takes as given.
GIVEN = """
import sys, torch, exporter
from pathlib import Path
from examples.integrations import net
sys.modules["mypkg"] = type(sys)("mypkg")
sys.modules["mypkg.ops"] = net
for cls in (net.Softsign, net.Net):
    cls.__module__ = "mypkg.ops"
net.save(Path("model.onnx"))
net.save(Path("labelled.onnx"), labels=True)
model, (x, y) = net.Net(), net.points()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
rows = [{"x": one, "labels": label} for one, label in zip(x, y)]
"""
GIVEN_OPTIMUM = """
import torch, exporter
from transformers import BertConfig, BertForSequenceClassification
BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)).save_pretrained("folder")
"""


def blocks() -> dict[str, str]:
    """section -> its code."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return {title: "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for title, text in sections}


if __name__ == "__main__":
    section, folder = sys.argv[1:]
    os.chdir(folder)
    given = GIVEN_OPTIMUM if section == "optimum" else GIVEN
    exec(compile(given + blocks()[section], section, "exec"), {"__name__": "__page__"})
