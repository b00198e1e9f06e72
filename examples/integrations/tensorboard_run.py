"""TensorBoard: the loss, the weights and gradients of a loaded file, and the graph of the file itself.

python -m examples.integrations.tensorboard_run runs && tensorboard --logdir runs
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import exporter
from examples.integrations.net import Softsign, points, save


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save(path := folder / "model.onnx")
    module = exporter.load(path, allow=[Softsign])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    x, y = points()
    with SummaryWriter(str(folder)) as writer:
        writer.add_onnx_graph(str(path))  # not add_graph, which traces PyTorch code: there is none
        for step in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss, step)
            for name, parameter in module.named_parameters():
                writer.add_histogram(name, parameter, step)
                writer.add_histogram(f"{name}.grad", parameter.grad, step)

    log = EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in log.Scalars("loss")]
    operators = sorted({node.op for node in log.Graph().node} - {"Variable"})
    print(f"TensorBoard: {len(losses)} losses from {losses[0]:.4f} to {losses[-1]:.4f}, {len(log.Tags()['histograms'])} histograms")
    print(f"TensorBoard: the graph has {', '.join(operators)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
