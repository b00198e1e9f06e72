"""A model in integers beside the same model in float, both on onnxruntime's CPU. Run: python -m benchmarks.quantized

One thread; the sides take turns, medians of processor time. Limits hold where the processor multiplies bytes (VNNI, AMX).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnxruntime
import torch
from torch import nn

import exporter
from benchmarks._report import Figure, tell
from benchmarks.dispatch import alternate


class Rounded(nn.Module):
    """8 bits for what it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.04, 128, 0, 255)


class RoundedWeight(nn.Module):
    """8 bits for a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.scale = float(weight.abs().max()) / 127

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(weight, self.scale, 0, -128, 127)


def rounded(layer: nn.Module, yes: bool) -> list[nn.Module]:
    if not yes:
        return [layer]
    nn.utils.parametrize.register_parametrization(layer, "weight", RoundedWeight(layer.weight.detach()))  # type: ignore[arg-type, operator]
    return [Rounded(), layer]


def convolutions(yes: bool) -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = []
    for inside, outside, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [*rounded(nn.Conv2d(inside, outside, 3, stride, 1), yes), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, *([Rounded()] if yes else [])), (3, 64, 64)


def linears(yes: bool) -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = []
    for inside, outside in ((256, 1024), (1024, 1024), (1024, 1024), (1024, 64)):
        layers += [*rounded(nn.Linear(inside, outside), yes), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), (256,)


def session_of(model: nn.Module, x: torch.Tensor, integers: bool) -> tuple[Callable[[], object], str, int]:
    """A run, how many products are integers, and the bytes of the file."""
    program = exporter.export(model.eval(), (x,), dynamo=False)
    told = ""
    if integers:
        program = exporter.quantize(program)
        told = str(program).splitlines()[0]
    data = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds), told, len(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    bytewise = any(flag in facts for flag in ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp"))
    figures = []
    for name, make, limit in (("convolutions", convolutions, 1 / 2.5), ("linear layers", linears, 1 / 4)):
        for batch in (1, 32):
            sides, notes, sizes = {}, [], []
            for integers in (False, True):
                model, shape = make(integers)
                sides["integers" if integers else "float"], told, size = session_of(model, torch.randn(batch, *shape), integers)
                notes.append(told)
                sizes.append(size)
            found = alternate(sides, max(1, 32 // batch), options.rounds)
            note = f"{notes[1]}; float {found['float'] * 1e3:.2f} ms; file {sizes[1] / sizes[0]:.2f} of float's"
            ratio = found["integers"] / found["float"]
            figures.append(
                Figure(f"{name}, batch {batch}: integers over float", ratio, "ratio", limit if bytewise else None, options.rounds, note)
            )
    assert np.isfinite([figure.value or 0.0 for figure in figures]).all()
    return tell("quantized", figures)


if __name__ == "__main__":
    sys.exit(main())
