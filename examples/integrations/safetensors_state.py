"""safetensors: weights of a loaded file and the state of a training step, saved, read again, and gone on from.

python -m examples.integrations.safetensors_state
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

import exporter
from examples.integrations.net import Net, Softsign, points, save


def run(step: exporter.TrainingStep, state: dict[str, np.ndarray], count: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """The state after so many steps, and their losses."""
    x, y = (value.numpy() for value in points())
    session = exporter.inference_session(step, allow=[Softsign])
    names, losses = [output.name for output in session.get_outputs()], []
    for _ in range(count):
        found = dict(zip(names, session.run(None, {**state, "x": x, "target": y}), strict=True))
        state = {**state, **{name.removesuffix(".next"): value for name, value in found.items() if name.endswith(".next")}}
        losses.append(float(found["loss"]))
    return state, losses


def main() -> None:
    x, y = points()
    with tempfile.TemporaryDirectory() as folder:
        save(path := Path(folder, "model.onnx"))
        module = exporter.load(path, allow=[Softsign])
        with torch.no_grad():
            module.second.weight.mul_(2)
        safetensors.torch.save_file(module.state_dict(), weights := Path(folder, "model.safetensors"))
        eager, again = Net(), exporter.load(path, allow=[Softsign])
        for model in (eager, again):  # the names are those of the model that was exported
            model.load_state_dict(safetensors.torch.load_file(weights))
        print(f"safetensors: a file's weights in eager PyTorch, largest difference {(eager(x) - module(x)).abs().max():.1e}")
        again.save(tuned := Path(folder, "tuned.onnx"))
        same = torch.equal(exporter.load(tuned, allow=[Softsign])(x), module(x))
        print(f"safetensors: and in a new file, equal to the bit: {same}")

        step = exporter.export_training_step(Net(), (x,), loss=torch.nn.functional.cross_entropy, targets=(y,))
        state, _ = run(step, step.initial, 10)
        safetensors.numpy.save_file(state, training := Path(folder, "training.safetensors"))
        _, wanted = run(step, state, 10)
        _, losses = run(step, safetensors.numpy.load_file(training), 10)
        print(f"safetensors: a training step goes on from loss {losses[0]:.4f} to {losses[-1]:.4f}, equal to the bit: {losses == wanted}")


if __name__ == "__main__":
    main()
