"""Small files as a release writes them. `python -m tests.exporter.files.releases.make FOLDER`, on that release, makes its folder, which stays as it is.

Weights are numbers that eager mode has without the file, so that every later release can be held against eager mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import torch

import exporter
from tests.exporter.files.releases.functions import Block, Model, Quantised, Sorted, batch


def main(folder: Path) -> None:
    """Write the files of this release."""
    folder.mkdir(parents=True)
    x, target = batch()
    open_sizes = ({0: torch.export.Dim("n")},)
    for name, dynamo in (("dynamo", True), ("torchscript", False)):
        program = exporter.export(Model(), (x,), dynamo=dynamo, dynamic_shapes=open_sizes)
        program.save(folder / f"forward-{name}.onnx")
    gradient = exporter.build_gradient_graph(program.model, wrt=["x"])
    exporter.Program(gradient).save(folder / "gradient.onnx")
    outputs = [value.name for value in gradient.graph.outputs if value.name not in {v.name for v in program.model.graph.outputs}]
    second = exporter.build_gradient_graph(gradient, wrt=["x"], outputs=outputs)
    exporter.Program(second).save(folder / "second.onnx")
    exporter.export(Model(), (x,), dynamo=False, portable=True).save(folder / "portable.onnx")
    for name, portable in (("step", False), ("portable-step", True)):
        step = exporter.export_training_step(
            Model(), (x,), loss=torch.nn.functional.mse_loss, targets=(target,), optimizer="adamw", dynamo=False, portable=portable
        )
        step.save(folder / f"{name}.onnx")
    exporter.export(Sorted(), (x,), dynamo=False, opaque=[Block]).save(folder / "opaque.onnx")
    exporter.quantize(exporter.export(Quantised(), (x,), dynamo=False)).save(folder / "quantised.onnx")
    for path in folder.glob("*.onnx"):
        _without_paths(path)


def _without_paths(path: Path) -> None:
    """torch writes stack traces with the folders of whoever exports."""
    proto = onnx.load(path)
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        kept = [entry for entry in node.metadata_props if "stack_trace" not in entry.key]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(proto, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
