"""main(FILE, DATA): forward and gradients on both runtimes, for a process without torch.

DATA is an .npz with the inputs in order (``input0``, ...) and a cotangent for each float output (``cotangent0``, ...). Prints JSON: runtime ->
the largest difference to what it holds in ``output0``, ... and ``gradient.NAME``, relative to the largest value of each, 0.1 at least.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

import exporter
from exporter.runtime.mended_operators import GatherElements
from symbolics.node.metadata import pairing_of, results_of


def main(path: str, data: str) -> None:
    """Compare."""
    held = dict(np.load(data))
    training = exporter.build_gradient_graph(path)
    pairing, proto = pairing_of(training), ir.to_proto(training)
    assert pairing is not None
    inputs = [value.name for value in training.graph.inputs if value.name not in pairing.inputs.values()]
    results = [value.name for value in results_of(ir.load(path))]
    feeds = {name: held[f"input{i}"] for i, name in enumerate(inputs)}
    feeds |= {pairing.inputs[name]: held[f"cotangent{i}"] for i, name in enumerate(results) if name in pairing.inputs}
    names = [value.name for value in training.graph.outputs]
    wanted = {name: held[f"output{i}"] for i, name in enumerate(results)}
    wanted |= {pairing.outputs[key[9:]]: value for key, value in held.items() if key.startswith("gradient.") and key[9:] in pairing.outputs}
    wanted |= {pairing.outputs[name]: held[f"gradient{i}"] for i, name in enumerate(inputs) if f"gradient{i}" in held}
    missing = [key for key in held if key.startswith("gradient.") and key[9:] not in pairing.outputs]
    differences: dict[str, float | list[str]] = {"missing": missing}
    for runtime, run in (
        ("onnxruntime", onnxruntime.InferenceSession(proto.SerializeToString()).run),
        ("reference", ReferenceEvaluator(inline_local_functions(proto), new_ops=[GatherElements]).run),
    ):
        found = dict(zip(names, run(None, feeds), strict=True))
        differences[runtime] = max(
            float(np.abs(found[name] - value).max(initial=0) / max(0.1, np.abs(value).max(initial=0))) for name, value in wanted.items()
        )
    assert sys.modules["torch"] is None
    print(json.dumps(differences))
