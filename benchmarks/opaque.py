"""What an opaque module costs beside eager's call of it, and which of its tensors are copied. Run: python -m benchmarks.opaque

A small Linear and ReLU, twenty of them one after the other. The sides take turns of a few runs; medians of processor time. How much is copied shows where the
tensors are large: time above eager's in copies of the one tensor that is large.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import onnxruntime
import torch
from torch import nn

import exporter
from benchmarks._report import Figure, tell
from benchmarks.dispatch import alternate, reuse_memory

MODULES = 20


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def options_of() -> onnxruntime.SessionOptions:
    options = exporter.session_options(allow=[Block])
    options.intra_op_num_threads = 1
    return options


def forward_of(program: exporter.Program, x: torch.Tensor) -> Callable[[], object]:
    """A run of the file, its tensors bound where they are."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options_of())
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    binding = session.io_binding()
    binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
    binding.bind_output(session.get_outputs()[0].name)
    return lambda: session.run_with_iobinding(binding)


def training_of(program: exporter.Program, x: torch.Tensor, seed: torch.Tensor) -> Callable[[], object]:
    """A run of the file and its gradients."""
    session = exporter.inference_session(exporter.build_gradient_graph(program), sess_options=options_of())
    feeds = {each.name: value.numpy() for each, value in zip(session.get_inputs(), (x, seed), strict=True)}
    return lambda: session.run(None, feeds)


def sides_of(model: nn.Sequential, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The file and eager, forward alone and with its gradients; and eager that calls the engine once a module, as a node apart has to."""
    program, leaf = exporter.export(model, (x,), opaque=[Block]), x.clone().requires_grad_()
    seed = torch.ones_like(model(x).detach())
    parameters = [list(each.parameters()) for each in model]

    def eager() -> None:
        with torch.no_grad():
            model(x)

    def alone() -> None:
        pairs, y = [], x
        for module in model:
            y = y.detach().requires_grad_()
            pairs.append((y, out := module(y)))
            y = out
        gradient = seed
        for (y, out), own in zip(reversed(pairs), reversed(parameters), strict=True):
            gradient, *_ = torch.autograd.grad(out, [y, *own], gradient)

    return {
        "forward": forward_of(program, x),
        "eager": eager,
        "pair": training_of(program, x, seed),
        "eager pair": lambda: torch.autograd.grad(model(leaf), [leaf, *model.parameters()], seed),
        "an engine call each": alone,
    }


def small(rounds: int) -> list[Figure]:
    found = alternate(sides_of(nn.Sequential(*(Block(8, 8) for _ in range(MODULES))), torch.randn(2, 8)), 20, rounds)
    found = {name: seconds / MODULES * 1e6 for name, seconds in found.items()}
    note = ", ".join(f"{name} {value:.1f} us" for name, value in found.items())
    return [
        Figure("forward, above eager's", found["forward"] - found["eager"], "us", 10.0, rounds, note),
        Figure("forward, of eager's", found["forward"] / found["eager"], "ratio", None, rounds),
        Figure("forward and backward, above eager's", found["pair"] - found["eager pair"], "us", 10.0, rounds),
        Figure("forward and backward, of eager's", found["pair"] / found["eager pair"], "ratio", None, rounds),
        Figure("forward and backward, above an engine call each", found["pair"] - found["an engine call each"], "us", 10.0, rounds),
    ]


def large(rounds: int) -> list[Figure]:
    """The one large tensor, and how many copies of it are told of: one each of the outputs, and in training of what autograd keeps."""
    figures = []
    shapes = {"weights of 16 MB": (2048, 2048, 1), "16 MB of input and of output": (64, 64, 1 << 16)}
    for name, (inside, outside, rows) in shapes.items():
        model, x = nn.Sequential(Block(inside, outside)), torch.randn(rows, inside)
        tensor = max((*model.parameters(), x), key=torch.Tensor.numel).detach()
        sides, target = sides_of(model, x), torch.empty_like(tensor)
        found = alternate({**sides, "memcpy": lambda target=target, tensor=tensor: target.copy_(tensor)}, 1, rounds)
        note = ", ".join(f"{side} {seconds * 1e3:.1f} ms" for side, seconds in found.items())
        for what, one, two in (("forward", "forward", "eager"), ("forward and backward", "pair", "eager pair")):
            figures.append(Figure(f"{name}: {what}", (found[one] - found[two]) / found["memcpy"], "memcpys", None, rounds, note))
            note = ""
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reuse_memory()
    return tell("opaque", [*small(options.rounds), *large(options.rounds)])


if __name__ == "__main__":
    sys.exit(main())
