"""What the forward-mode derivative of a transformer costs beside its forward and beside eager's.

    python -m benchmarks.tangents [--layers 2 4] [--runs 15]

The forward file, the tangent file (all parameters move) and eager's torch.func.jvp run in turns on one thread; each ratio is
the median of those of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import onnx_ir as ir
import onnxruntime
import torch
import transformers

import exporter
from benchmarks._report import Figure, tell
from symbolics.node.metadata import read_state, tangents_of

#: Tangent nodes / forward nodes.
NODES = 3.0


class Logits(torch.nn.Module):
    """A GPT-2 of few and narrow layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=64, n_embd=128, n_layer=layers, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 (batch, length); the logits, float32 (batch, length, words)."""
        return self.model(input_ids=ids).logits


def session_of(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def rounds(functions: list[Callable[[], object]], runs: int) -> list[list[float]]:
    """Seconds of each function in each round, after one that does not count."""
    found: list[list[float]] = []
    for _ in range(runs + 1):
        found.append([])
        for function in functions:
            start = time.perf_counter()
            function()
            found[-1].append(time.perf_counter() - start)
    return found[1:]


def row(layers: int, runs: int) -> list[Figure]:
    """The figures of one model."""
    torch.manual_seed(0)
    model, ids = Logits(layers).eval(), torch.randint(0, 256, (4, 64))
    program = exporter.export(model, (ids,))
    start = time.process_time()
    graph = exporter.build_tangent_graph(program)
    build = time.process_time() - start
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    moves = {name: torch.randn_like(p) for name, p in parameters.items()}
    pairing = tangents_of(graph)
    assert pairing is not None
    of = {entry.initializer: name for name, entry in (read_state(graph.metadata_props) or {}).items() if name in moves}
    feeds = {program.model.graph.inputs[0].name: ids.numpy()}
    tangents = {given: moves[of[name]].numpy() for name, given in pairing.inputs.items()}
    forward, tangent = session_of(program.model), session_of(graph)

    def eager() -> None:
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.func.jvp(lambda p: torch.func.functional_call(model, p, (ids,)), (parameters,), (moves,))

    spent = rounds([lambda: forward.run(None, feeds), lambda: tangent.run(None, {**feeds, **tangents}), eager], runs)
    nodes = len(list(graph.graph.all_nodes())) / len(list(program.model.graph.all_nodes()))
    name = f"GPT-2, {layers} layers"
    return [
        Figure(f"{name}: tangent nodes / forward nodes", nodes, "ratio", NODES),
        Figure(f"{name}: build", build, "s", None),
        Figure(f"{name}: tangent / forward, time", statistics.median(t / f for f, t, _ in spent), "ratio", None, runs),
        Figure(f"{name}: tangent / eager's jvp, time", statistics.median(t / e for _, t, e in spent), "ratio", None, runs),
    ]


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return tell("tangents", [figure for layers in options.layers for figure in row(layers, options.runs)])


if __name__ == "__main__":
    sys.exit(main())
