"""Train a saved file with any optimizer of torch: no model code, a file and onnxruntime.

    python -m examples.train                       # BLOOM, exported here, trained from its file beside eager PyTorch
    python -m examples.train --picture curves.png  # both curves in one picture
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch

import exporter
from examples import demo


def train(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, steps: int) -> list[float]:
    """The loss of each step of next-token prediction."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(ids, mask)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    demo.quiet()

    case = demo.bloom()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bloom.onnx")
        exporter.export(copy.deepcopy(case.model), case.args).save(path)
        module = exporter.load(path, allow=case.allow)
    from_file = train(module, *case.args, options.steps)
    eager = train(case.model, *case.args, options.steps)
    gap = max(abs(a - b) for a, b in zip(from_file, eager, strict=True))
    print(f"loss {from_file[0]:.4f} -> {from_file[-1]:.4f} from the file, {eager[0]:.4f} -> {eager[-1]:.4f} in eager; largest gap {gap:.1e}")

    # What was learned goes back into the model that was exported.
    case.model.load_state_dict(module.state_dict())
    if options.picture is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(eager, linewidth=5, color="#cfd8e3", label="eager PyTorch")
        axes.plot(from_file, linewidth=1.2, color="#0969da", label="loaded file, onnxruntime")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend(frameon=False)
        figure.savefig(options.picture, dpi=120)
        print(f"wrote {options.picture}")
    return int(not (from_file[-1] < from_file[0] / 2 and gap < 1e-2))


if __name__ == "__main__":
    sys.exit(main())
