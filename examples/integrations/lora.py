"""LoRA on an ONNX file that came without PyTorch code: PEFT trains the adapters alone, and what was learned goes back into a file.

python -m examples.integrations.lora
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime
import torch
from peft import LoraConfig, get_peft_model

import exporter
from examples.integrations.net import compare, points


def foreign() -> onnx.ModelProto:
    """What another tool wrote: two layers, their weights under the names that it gave them."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        net (float[N, 8] x) => (float[N, 3] y) { a = Gemm <transB = 1> (x, w, b)  h = Relu(a)  y = Gemm <transB = 1> (h, v) }""")
    names, generator = {"w": "encoder.weight", "b": "encoder.bias", "v": "head.weight"}, torch.Generator().manual_seed(0)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for name, shape in zip(names.values(), ((16, 8), (16,), (3, 16)), strict=True):
        values = torch.randn(shape, generator=generator) / 4
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.numpy(), name))
    return model


class Eager(torch.nn.Module):
    """The same network in PyTorch, for comparison."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3, bias=False)
        self.load_state_dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.encoder(x)))


def train(model: torch.nn.Module) -> tuple[torch.nn.Module, list[float]]:
    """Adapters of rank 4 on two matrices. A file has parameters, no layers: target_parameters, not target_modules."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_parameters=["encoder.weight", "head.weight"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    x, y = points()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(adapted(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return adapted, losses


def main() -> None:
    module = exporter.load(foreign())
    eager = Eager(module.state_dict())
    adapted, losses = train(module)
    trained, total = adapted.get_nb_trainable_parameters()
    print(f"LoRA: {trained} of {total} parameters, {compare(losses, train(eager)[1])}")
    x = points()[0]
    wanted = adapted(x).detach().numpy()
    with tempfile.TemporaryDirectory() as folder:
        adapted.merge_and_unload().save(path := Path(folder, "tuned.onnx"))
        (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    print(f"LoRA: merged into a file that plain onnxruntime runs, largest difference {abs(found - wanted).max():.1e}")


if __name__ == "__main__":
    main()
