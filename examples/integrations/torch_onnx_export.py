"""torch.onnx.export as a library calls it, which knows nothing of pythonop: one line at the start of the process.

python -m examples.integrations.torch_onnx_export
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import exporter
from examples.integrations.net import Net, Softsign, points


def library(model: torch.nn.Module, x: torch.Tensor, path: Path, dynamo: bool) -> None:
    """Somebody else's code."""
    names = {"input_names": ["x"], "output_names": ["y"]}
    shapes = {"dynamic_shapes": ({0: "batch"},)} if dynamo else {"dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, (x,), path, dynamo=dynamo, **names, **shapes)


def main() -> None:
    exporter.install()  # with exporter.hook(): ... does it for a block
    model, (x, _) = Net().eval(), points()
    with tempfile.TemporaryDirectory() as folder:
        for dynamo in (True, False):
            library(model, x[:2], path := Path(folder, "model.onnx"), dynamo)
            session = exporter.inference_session(path, allow=[Softsign])
            gap = abs(session.run(None, {"x": x.numpy()})[0] - model(x).detach().numpy()).max()
            module = exporter.load(path, allow=[Softsign])
            module(x).square().sum().backward()
            model.zero_grad()
            model(x).square().sum().backward()
            of = max((a.grad - b.grad).abs().max() for a, b in zip(module.parameters(), model.parameters(), strict=True))
            print(f"torch.onnx.export(dynamo={dynamo}): outputs differ by {gap:.1e} from eager, gradients by {of:.1e}")
    exporter.uninstall()


if __name__ == "__main__":
    main()
