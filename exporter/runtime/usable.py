"""Whether a model is of use: onnx.checker passes it, and onnxruntime opens it: each node has a kernel for its types, and the shapes that the file says agree.

The session is made and never run. It has no values of large weights, and folds no constants. What onnxruntime computes of shapes is not limited.
It imports no class that the file names: a file from elsewhere is checked without being trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from exporter.files.valid import check_valid, node_in
from exporter.runtime.library import available
from exporter.runtime.prepare import has_python_ops, prepare
from exporter.runtime.refusals import refusal
from symbolics.errors import ExportError, PythonopError

__all__ = ["check_usable", "open_only"]

#: From so many nodes on without onnxruntime's optimizations, whose time grows faster than the number of nodes; and not at all.
_PLAIN, _MOST = 5_000, 50_000


def check_usable(model: ir.Model) -> str:
    """Run onnx.checker (``full_check=True``), open the model on onnxruntime's CPU provider, and forget the session.

    A model without PythonOps is opened by stock onnxruntime as it is, one with PythonOps as `exporter.inference_session` arranges it.

    Returns:
        Why it was not opened, "" where it was: onnxruntime or the native library is not there, or the model has more than 50,000 nodes.

    Raises:
        ExportError: One of them refuses it; the message names the node.
    """
    proto = check_valid(model)
    count = sum(1 for _ in model.graph.all_nodes())
    if count > _MOST:
        return f"it has {count:,} nodes, more than {_MOST:,}"
    problem = available(proto)
    if problem:
        return problem
    try:
        _open(proto, optimizes=count <= _PLAIN)
    except PythonopError as error:
        raise ExportError(f"onnxruntime cannot open the model: {error}") from error
    except Exception as error:
        told = refusal(error)
        if told is None:
            raise
        raise ExportError(f"{told}{node_in(model, str(error))}") from error
    return ""


def _open(proto: onnx.ModelProto, optimizes: bool) -> None:
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    options.intra_op_num_threads = 1  # it makes no threads that nobody uses
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if python_ops := has_python_ops(proto):
        prepare(proto)
    open_only(proto, options, ["CPUExecutionProvider"], python_ops=python_ops, disabled_optimizers=["ConstantFolding"])


def open_only(proto: onnx.ModelProto, options: Any, providers: Sequence[Any] | None, *, python_ops: bool, **more: Any) -> Any:
    """An onnxruntime.InferenceSession that is not for running: nobody looks for the Functions of its PythonOps.

    Args:
        proto: The model, arranged for onnxruntime.
        options, providers, more: As onnxruntime.InferenceSession has them.
        python_ops: Whether it has PythonOps.

    Raises:
        PythonopError: What is wrong with a node of ours.
        Exception: What onnxruntime raises.
    """
    import onnxruntime

    errors: Mapping[str, BaseException] = {}
    if python_ops:
        from exporter.runtime.unresolved import know_python_ops

        errors = know_python_ops(options)
    try:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers, **more)
    except Exception as error:
        if (own := next(iter(errors.values()), None)) is None:
            raise
        raise own from error
