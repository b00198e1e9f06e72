"""Models from text, and their gradients against differences."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.check import check_gradients

OPSET = 21


@functools.cache
def _introduced() -> dict[str, int]:
    """Standard operator -> the opset that brought it."""
    found: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found[schema.name] = min(schema.since_version, found.get(schema.name, schema.since_version))
    return found


def opset_of(body: str, least: int = OPSET) -> int:
    """The opset of a model of text: ``least``, or a newer one that brought an operator of it."""
    return max([least, *(_introduced().get(name, 0) for name in re.findall(r"\w+", body))])


def model_of(signature: str, body: str, opset: int | None = None) -> onnx.ModelProto:
    """``model_of("float[2,3] x", "y = Relu(x)")``: the outputs are the values y, or y and z, of unknown shape; without an opset, `opset_of`."""
    outputs = "float y" if "z =" not in body and "z, " not in body else "float y, float z"
    text = f'<ir_version: 10, opset_import: ["" : {opset or opset_of(body)}]> model ({signature}) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def check(signature: str, body: str, inputs: Mapping[str, np.ndarray] | None = None, order: int = 2, **options) -> None:
    """Gradients of a model of text against finite differences, to second order."""
    check_gradients(model_of(signature, body), order, inputs=inputs, **options)


def run(model: ir.Model, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The outputs of a model by stock onnxruntime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()] if outputs is None else list(outputs)
    return dict(zip(names, session.run(names, dict(feeds))))


def gradients(signature: str, body: str, feeds: Mapping[str, np.ndarray], **options) -> dict[str, np.ndarray]:
    """All outputs of the training graph of a model of text."""
    training = build_gradient_graph(model_of(signature, body), **options)
    onnx.checker.check_model(ir.to_proto(training), full_check=True)
    return run(training, feeds)
