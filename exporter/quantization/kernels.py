"""Which products onnxruntime's CPU runs in integers, asked from onnxruntime itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime

from symbolics.errors import ExportError
from symbolics.graph.values import is_python_op
from symbolics.graph.walk import walk

__all__ = ["kernels_of"]

_INTEGER = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulNBits", "ConvInteger", "MatMulInteger"}


def kernels_of(model: ir.Model, nodes: Iterable[ir.Node]) -> dict[ir.Node, str] | str:
    """The integer kernel of each node that has one, once onnxruntime has optimised the model for this machine's CPU; or why that is not known.

    Raises:
        ExportError: onnxruntime does not open the model.
    """
    if any(is_python_op(node) for node in walk(model.graph)):
        return "not asked: the model has PythonOps"  # a session would need allow=
    data = ir.to_proto(model).SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        try:
            _open(data, path)
            optimized = onnx.load(path, load_external_data=False)
        except Exception:
            try:
                _open(data)
            except Exception as error:
                raise ExportError(f"onnxruntime does not open the quantised model: {error}") from error
            return "not known: onnxruntime could not write its optimised model into the temporary folder"
    made = [node for node in optimized.graph.node if node.op_type in _INTEGER]
    named = {node.name: node.op_type for node in made if node.name}
    reads = {name: node.op_type for node in made for name in (*node.input, *node.output)}
    found = {}
    for node in nodes:
        # A matrix product keeps its name, a convolution what it reads: two of one weight are told apart where that can be.
        kernel = named.get(node.name or "") or next(filter(None, map(reads.get, _names(node))), "")
        if kernel:
            found[node] = kernel
    return found


def _open(data: bytes, optimized: Path | None = None) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _names(node: ir.Node) -> list[str]:
    """The values by which a product is found again: its levels, and what it gives."""
    makers = [value.producer() for value in node.inputs[1:2] if value is not None]
    held = [maker.inputs[0] for maker in makers if maker is not None and maker.op_type == "DequantizeLinear"]
    levels = [value.name or "" for value in held if value is not None and value.is_initializer()]
    return levels or [node.outputs[0].name or "", *(use.node.outputs[0].name or "" for use in node.outputs[0].uses())]
