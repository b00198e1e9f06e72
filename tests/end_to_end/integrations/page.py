"""The blocks of docs/integrations.md. As a program it makes the folder of its files, and runs those of one section there::

python -m tests.end_to_end.integrations.page SECTION FOLDER
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

from tests import pages
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
#: What the page takes as given, in a folder that `prepare` has made.
GIVEN = """
import sys, torch, exporter
sys.path.insert(0, "")
from mypkg.ops import Net, points
model, (x, y) = Net(), points()
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
    sections = dict.fromkeys(block.section for block in pages.blocks("docs/integrations.md") if block.section)
    return {title: "\n".join(pages.code("docs/integrations.md", section=title)) for title in sections}


def prepare(folder: Path) -> None:
    """The page's package, and its two files."""
    (folder / "mypkg").mkdir()
    shutil.copy(ROOT / "examples" / "integrations" / "net.py", folder / "mypkg" / "ops.py")
    sys.path.insert(0, str(folder))
    ops = importlib.import_module("mypkg.ops")
    ops.save(folder / "model.onnx")
    ops.save(folder / "labelled.onnx", labels=True)


if __name__ == "__main__":
    section, folder = sys.argv[1:]
    if section == "prepare":
        prepare(Path(folder))
    else:
        os.chdir(folder)
        given = GIVEN_OPTIMUM if section == "optimum" else GIVEN
        exec(compile(given + blocks()[section], section, "exec"), {"__name__": "__page__"})
