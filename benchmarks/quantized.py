"""A model in integers beside the same model in float, both on onnxruntime's CPU. Run: python -m benchmarks.quantized

One thread; the sides take turns, medians of processor time. Limits hold where the processor multiplies bytes (VNNI, AMX).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def session_of(model: nn.Module, x: torch.Tensor, integers: bool, level: str = "", **options: Any) -> tuple[Callable[[], object], str, int]:
    """A run, how many products are integers, and the bytes of the file; ``level`` is the accuracy level of products with weights of 4 bits."""
    program = exporter.export(model.eval(), (x,), dynamo=False)
    told = ""
    if integers:
        program = exporter.quantize(program, **options)
        told = str(program).splitlines()[0]
    data = program.model_proto.SerializeToString()
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads, session_options.log_severity_level = 1, 4
    if level:
        session_options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
    session = onnxruntime.InferenceSession(data, session_options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds), told, len(data)


def four_bits(rounds: int, bytewise: bool) -> list[Figure]:
    """Linear layers with float activations and weights of 4 bits, at batch 1; of the error, what rounding weights and the kernel's 8 bits make of outputs."""
    found = []
    model, shape = linears(False)
    x = torch.randn(1, *shape)
    for level, limit, what in (("4", 0.3, "8 bits inside"), ("1", 0.8, "float inside")):
        sides, notes, sizes = {}, [], []
        for integers in (False, True):
            name = "integers" if integers else "float"
            sides[name], told, size = session_of(
                model, x, integers, level if integers else "", **({"weights": "int4", "group": 32} if integers else {})
            )
            notes.append(told)
            sizes.append(size)
        times = alternate(sides, 32, rounds)
        one, other = (np.asarray(side()) for side in sides.values())
        error = float(np.linalg.norm(one - other) / np.linalg.norm(one))
        note = f"{notes[1]}; float {times['float'] * 1e3:.2f} ms; file {sizes[1] / sizes[0]:.2f} of float's; outputs {error:.1%} off (rms)"
        ratio = times["integers"] / times["float"]
        found.append(
            Figure(
                f"linear layers, weights of 4 bits, {what}, batch 1: over float", ratio, "ratio", limit if bytewise else None, rounds, note
            )
        )
    return found


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
    figures += four_bits(options.rounds, bytewise)
    assert np.isfinite([figure.value or 0.0 for figure in figures]).all()
    return tell("quantized", figures)


if __name__ == "__main__":
    sys.exit(main())
